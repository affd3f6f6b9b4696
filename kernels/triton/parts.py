"""The sum of a product's parts: each is the product of some of the channels."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import cdiv, launch_dependents, pdl_options, wait_for_inputs


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _sum_parts_kernel(
    parts, bias, residual, out, num_tokens, num_rows,
    N: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    """Write the sum of parts [P, at least M, N], bias [N] and residual [M, N] to out [M, N], which may be the residual."""
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
