"""Recurrent layers: mixers that keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

import kernels
from engine.models.attention import AttentionMetadata
from engine.models.layers import Linear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.norms import RMSNorm
from engine.models.recurrent_spec import ShortConvSpec
from engine.models.residual import ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.shard import Span


@dataclass(frozen=True, slots=True)
class StateMetadata(AttentionMetadata):
    """A step's tensors for recurrent layers.

    `slot_mapping` is that of an attention group: -1 marks padding, and no token whose state is not stored.
    """

    states: kernels.StateContext | None = None

    @property
    def context(self) -> kernels.StateContext:
        assert self.states is not None
        return self.states


class ShortConv(CheckpointModule):
    """Gated short convolution, see `ShortConvSpec`. Channels are divided among ranks."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.spec = spec.for_rank(scope.shard)
        channels, self._scope = spec.channels, scope
        parts = dict.fromkeys(("b", "c", "x"), channels)
        self.input = Linear(scope, hidden_size, parts, bias=spec.bias, shard="column", fused="in_proj")
        self.output = Linear(scope, channels, {"out_proj": hidden_size}, bias=spec.bias, shard="row")
        self._channels = scope.shard.span("hidden_size", channels)
        self.weight = scope.empty(self.spec.channels, spec.kernel_size)
        self.bias = scope.empty(self.spec.channels) if spec.bias else None

    def forward(
        self,
        x: SublayerInput,
        epilogue: ResidualEpilogue,
        positions: Tensor,
        state: Sequence[Tensor],
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        """Add the layer's output for x [T, hidden] to the residual stream in place, and store the states in `state`.

        With `metadata.logits_indices`, the resulting stream has only these rows [N, hidden], otherwise [T, hidden].
        """
        assert isinstance(metadata, StateMetadata)
        [inputs] = state
        out = kernels.short_conv(self.input.run(x), self.weight, self.bias, inputs, metadata.context)
        return self.output.run(metadata.select(out), epilogue.select(metadata.logits_indices))

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`."""
        return self.input.next_norm(norm, hidden)

    def tensors(self) -> Iterator[CheckpointTensor]:
        taps, one = Span.whole(self.spec.kernel_size), Span.whole(1)
        memory = self.weight.unsqueeze(1)
        yield CheckpointTensor(self._scope.name("conv.weight"), (self._channels, one, taps), memory)
        if self.bias is not None:
            yield CheckpointTensor(self._scope.name("conv.bias"), (self._channels,), self.bias)
