"""Wide copies of what a step's prefill sees of an e4m3 cache, for the time of one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels.widening import WIDE_PAGE, first_needed


@dataclass(frozen=True, slots=True)
class WidePages:
    """Which positions a step's layers widen. S sequences that prefill; what their queries see is in P pages."""

    pages: Tensor  # [P, 2] int32: sequence, first position that is needed
    rows: Tensor  # [S] int32: 0, 1, ...
    block_tables: Tensor  # [S, max_pages] int32: of the P pages; entries for positions that no query sees mean nothing
    # At least so many are allocated: of every step alike, so that none exceeds the peak of memory measured at start-up.
    scratch_bytes: int = 0

    @classmethod
    def of_step(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        window: int,
        upload: Callable[[Tensor], Tensor],
        scratch_bytes: int = 0,
    ) -> WidePages:
        """`window`: keys that a query sees; 0: all."""
        oldest = [first_needed(*lens, window) for lens in zip(query_lens, context_lens, strict=True)]
        pages = [
            (sequence, max(first, page * WIDE_PAGE))
            for sequence, (first, context) in enumerate(zip(oldest, context_lens, strict=True))
            for page in range(first // WIDE_PAGE, -(-context // WIDE_PAGE))
        ]
        made = torch.tensor(pages, dtype=torch.int32)
        sequences, positions = made.long().T
        # Triton compiles a kernel anew where a stride is no multiple of 16, or 1: this one always is.
        width = -(-max(context_lens) // (16 * WIDE_PAGE)) * 16
        tables = torch.zeros(len(query_lens), width, dtype=torch.int32)
        tables[sequences, positions // WIDE_PAGE] = torch.arange(len(pages), dtype=torch.int32)
        return cls(
            pages=upload(made),
            rows=upload(torch.arange(len(query_lens), dtype=torch.int32)),
            block_tables=upload(tables),
            scratch_bytes=scratch_bytes,
        )

    def widen(
        self, kv_cache: Tensor, block_tables: Tensor, rows: Tensor, context_lens: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the pages [2, P, Hkv, WIDE_PAGE, D] in `dtype`. kv_cache [2, num_blocks, Hkv, block_size, D] in e4m3, and
        block_tables, rows [S] and context_lens [S] as for attention over it.
        """
        _, _, num_kv_heads, _, head_dim = kv_cache.shape
        shape = (2, len(self.pages), num_kv_heads, WIDE_PAGE, head_dim)
        count = math.prod(shape)
        scratch = torch.empty(max(count, self.scratch_bytes // dtype.itemsize), dtype=dtype, device=kv_cache.device)
        wide = scratch[:count].view(shape)
        kernels.widen_pages(kv_cache[0], kv_cache[1], block_tables, rows, context_lens, self.pages, wide)
        return wide
