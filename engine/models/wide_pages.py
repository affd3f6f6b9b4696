"""Upcast copies of the pages of an e4m3 cache that a step's prefill attends to. They live for one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels.data.widening import WIDE_DTYPE, WIDE_PAGE, first_needed


@dataclass(frozen=True, slots=True)
class WidePages:
    """A step's P upcast pages: all that the queries of S prefilling sequences attend to.

    A layer's new keys and values are written there when they are stored; older ones are copied from the cache.
    """

    rows: Tensor  # [S] int32: 0, 1, ...
    block_tables: Tensor  # [S, max_pages] int32: indices of the P pages; arbitrary for positions that no query sees
    slots: Tensor  # [T] int64: each token's slot in the P pages; -1: its sequence does not prefill
    old_lens: Tensor  # [S] int32: context lengths before the step
    old_pages: Tensor  # [N, 3] int32: the pages with older positions, for `kernels.widen_pages`
    pages: Tensor  # [P, 3] int32: all, for layers that store nothing
    # Allocate at least this much in every step, so that no step exceeds the peak of memory measured at start-up.
    scratch_bytes: int = 0

    @classmethod
    def of_step(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        window: int,
        upload: Callable[[Tensor], Tensor],
        *,
        num_others: int = 0,
        num_tokens: int | None = None,
        scratch_bytes: int = 0,
    ) -> WidePages:
        """Plan the pages of a step whose prefilling sequences have these lengths.

        `window`: number of keys that a query sees; 0: all. The sequences' tokens follow those of `num_others` sequences
        with one token each. `num_tokens`: T, with padding; None: there is no padding.
        """
        lens = list(zip(query_lens, context_lens, strict=True))
        oldest = [first_needed(*each, window) for each in lens]
        needed = [
            (sequence, max(first, page * WIDE_PAGE))
            for sequence, (first, context) in enumerate(zip(oldest, context_lens, strict=True))
            for page in range(first // WIDE_PAGE, -(-context // WIDE_PAGE))
        ]
        pages = torch.tensor([(*each, index) for index, each in enumerate(needed)])
        sequences, firsts, indices = pages.T
        # Triton compiles a kernel anew where a stride is no multiple of 16, or 1: this one always is.
        width = -(-max(context_lens) // (16 * WIDE_PAGE)) * 16
        tables = torch.zeros(len(lens), width, dtype=torch.int64)
        tables[sequences, firsts // WIDE_PAGE] = indices
        old_lens = torch.tensor([context - query for query, context in lens])
        slots = torch.full((num_others + sum(query_lens) if num_tokens is None else num_tokens,), -1)
        end = num_others
        for table, (query, context) in zip(tables, lens, strict=True):
            positions = torch.arange(context - query, context)
            slots[end : end + query] = table[positions // WIDE_PAGE] * WIDE_PAGE + positions % WIDE_PAGE
            end += query
        has_old = firsts // WIDE_PAGE * WIDE_PAGE < old_lens[sequences]
        return cls(
            rows=upload(torch.arange(len(lens), dtype=torch.int32)),
            block_tables=upload(tables.int()),
            slots=upload(slots),
            old_lens=upload(old_lens.int()),
            # Pages without a needed old position, too: no slot before a new one may stay unwritten.
            old_pages=upload(pages[has_old].int()),
            pages=upload(pages.int()),
            scratch_bytes=scratch_bytes,
        )

    def allocate(self, kv_cache: Tensor) -> kernels.WideCopy:
        """Allocate a layer's pages [2, P, Hkv, WIDE_PAGE, D] in WIDE_DTYPE.

        kv_cache: the layer's, [2, num_blocks, Hkv, block_size, D].
        """
        _, _, num_kv_heads, _, head_dim = kv_cache.shape
        shape = (2, len(self.pages), num_kv_heads, WIDE_PAGE, head_dim)
        count = math.prod(shape)
        count_of_scratch = self.scratch_bytes // WIDE_DTYPE.itemsize
        scratch = torch.empty(max(count, count_of_scratch), dtype=WIDE_DTYPE, device=kv_cache.device)
        return kernels.WideCopy(scratch[:count].view(shape), self.slots)

    def fill(self, out: Tensor, kv_cache: Tensor, block_tables: Tensor, rows: Tensor, lens: Tensor | None) -> None:
        """Copy the keys and values that `out` lacks from kv_cache [2, num_blocks, Hkv, block_size, D] in e4m3.

        block_tables and rows [S] as for attention over the cache. `lens` [S]: context lengths, if the layer has stored
        nothing; None: it has stored its new keys and values in `out`, too.
        """
        lens, pages = (self.old_lens, self.old_pages) if lens is None else (lens, self.pages)
        kernels.widen_pages(kv_cache[0], kv_cache[1], block_tables, rows, lens, pages, out)
