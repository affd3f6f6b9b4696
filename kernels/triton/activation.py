"""The gated activations of MLPs, in Triton: one program for a piece of a row."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.reference import Gate


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """silu(gate), or gelu(gate) by tanh, in float32."""
    if GELU:  # tanh(z) = 1 - 2 / (exp(2z) + 1); z = sqrt(2 / pi) (gate + 0.044715 gate^3)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0))
    else:
        return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gated_kernel(
    x, out, stride_x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    gate = tl.load(x + row * stride_x + offs, mask=mask).to(tl.float32)
    up = tl.load(x + row * stride_x + WIDTH + offs, mask=mask).to(tl.float32)
    active = activate(gate, GELU)
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
            x, out, x.stride(0), WIDTH=width, BLOCK=block, GELU=gate == "gelu_tanh", num_warps=4, **pdl_options(x.device)
        )  # fmt: skip
    return out
