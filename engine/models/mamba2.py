"""State-space layers (Mamba-2): recurrent layers with one decay a head and token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.models.layers import Linear, RowsLinear
from engine.models.matrix import CheckpointTensor, Part, Scope, empty
from engine.models.norms import RMSNorm
from engine.models.recurrent import RecurrentMixer, StateMetadata
from engine.models.recurrent_spec import Mamba2Spec
from engine.models.residual import SublayerInput
from engine.models.shard import Span


class Mamba2(RecurrentMixer):
    """State-space layer, see `Mamba2Spec`. Heads are divided among ranks, with their groups."""

    def __init__(self, spec: Mamba2Spec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.spec = own = spec.for_rank(scope.shard)
        self._scope, self._communicator = scope, scope.communicator
        self._heads = scope.shard.span("mamba heads", spec.num_heads)
        inner = Span(spec.inner, *(each * spec.head_dim for each in (self._heads.start, self._heads.stop)))
        groups = scope.shard.span("mamba groups", spec.num_groups, width=spec.state_dim, replicate=True)
        # Rows of in_proj: z, x, B, C, steps. Those of the convolution: x, B, C.
        sizes = spec.inner, spec.inner, groups.total, groups.total, spec.num_heads
        z, x, b, c, steps = _rows(sizes, (inner, inner, groups, groups, self._heads))
        name = scope.name("in_proj")
        parts = [Part(name=name, rows=rows) for rows in (x, b, c, z, steps)]
        self.input = RowsLinear(scope, hidden_size, parts, bias=spec.in_bias)
        self.output = Linear(scope, spec.inner, {"out_proj": hidden_size}, bias=spec.out_bias, shard="row")
        self._conv_rows = _rows(sizes[1:4], (inner, groups, groups))
        self.conv = scope.empty(own.conv_channels, spec.kernel_size)
        self.conv_bias = scope.empty(own.conv_channels) if spec.conv_bias else None
        self.rate, self.bias, self.skip = (
            empty(own.num_heads, dtype=torch.float32, device=scope.device) for _ in range(3)
        )
        self.norm = RMSNorm(scope / "norm", inner, spec.norm_eps) if spec.num_norm_groups else None
        # Several ranks have parts of a group that is normalised.
        self._norm_size = spec.inner // spec.num_norm_groups if spec.num_norm_groups else 0
        self._sums_squares = self._norm_size > own.inner

    def mix(self, x: SublayerInput, state: Sequence[Tensor], metadata: StateMetadata) -> Tensor:
        """See `RecurrentMixer.mix`."""
        inputs, *states = state
        spec, context = self.spec, metadata.context
        xbc, z, steps = self.input.run(x).split((spec.conv_channels, spec.inner, spec.num_heads), 1)
        xbc = kernels.causal_conv(xbc, self.conv, self.conv_bias, inputs, context)
        if spec.scales[4] != 1:
            steps = kernels.scale(steps, spec.scales[4])
        own = kernels.StateSpace(self.rate, self.bias, self.skip, spec.limits)
        out = kernels.mamba2(xbc, steps, own, kernels.DeltaStates(*states), context).flatten(1)
        return self._gated(metadata.select(out), metadata.select(z))

    def _gated(self, x: Tensor, z: Tensor) -> Tensor:
        """Apply gate z [N, n] and norm to x [N, n]."""
        spec = self.spec
        if spec.scales[0] != 1:
            z = kernels.scale(z, spec.scales[0])
        if self.norm is None:
            return kernels.gated(x, z, "silu")
        if self._sums_squares:
            return self._gated_over_ranks(x, z, self.norm.weight)
        return kernels.grouped_rms_norm(x, z, self.norm.weight, spec.norm_eps, spec.num_norm_groups, spec.gate_first)

    def _gated_over_ranks(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """Compute the norm of all ranks' channels."""
        assert self.spec.num_norm_groups == 1
        assert self._norm_size == self._scope.shard.size * self.spec.inner, "a group is that of all ranks"
        scale = kernels.activation(z.float(), "silu")
        wide = x * scale if self.spec.gate_first else x.float()
        squares = self._communicator.all_reduce(wide.square().sum(1, keepdim=True))
        wide = wide * (squares / self._norm_size + self.spec.norm_eps).rsqrt() * weight
        return (wide if self.spec.gate_first else wide * scale).to(x.dtype)

    def tensors(self) -> Iterator[CheckpointTensor]:
        name, one, taps = self._scope.name, Span.whole(1), Span.whole(self.spec.kernel_size)
        start = 0
        for rows, scale in zip(self._conv_rows, self.spec.scales[1:4], strict=True):
            part = slice(start, start + len(rows))
            memory = self.conv[part].unsqueeze(1)
            take = None if scale == 1 else partial(_take_scaled, memory, scale)
            yield CheckpointTensor(name("conv1d.weight"), (rows, one, taps), memory, take=take)
            if self.conv_bias is not None:
                yield CheckpointTensor(name("conv1d.bias"), (rows,), self.conv_bias[part])
            start += len(rows)
        yield CheckpointTensor(name("A_log"), (self._heads,), self.rate, take=self._take_rate)
        yield CheckpointTensor(name("dt_bias"), (self._heads,), self.bias)
        yield CheckpointTensor(name("D"), (self._heads,), self.skip)

    def _take_rate(self, stored: Tensor) -> None:
        self.rate.copy_(stored.float().exp())


def _rows(sizes: Sequence[int], own: Sequence[Span]) -> list[Span]:
    """Return this rank's rows of a matrix with these numbers of rows, one after the other."""
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Span(sum(sizes), first + span.start, first + span.stop) for first, span in zip(firsts, own, strict=True)]


def _take_scaled(memory: Tensor, scale: float, stored: Tensor) -> None:
    memory.copy_(stored.float() * scale)
