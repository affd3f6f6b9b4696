"""Data types of the paged KV cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The least and the largest scale of an e4m3 cache. Within them kernels may divide without regard to overflow.
KV_SCALES = (1e-15, 1e15)


class WideCopy(NamedTuple):
    """The upcast copy that also receives the keys and values stored in an e4m3 cache: pages as those of
    `widen_pages`.
    """

    pages: Tensor  # [2, P, Hkv, page, D], contiguous, of a dtype that holds e4m3 exactly
    slots: Tensor  # [T] int64: page * page size + offset; -1: of tokens that do not go there
