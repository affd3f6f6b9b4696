"""Norms of groups of channels with gates, in Triton. See `kernels.reference.grouped_rms_norm`."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2


@triton.jit
def _grouped_rms_norm_kernel(
    x, gate, weight, out, num_groups, stride_gate, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """One program for a group of a token."""
    token, group = (tl.program_id(0) // num_groups).to(tl.int64), tl.program_id(0) % num_groups
    d = tl.arange(0, PADDED)
    mask = d < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + d
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + token * stride_gate + group * SIZE + d, mask=mask, other=0.0).to(tl.float32)
    scale = z / (1 + tl.exp(-z))
    if FIRST:
        value *= scale
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    value *= tl.load(weight + group * SIZE + d, mask=mask, other=0.0).to(tl.float32)
    if not FIRST:
        value *= scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


def grouped_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, gate_first: bool) -> Tensor:
    """See `kernels.reference.grouped_rms_norm`."""
    num_tokens, width = x.shape
    size = width // num_groups
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = x.new_empty(num_tokens, width)
    if num_tokens:
        padded = next_power_of_2(size)
        _grouped_rms_norm_kernel[(num_tokens * num_groups,)](
            x, gate, weight, out, num_groups, gate.stride(0), eps,
            SIZE=size, PADDED=padded, FIRST=gate_first, num_warps=min(max(padded // 512, 1), 8),
        )  # fmt: skip
    return out
