"""Data types of the paged KV cache, and of the queries, keys and values on their way to it."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class KVSlots:
    """Destination of the keys and values of a step's T tokens."""

    key_cache: Tensor  # [num_blocks, Hkv, block_size, D]
    value_cache: Tensor  # [num_blocks, Hkv, block_size, D]
    slots: Tensor  # [T] int64: block id * block_size + offset; -1: nowhere
    kv_scale: Tensor | None = None  # [2, Hkv] float32: divisors of keys and values; for e4m3 caches
    wide: WideCopy | None = None  # what an e4m3 cache then holds goes there, too


@dataclass(frozen=True, slots=True)
class RopeArgs:
    """A layer's heads, and their norms and rotation: see `rope`."""

    num_heads: int
    num_kv_heads: int
    cos_sin: Tensor | None = None  # [max_position, rotary_dim] float32; None: no rotation
    q_norm: Tensor | None = None  # [D]: weight of the RMSNorm of each query head; None: no norm
    k_norm: Tensor | None = None  # [D]: the same of each key head
    eps: float = 1e-6
    interleaved: bool = False  # pairs are channels 2i and 2i + 1
