"""Recurrent layers described by numbers. They keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from engine.models.shard import Shard


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A part of a layer's block of states, see `kernels.data.state`."""

    shape: tuple[int, ...]
    dtype: Literal["model", "float32"] = "model"


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """Base of all kinds of recurrent layers."""

    # What other layers have.
    rope: ClassVar[None] = None
    window: ClassVar[int] = 0
    kv_of: ClassVar[None] = None

    def state(self, block_size: int) -> tuple[StateTensor, ...]:
        """Return the parts of a block."""
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

    def state(self, block_size: int) -> tuple[StateTensor, ...]:
        return (StateTensor((num_inputs(self.kernel_size), self.channels)),)

    def for_rank(self, shard: Shard) -> ShortConvSpec:
        return replace(self, channels=len(shard.span("hidden_size", self.channels)))

    @property
    def width(self) -> int:
        return 6 * self.channels


def num_inputs(kernel_size: int) -> int:
    """Return how many inputs of a convolution a block holds: those that its newest token saw, at least."""
    return 1 << (kernel_size - 1).bit_length()
