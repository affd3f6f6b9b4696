"""The gated activations of MLPs, in Triton: one program for a piece of a row."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.activation import Gate
from kernels.data.fusion import Fusion
from kernels.gpu.activation import CLAMP, GELU_CUBE, GELU_SCALE, SLOPE
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@triton.jit
def activate(x, NAME: tl.constexpr):
    """silu(x), or gelu(x) by tanh ("gelu_tanh"), in float32."""
    if NAME == "gelu_tanh":  # tanh(z) = 1 - 2 / (exp(2z) + 1)
        z = (x + x * GELU_CUBE * x * x) * GELU_SCALE
        return x * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0))
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def activate_gated(gate, up, NAME: tl.constexpr):
    """The activation of gate and up, in float32: an `ExpertActivation`."""
    if NAME == "clamped_swiglu":
        gate = tl.minimum(gate, CLAMP)
        return gate / (1.0 + tl.exp(gate * -SLOPE)) * (tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + 1.0)
    else:
        return activate(gate, NAME) * up


@triton.jit
def _gated_kernel(
    x, out, stride_x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    gate = tl.load(x + row * stride_x + offs, mask=mask).to(tl.float32)
    up = tl.load(x + row * stride_x + WIDTH + offs, mask=mask).to(tl.float32)
    active = activate(gate, GATE)
    tl.store(out + row * WIDTH + offs, active.to(x.dtype.element_ty).to(tl.float32) * up, mask=mask)


def gate_and_mul(x: Tensor, gate: Gate) -> Tensor:
    """See `kernels.reference.gate_and_mul`. Rows must be contiguous, the row stride is free."""
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    x = x.reshape(x.numel() // (2 * width), 2 * width)
    assert x.stride(1) == 1
    if len(x):
        block = min(next_power_of_2(width), 1024)
        grid = (len(x), cdiv(width, block))
        _gated_kernel[grid](
            x, out, x.stride(0), WIDTH=width, BLOCK=block, GATE=gate, num_warps=4, **pdl_options(x.device)
        )  # fmt: skip
    return out


def epilogue(result: Tensor, fusion: Fusion) -> Tensor:
    """Compute the gate of a GEMM's result, then the sum with the residual or the copy, which no kernel fused."""
    if fusion.gate is not None:
        result = gate_and_mul(result, fusion.gate)
    if fusion.residual is not None:
        return fusion.residual.add_(result)
    return result if fusion.out is None else fusion.out.copy_(result)
