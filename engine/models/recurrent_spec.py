"""Recurrent layers described by numbers. They keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from engine.models.shard import Shard


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A part of a layer's block of states, see `kernels.data.state`."""

    shape: tuple[int, ...]
    dtype: Literal["model", "float32", "state"] = "model"  # state: see `RunnerOptions.state_dtype`


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """Base of all kinds of recurrent layers."""

    # What other layers have.
    rope: ClassVar[None] = None
    window: ClassVar[int] = 0
    kv_of: ClassVar[None] = None

    def state(self, block_size: int, max_drafts: int = 0) -> tuple[StateTensor, ...]:
        """Return the parts of a block. `max_drafts`: of a request, which may all be taken back."""
        raise NotImplementedError

    def for_rank(self, shard: Shard) -> RecurrentSpec:
        """Return one rank's part."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Numbers per token of the layer's largest intermediate results, for an estimate of memory."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """Gated short convolution (LFM2): C · conv(B · X), where B, C and X are projections of the hidden state."""

    channels: int
    kernel_size: int  # tokens that an output depends on, the newest included
    bias: bool = False  # of convolution and projections

    def state(self, block_size: int, max_drafts: int = 0) -> tuple[StateTensor, ...]:
        return (StateTensor((num_inputs(self.kernel_size + max_drafts), self.channels)),)

    def for_rank(self, shard: Shard) -> ShortConvSpec:
        return replace(self, channels=len(shard.span("hidden_size", self.channels)))

    @property
    def width(self) -> int:
        return 6 * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec(RecurrentSpec):
    """Gated delta net (Qwen3-Next, Qwen3.5), see `kernels.reference.delta_rule`. Each key head serves several
    consecutive value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel_size: int  # of the convolution of queries, keys and values
    norm_eps: float
    # The checkpoint has q, k, v and z in two tensors, b and a in two; "gates": b and a of each key head and its value
    # heads together; "fused": q, k, v and z, too. "tiled": the first value head of each key head, then the second of
    # each, and so on.
    parts: Literal["apart", "gates", "fused", "tiled"] = "apart"

    @property
    def conv_channels(self) -> int:
        """Numbers per token of all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state(self, block_size: int, max_drafts: int = 0) -> tuple[StateTensor, ...]:
        heads, size = self.num_value_heads, self.value_dim
        return (
            StateTensor((num_inputs(self.kernel_size + max_drafts), self.conv_channels)),
            StateTensor((heads, self.key_dim, size), "state"),
            StateTensor((block_size, self.num_key_heads, self.key_dim)),
            StateTensor((block_size, heads, size), "float32"),
            StateTensor((block_size, heads), "float32"),
        )

    def for_rank(self, shard: Shard) -> DeltaNetSpec:
        return replace(
            self,
            num_key_heads=len(shard.span("linear_num_key_heads", self.num_key_heads)),
            num_value_heads=len(shard.span("linear_num_value_heads", self.num_value_heads)),
        )

    @property
    def width(self) -> int:
        return 2 * self.conv_channels + 4 * self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """State-space layer (Mamba-2), see `kernels.reference.mamba2`. Each group serves several consecutive heads."""

    num_heads: int
    head_dim: int
    num_groups: int  # of B and C
    state_dim: int
    kernel_size: int  # of the convolution of x, B and C
    norm_eps: float
    num_norm_groups: int = 1  # groups of channels that are normalised; 0: the output is gated, without a norm
    gate_first: bool = True  # the norm is that of the gated output, else the norm's output is gated
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))  # of step sizes
    scales: tuple[float, float, float, float, float] = (1, 1, 1, 1, 1)  # of the projected z, x, B, C and steps

    @property
    def inner(self) -> int:
        """Numbers per token of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Numbers per token of x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    def state(self, block_size: int, max_drafts: int = 0) -> tuple[StateTensor, ...]:
        heads, size = self.num_heads, self.head_dim
        return (
            StateTensor((num_inputs(self.kernel_size + max_drafts), self.conv_channels)),
            StateTensor((heads, self.state_dim, size), "state"),
            StateTensor((block_size, self.num_groups, self.state_dim)),
            StateTensor((block_size, heads, size), "float32"),
            StateTensor((block_size, heads), "float32"),
        )

    def for_rank(self, shard: Shard) -> Mamba2Spec:
        heads = shard.span("mamba heads", self.num_heads)
        groups = shard.span("mamba groups", self.num_groups, replicate=True)
        norm_groups = self.num_norm_groups and max(self.num_norm_groups // shard.size, 1)
        return replace(self, num_heads=len(heads), num_groups=len(groups), num_norm_groups=norm_groups)

    @property
    def width(self) -> int:
        return 2 * self.conv_channels + 4 * self.inner + 72 * self.num_heads  # the last: of chunks, on GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaSpec(RecurrentSpec):
    """Kimi delta attention, see `kernels.reference.kda`."""

    num_heads: int
    head_dim: int  # of queries, keys and values
    kernel_size: int  # of the convolution of queries, keys and values
    norm_eps: float

    @property
    def conv_channels(self) -> int:
        """Numbers per token of all queries, keys and values."""
        return 3 * self.num_heads * self.head_dim

    def state(self, block_size: int, max_drafts: int = 0) -> tuple[StateTensor, ...]:
        heads, size = self.num_heads, self.head_dim
        return (
            StateTensor((num_inputs(self.kernel_size + max_drafts), self.conv_channels)),
            StateTensor((heads, size, size), "state"),
            StateTensor((block_size, heads, size)),
            StateTensor((block_size, heads, size), "float32"),
            StateTensor((block_size, heads, size), "float32"),
        )

    def for_rank(self, shard: Shard) -> KdaSpec:
        return replace(self, num_heads=len(shard.span("linear_num_heads", self.num_heads)))

    @property
    def width(self) -> int:
        return 4 * self.conv_channels


def num_inputs(count: int) -> int:
    """Return how many inputs of a convolution a block holds. It needs `count`: those that its newest token saw,
    whichever of the newest tokens are taken back.
    """
    return 1 << (count - 1).bit_length()
