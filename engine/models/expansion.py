"""Latent attention of many prompt tokens with keys and values of each head.

Absorbed attention (see `kernels.reference.latent`) reads only latents, but its dot products are as long as a latent.
With many queries per cached token it costs less to project that token to the keys and values of all heads first, for
the time of one layer, and to compute plain attention over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels

PAGE = 64  # slots of a page of projected keys and values


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """The latents that a step's layers expand: contexts of B prefilling sequences, each in whole pages, P in all."""

    blocks: Tensor  # [P * PAGE] int64: cache block of each position; after the end of a context: of its last one
    offsets: Tensor  # [P * PAGE] int64: offset in that block
    rows: Tensor  # [B] int32: 0, 1, ...
    block_tables: Tensor  # [B, max_pages] int32: indices of the P pages
    tiles: Tensor | None  # the prefill kernel's grid; None on a CPU

    @classmethod
    def of_step(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        rows: Tensor,
        block_tables: Tensor,
        block_size: int,
        upload: Callable[[Tensor], Tensor],
        tile_queries: int = 0,
    ) -> LatentExpansion:
        """rows [B] int32 of block_tables [R, max_blocks] int32, on the device: of the latents' cache, for this step.

        tile_queries: of a prefill tile; 0: no tiles.
        """
        device, lens = rows.device, torch.tensor(context_lens)
        counts = num_pages(lens)
        starts = counts.cumsum(0) - counts  # [B]: first page
        sequence = torch.arange(len(lens)).repeat_interleave(counts)  # [P]
        position = (torch.arange(len(sequence)) - starts[sequence]) * PAGE  # of a page's first slot
        pages = upload(torch.stack([sequence, position, lens[sequence] - 1])).unsqueeze(2)  # [3, P, 1]
        at = torch.minimum(pages[1] + torch.arange(PAGE, device=device), pages[2])  # [P, PAGE]
        # Triton compiles a kernel anew where a stride is no multiple of 16, or 1: this one always is.
        tables = starts.unsqueeze(1) + torch.arange(-(-int(counts.max()) // 16) * 16)
        tiles = None
        if tile_queries:
            grid = kernels.make_prefill_tiles(list(query_lens), list(context_lens), tile_queries)
            tiles = upload(torch.tensor(grid, dtype=torch.int32))
        return cls(
            blocks=block_tables[rows[pages[0]].long(), at // block_size].long().flatten(),
            offsets=(at % block_size).flatten(),
            rows=torch.arange(len(lens), dtype=torch.int32, device=device),
            block_tables=upload(tables.int()),
            tiles=tiles,
        )

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        key_up: Tensor,
        value_up: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
    ) -> Tensor:
        """Compute the attention of the prefilling sequences' tokens over their latents, which are already stored.

        query [T, H, N + R], its last R channels rotated; cache [num_blocks, 1, block_size, L + R]; key_up [H, N, L];
        value_up [H, V, L]; query_start [B + 1] and context_lens [B] int32 -> [T, H, N + R]: the result
        is in the first V channels. Other sequences' rows are not written.
        """
        (num_heads, plain, size), value_dim, width = key_up.shape, value_up.shape[1], query.shape[2]
        latents = cache[:, 0][self.blocks, self.offsets]  # [C, L + R]
        of_heads = latents[:, :size].expand(num_heads, -1, -1)
        keys = latents.new_empty(num_heads, len(latents), width)
        torch.bmm(of_heads, key_up.mT, out=keys[..., :plain])
        keys[..., plain:] = latents[:, size:]
        values = torch.empty_like(keys)
        torch.bmm(of_heads, value_up.mT, out=values[..., :value_dim])
        values[..., value_dim:] = 0
        key_pages, value_pages = (x.unflatten(1, (-1, PAGE)).transpose(0, 1) for x in (keys, values))
        context = kernels.PagedContext(key_pages, value_pages, self.block_tables, self.rows, context_lens)
        return kernels.paged_attention_prefill(
            query, query_start, context, kernels.AttentionArgs(scale), tiles=self.tiles, out=torch.empty_like(query)
        )

    @property
    def num_seqs(self) -> int:
        return len(self.rows)


def num_pages(context_len: Tensor) -> Tensor:
    return (context_len + (PAGE - 1)) // PAGE
