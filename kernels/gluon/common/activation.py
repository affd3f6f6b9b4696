"""Gated activations in float32, for the epilogues of Gluon kernels."""

# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gpu.activation import CLAMP, GELU_CUBE, GELU_SCALE, SLOPE


@gluon.jit
def activate(x, NAME: gl.constexpr):
    """silu(x), or gelu(x) by tanh ("gelu_tanh")."""
    if NAME == "gelu_tanh":  # tanh(z) = 1 - 2 / (exp(2z) + 1)
        z = (x + x * GELU_CUBE * x * x) * GELU_SCALE
        return x * (1.0 - 1.0 / (gl.exp(2.0 * z) + 1.0))
    else:
        return x / (1.0 + gl.exp(-x))


@gluon.jit
def activate_gated(gate, up, NAME: gl.constexpr):
    """The activation of gate and up: an `ExpertActivation`."""
    if NAME == "clamped_swiglu":
        gate = gl.minimum(gate, CLAMP)
        return gate / (1.0 + gl.exp(gate * -SLOPE)) * (gl.minimum(gl.maximum(up, -CLAMP), CLAMP) + 1.0)
    else:
        return activate(gate, NAME) * up
