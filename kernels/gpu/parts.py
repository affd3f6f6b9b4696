"""The partial sums of a split-K GEMM added up, and the norm of that: each is of some of the channels."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.gpu.launch import cdiv, launch_dependents, pdl_options, wait_for_inputs
from kernels.gpu.rounding import norm_arguments, store_norm


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _sum_parts_kernel(
    parts, bias, residual, out, num_tokens, num_rows,
    N: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = the sum of parts [PARTS, num_rows, N], bias [N] and residual [M, N]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = num_rows.to(tl.int64) * N  # a multiple of N, which the compiler must know to load several at once
    inside = at < num_tokens.to(tl.int64) * N
    if PDL:
        launch_dependents()
        wait_for_inputs()
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, out: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Write the sum of parts [P, at least M, N], bias [N] and residual [M, N] to out [M, N], which may be the
    residual.
    """
    num_parts, num_rows, n = parts.shape
    assert parts.is_contiguous()
    assert out.is_contiguous()
    assert residual is None or residual.is_contiguous()
    options: dict[str, Any] = {"N": n, "PARTS": num_parts, "BIAS": bias is not None, "RESIDUAL": residual is not None}
    _sum_parts_kernel[(cdiv(out.numel(), 1024),)](
        parts, out if bias is None else bias, out if residual is None else residual, out, len(out), num_rows,
        BLOCK=1024, num_warps=4, **options, **pdl_options(out.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "stride_row", "stride_group"])
def _sum_norm_kernel(
    parts, bias, residual, weight, out, scale, eps, stride_row, stride_group, num_rows,
    N: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual [M, N] += the sum of parts [PARTS, num_rows, N] and bias [N]; out: the norm of that. One program for a
    row.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)[:, None]
    channels = group * GROUP + tl.arange(0, GROUP)[None, :]
    inside = channels < N
    size = num_rows.to(tl.int64) * N
    if PDL:
        launch_dependents()
        wait_for_inputs()
    total = tl.load(residual + row * N + channels, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + row * N + channels, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    values = total.to(residual.dtype.element_ty)
    tl.store(residual + row * N + channels, values, mask=inside)
    store_norm(
        values.to(tl.float32), weight, eps, out, scale, row, group, channels, stride_row, stride_group, N, GROUP,
        LARGEST, residual.dtype.element_ty,
    )  # fmt: skip


def sum_parts_norm(
    parts: Tensor, residual: Tensor, norm: NextNorm, *, bias: Tensor | None = None
) -> Tensor | QuantizedRows:
    """Add the sum of parts [P, at least M, N] and bias [N] to residual [M, N], and return its norm."""
    num_parts, num_rows, n = parts.shape
    assert parts.is_contiguous()
    assert residual.is_contiguous()
    normed, arguments, options = norm_arguments(residual, norm)
    _sum_norm_kernel[(len(residual),)](
        parts, residual if bias is None else bias, residual, *arguments, num_rows, N=n, PARTS=num_parts,
        BIAS=bias is not None, num_warps=min(max(options["BLOCK"] // 256, 1), 16), **options,
        **pdl_options(residual.device),
    )  # fmt: skip
    return normed
