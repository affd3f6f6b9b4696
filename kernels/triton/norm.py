"""RMSNorm, alone and around the residual sum, in Triton: one program for each row, which stays in registers."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.forms import FORMS
from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, prefer_shared_memory, wait_for_inputs
from kernels.gpu.rounding import normed_row

MAX_HIDDEN = 16384  # a row must fit in one program's registers


@triton.jit
def _rms_norm_kernel(
    x, weight, out, stride_x, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    w = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    values = tl.load(x + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + offs, normed_row(values, w, eps, HIDDEN, x.dtype.element_ty, EXACT), mask=mask)


@triton.jit
def _add_kernel(
    residual, x, x_weight, weight, out, stride_residual, stride_x, x_eps, eps, factor,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM_X: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """residual += factor · x, or with NORM_X its norm; with NORM, out is the norm of that, as if it were read again."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < HIDDEN
    if PDL:
        launch_dependents()
    if NORM_X:
        x_w = tl.load(x_weight + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        wait_for_inputs()
    total = residual + row * stride_residual + offs
    before = tl.load(total, mask=mask, other=0.0).to(tl.float32)  # on its way during the sum of squares
    values = tl.load(x + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if NORM_X:
        values = normed_row(values, x_w, x_eps, HIDDEN, x.dtype.element_ty, EXACT)
    values = (before + values * factor).to(x.dtype.element_ty)
    tl.store(total, values, mask=mask)
    if NORM:
        w = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
        normed = normed_row(values.to(tl.float32), w, eps, HIDDEN, x.dtype.element_ty, EXACT)
        tl.store(out + row * HIDDEN + offs, normed, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.rms_norm`. Rows must be contiguous, the row stride is free."""
    hidden = x.shape[-1]
    assert hidden <= MAX_HIDDEN, f"a row of {hidden} does not fit, at most {MAX_HIDDEN} do"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(x.numel() // hidden, hidden)
    assert x.stride(1) == weight.stride(0) == 1
    if len(x):
        block = next_power_of_2(hidden)
        launched = _rms_norm_kernel[(len(x),)](
            x, weight, out, x.stride(0), eps,
            HIDDEN=hidden, BLOCK=block, EXACT=FORMS.deterministic, num_warps=min(max(block // 512, 1), 16),
            **pdl_options(x.device),
        )  # fmt: skip
        prefer_shared_memory(launched)  # a router's logits often follow
    return out


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """See `kernels.reference.rms_norm_add`. Rows must be contiguous, the row strides are free."""
    _add(residual, x, factor, x_norm=(weight, eps))
    return residual


def add_rms_norm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    x_weight: Tensor | None = None,
    x_eps: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """See `kernels.reference.add_rms_norm`. Rows must be contiguous, the row strides are free."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _add(residual, x, factor, x_norm=None if x_weight is None else (x_weight, x_eps), norm=(weight, eps), out=out)
    return out


def _add(
    residual: Tensor,
    x: Tensor,
    factor: float,
    *,
    x_norm: tuple[Tensor, float] | None = None,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
) -> None:
    """Add x to residual in place; `x_norm`, `norm`: weight and eps of the norms of x and of the sum, which goes to
    `out`.
    """
    hidden = x.shape[-1]
    assert hidden <= MAX_HIDDEN, f"a row of {hidden} does not fit, at most {MAX_HIDDEN} do"
    rows, total = x.reshape(x.numel() // hidden, hidden), residual.view(residual.numel() // hidden, hidden)
    x_weight, x_eps = x_norm or (x, 0.0)  # a pointer that is not read stands for None
    weight, eps = norm or (x, 0.0)
    assert x.shape == residual.shape
    assert rows.stride(1) == total.stride(1) == x_weight.stride(-1) == weight.stride(-1) == 1
    if len(rows):
        block = next_power_of_2(hidden)
        launched = _add_kernel[(len(rows),)](
            total, rows, x_weight, weight, x if out is None else out, total.stride(0), rows.stride(0), x_eps, eps,
            factor, HIDDEN=hidden, BLOCK=block, NORM_X=x_norm is not None, NORM=norm is not None,
            EXACT=FORMS.deterministic, num_warps=min(max(block // 256, 1), 16), **pdl_options(x.device),
        )  # fmt: skip
        prefer_shared_memory(launched)  # see `rms_norm`
