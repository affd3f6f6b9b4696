"""The dense MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from engine.models.layers import Linear, RMSNorm, Scope
from engine.models.spec import DenseSpec


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, spec: DenseSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        inner, bias = spec.intermediate_size, spec.bias
        self.gate_up = Linear(scope, hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias, shard="column")
        self.down = Linear(scope, inner, {"down_proj": hidden_size}, bias=bias, shard="row")

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden [T, hidden] + the MLP of the normed hidden, in hidden's memory."""
        return self.down.add_to(hidden, self.gate_up.swiglu_after_norm(hidden, norm))
