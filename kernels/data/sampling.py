"""Data types of sampling."""

from __future__ import annotations

import enum
from typing import NamedTuple

from torch import Tensor

NOT_FINITE, NOTHING_ALLOWED = -1, -2  # in place of a token: a logit is NaN or inf; every logit is -inf


class Part(enum.Enum):
    """The rows that a call samples."""

    ALL = 0
    PLAIN = 1  # those without top_k, top_p and min_p
    REST = 2  # the others, and those with a mask


class SamplingRows(NamedTuple):
    """Parameters of the sampling of B rows of logits. The order is temperature, min_p, top_k, top_p."""

    temperature: Tensor  # [B] float32; 0: the argmax, lowest id on ties
    top_k: Tensor  # [B] int32; <= 0: all tokens
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int32 or int64: noise depends on seed, position and token id
