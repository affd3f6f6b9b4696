"""The dense MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.layers import Linear, NormBefore, Residual, Scope, Stream
from engine.models.spec import DenseSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # for MLPs without a gate
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square_(),
}


class MLP(nn.Module):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x)))."""

    def __init__(self, spec: DenseSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        inner, bias, self.spec = spec.intermediate_size, spec.bias, spec
        self._gate: kernels.Gate | None = None
        if spec.gated:
            self._gate = "silu" if spec.activation == "silu" else "gelu_tanh"
        parts = {"gate_proj": inner, "up_proj": inner} if spec.gated else {spec.up_name: inner}
        self.gate_up = Linear(scope, hidden_size, parts, bias=bias, shard="column", fused=spec.fused)
        self.down = Linear(scope, inner, {spec.down_name: hidden_size}, bias=bias, shard="row")

    def forward(self, x: Stream, hidden: Tensor, residual: Residual) -> Stream:
        """Add the MLP of x [T, hidden] to hidden [T, hidden] in place."""
        return residual.add(self.down, hidden, self.activate(x, residual))

    def activate(self, x: Stream, residual: Residual) -> Tensor:
        """Return the input of `down`: [T, intermediate_size]."""
        if self._gate is not None:
            return residual.gated(self.gate_up, x, self._gate)
        return ACTIVATIONS[self.spec.activation](residual.project(self.gate_up, x))

    def norm_before(self, hidden: Tensor) -> NormBefore:
        """See `Residual.precede`."""
        return self.gate_up.norm_before(hidden, self._gate)
