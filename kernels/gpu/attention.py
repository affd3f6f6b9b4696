"""Arguments of attention launchers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Output(NamedTuple):
    """Memory for the result of decode attention: floats, or codes with a scale for each head."""

    values: Tensor  # [B, H, D]
    scale: Tensor  # [B, H] or more columns, of the codes; for floats any tensor
    largest: float  # of the codes; 0: floats
    dtype: torch.dtype  # before it is quantised
