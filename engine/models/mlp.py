"""The dense MLP of a decoder layer."""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor, nn

import kernels
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import RMSNorm
from engine.models.residual import GateEpilogue, ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.spec import DenseSpec
from kernels.data.activation import SLOPE


class MLP(nn.Module):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x)))."""

    def __init__(self, spec: DenseSpec, hidden_size: int, scope: Scope, *, reduce_results: bool = True) -> None:
        """reduce_results: see `Linear`."""
        super().__init__()
        inner, bias, self.spec = spec.intermediate_size, spec.bias, spec
        self._gate: GateEpilogue | None = None
        self._splits = spec.gated and (spec.activation == "gelu" or spec.sparsity > 0)  # no kernel computes these gates
        self._alternates = spec.activation == "clamped_swiglu"  # nor this one
        if spec.gated and not self._splits and not self._alternates:
            self._gate = GateEpilogue("silu" if spec.activation == "silu" else "gelu_tanh")
        gated = ("up_proj", "gate_proj") if spec.up_first else ("gate_proj", "up_proj")
        parts = dict.fromkeys(gated, inner) if spec.gated else {spec.up_name: inner}
        if self._alternates:
            parts = {spec.up_name: 2 * inner}
        width = 2 if self._alternates else 1  # rows that a rank has together
        self.gate_up = Linear(scope, hidden_size, parts, bias=bias, shard="column", width=width, fused=spec.fused)
        self.down = Linear(
            scope,
            inner,
            {spec.down_name: hidden_size},
            bias=bias if spec.down_bias is None else spec.down_bias,
            shard="row",
            reduce_results=reduce_results,
        )

    def forward(self, x: SublayerInput, epilogue: ResidualEpilogue) -> ResidualStream:
        """Add the MLP of x [T, hidden] to the residual stream [T, hidden] in place."""
        return self.down.run(self.activate(x), epilogue)

    def activate(self, x: SublayerInput) -> Tensor:
        """Return the input of `down`: [T, intermediate_size]."""
        if self.spec.gate_multiplier != 1:
            assert self._gate is not None
            gate_up = self.gate_up.run(x)
            kernels.scale(gate_up[:, : gate_up.shape[1] // 2], self.spec.gate_multiplier)
            return kernels.gate_and_mul(gate_up, self._gate.gate)
        if self._gate is not None:
            return self.gate_up.run(x, self._gate)
        if self._splits:
            gate, up = self.gate_up.run(x).chunk(2, 1)
            if self.spec.up_first:
                gate, up = up, gate
            assert self.spec.activation in ("gelu", "gelu_tanh")
            gate = self._cut(gate) if self.spec.sparsity else gate
            return kernels.activation(gate, self.spec.activation).mul_(up)
        if self._alternates:
            limit = self.spec.limit
            gate, up = self.gate_up.run(x).unflatten(1, (-1, 2)).unbind(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return kernels.sigmoid(SLOPE * gate).mul_(gate).mul_(up + 1)
        assert self.spec.activation != "clamped_swiglu"
        return kernels.activation(self.gate_up.run(x), self.spec.activation)

    def _cut(self, gate: Tensor) -> Tensor:
        """Return relu(gate - cutoff), gate [T, n]: the cutoff lies as far above a token's mean as `sparsity` says."""
        size, wide = self.gate_up.shard.size, gate.float()

        def mean(x: Tensor) -> Tensor:
            own = x.mean(1, keepdim=True)
            return own if size == 1 else self.gate_up.communicator.all_reduce(own) / size

        middle = mean(wide)
        deviation = mean((wide - middle).square()).sqrt()
        return (wide - middle - NormalDist().inv_cdf(self.spec.sparsity) * deviation).relu_().to(gate.dtype)

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`."""
        gate = self._gate if self.spec.gate_multiplier == 1 else None
        return self.gate_up.next_norm(norm, hidden, gate)
