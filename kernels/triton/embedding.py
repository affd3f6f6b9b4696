"""Embedding lookup in Triton: one program for each token."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2


@triton.jit(do_not_specialize=["first", "num_rows"])
def _embedding_kernel(table, ids, out, first, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token) - first
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    is_here = (row >= 0) & (row < num_rows)
    values = tl.load(table + row * WIDTH + offs, mask=mask & is_here, other=0.0)
    tl.store(out + token * WIDTH + offs, values, mask=mask)


def embedding(table: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """See `kernels.reference.embedding`.

    Not launched with programmatic dependent launch: see `kernels.reference.plan_decode`.
    """
    num_rows, width = table.shape
    assert table.is_contiguous()
    assert ids.is_contiguous()
    out = table.new_empty(len(ids), width)
    block = next_power_of_2(width)
    _embedding_kernel[(len(ids),)](
        table, ids, out, first, num_rows, WIDTH=width, BLOCK=block, num_warps=min(max(block // 1024, 1), 8)
    )
    return out
