"""RMSNorm, alone and with the residual sum before or after it, in Triton: one program for each row, which stays in registers."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

MAX_HIDDEN = 16384  # a row must fit in one program's registers


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, stride_x, stride_residual, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    w = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    values = tl.load(x + row * stride_x + offs, mask=mask, other=0.0)
    if ADD:
        values = values.to(tl.float32) + tl.load(residual + row * stride_residual + offs, mask=mask, other=0.0)
        values = values.to(x.dtype.element_ty)
        tl.store(total + row * HIDDEN + offs, values, mask=mask)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / HIDDEN + eps)
    normed = (values * scale).to(x.dtype.element_ty).to(tl.float32) * w
    tl.store(out + row * HIDDEN + offs, normed, mask=mask)


@triton.jit
def _rms_norm_add_kernel(
    residual, x, weight, stride_residual, stride_x, eps, factor,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    if PDL:
        launch_dependents()
    w = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        wait_for_inputs()
    total = residual + row * stride_residual + offs
    before = tl.load(total, mask=mask, other=0.0).to(tl.float32)  # on its way during the sum of squares
    values = tl.load(x + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / HIDDEN + eps)
    normed = (values * scale).to(x.dtype.element_ty).to(tl.float32) * w
    tl.store(total, before + normed.to(x.dtype.element_ty).to(tl.float32) * factor, mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    assert hidden <= MAX_HIDDEN, f"a row of {hidden} does not fit, at most {MAX_HIDDEN} do"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    x = x.reshape(x.numel() // hidden, hidden)
    added = x if residual is None else residual.reshape(x.shape)
    assert x.stride(1) == added.stride(1) == weight.stride(0) == 1
    if len(x):
        block = next_power_of_2(hidden)
        _rms_norm_kernel[(len(x),)](
            x, added, weight, out, total, x.stride(0), added.stride(0), eps,
            HIDDEN=hidden, BLOCK=block, ADD=residual is not None, num_warps=min(max(block // 512, 1), 16),
            **pdl_options(x.device),
        )  # fmt: skip
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.rms_norm`. Rows must be contiguous, the row stride is free."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.add_rms_norm`. Rows must be contiguous, the row strides are free."""
    return _launch(x, residual, weight, eps)


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """See `kernels.reference.rms_norm_add`. Rows must be contiguous, the row strides are free."""
    hidden = x.shape[-1]
    assert hidden <= MAX_HIDDEN, f"a row of {hidden} does not fit, at most {MAX_HIDDEN} do"
    rows, total = x.reshape(x.numel() // hidden, hidden), residual.view(residual.numel() // hidden, hidden)
    assert x.shape == residual.shape
    assert rows.stride(1) == total.stride(1) == weight.stride(0) == 1
    if len(rows):
        block = next_power_of_2(hidden)
        _rms_norm_add_kernel[(len(rows),)](
            total, rows, weight, total.stride(0), rows.stride(0), eps, factor,
            HIDDEN=hidden, BLOCK=block, num_warps=min(max(block // 256, 1), 16), **pdl_options(x.device),
        )  # fmt: skip
    return residual
