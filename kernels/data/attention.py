"""Arguments of attention: what a layer's attention is, and what a step's sequences attend to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from kernels.data.block_sparse import BlockSparse


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """A layer's attention: the same for all of its steps. H query heads, Hkv KV heads.

    The reference implementation computes all arguments. A kernel names those that it computes, see `KnownArgs`: calls
    with others take a kernel that knows them, so an argument that is added here needs one kernel to start with.
    """

    scale: float  # of scores
    window: int = 0  # a query sees keys at a distance below it; 0: all
    soft_cap: float = 0.0  # c > 0: scores become c · tanh(score / c)
    alibi_slopes: Tensor | None = None  # [H] float32: slope · -distance is added to scores
    sinks: Tensor | None = None  # [H] float32: a score per head that takes part in the softmax without a value
    sparse: BlockSparse | None = None  # the blocks of keys that are attended to; None: all
    kv_scale: Tensor | None = None  # [2, Hkv] float32: factors of cached keys and values; for e4m3 caches
    causal: bool = True  # False: queries see later keys too, and their whole sequence is one step's; not with `sparse`
    # [H, 2 R + 1] float32: added to scores, by the key's position less the query's from -R to R; beyond, as at the ends
    distance_bias: Tensor | None = None


class KnownArgs:
    """The optional arguments of `AttentionArgs` that a kernel computes."""

    def __init__(self, *names: str) -> None:
        optional = {field.name: field.default for field in fields(AttentionArgs) if field.name != "scale"}
        assert optional.keys() >= set(names)
        self._others = {name: default for name, default in optional.items() if name not in names}

    def cover(self, args: AttentionArgs) -> bool:
        """Return whether the kernel computes all that is asked for."""
        return not self._others or not self.missing(args)

    def missing(self, args: AttentionArgs) -> list[str]:
        """Return the names of the arguments that are given and not computed."""
        return [name for name, default in self._others.items() if _differs(getattr(args, name), default)]


def _differs(value: Any, default: Any) -> bool:
    return value is not default and (isinstance(value, Tensor) or bool(value != default))


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The cached keys and values of B sequences."""

    key_cache: Tensor  # [num_blocks, Hkv, block_size, D]
    value_cache: Tensor  # [num_blocks, Hkv, block_size, D]
    block_tables: Tensor  # [R, max_blocks] int32
    rows: Tensor  # [B] int32: sequence i uses block_tables[rows[i]]
    lens: (
        Tensor  # [B] int32: context lengths with the queries' own tokens, whose K and V are already stored; 0: padding
    )


@dataclass(frozen=True, slots=True)
class PagedLatents:
    """The cached latents of B sequences. A latent has L channels, and R that carry its position."""

    cache: Tensor  # [num_blocks, 1, block_size, L + R]
    block_tables: Tensor  # [R, max_blocks] int32
    rows: Tensor  # [B] int32, as in `PagedContext`
    lens: Tensor  # [B] int32, as in `PagedContext`


@dataclass(frozen=True, slots=True)
class NewIndexKeys:
    """The keys by which a step's T tokens are chosen (see `kernels.reference.index`) before their LayerNorm and
    rotation, and where they go.
    """

    key: Tensor  # [T, D]
    norm_weight: Tensor  # [D]
    norm_bias: Tensor  # [D]
    eps: float
    positions: Tensor  # [T] int32 or int64
    cos_sin: Tensor  # [max_position, R] float32
    cache: Tensor  # [num_blocks, 1, block_size, D]
    slot_mapping: Tensor  # [T] int64; -1: nowhere
    interleaved: bool = False  # as in `rope`


@dataclass(frozen=True, slots=True)
class NewLatents:
    """The latents of a step's T tokens before their norm and rotation, and where they go."""

    latent: Tensor  # [T, L + R]
    norm_weight: Tensor  # [L]
    eps: float
    positions: Tensor  # [T] int32 or int64
    cos_sin: Tensor  # [max_position, R] float32
    cache: Tensor  # [num_blocks, 1, block_size, L + R]
    slot_mapping: Tensor  # [T] int64; -1: nowhere
    interleaved: bool = False  # as in `rope`
