"""Routed tokens in the order of their experts, and the tiles that they make, in Triton.

Of few routed tokens, one kernel counts and sorts those of each expert. Of many, one kernel counts each chunk's routed
tokens and another one sorts them: where a chunk's routed tokens of an expert begin follows from all counts. No atomics,
so the order is always the same.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.moe import Tiles
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

MANY = 16384  # routed tokens, from which on chunks are faster
MIN_CHUNK, MAX_CHUNKS = (
    512,
    512,
)  # routed tokens of a chunk, at least, and chunks, at most: each reads the counts of all chunks


@triton.jit
def _begin(POSITIONS: tl.constexpr):
    """Wait for what is sorted. With POSITIONS the next kernel starts only then: it reads that before it waits
    itself.
    """
    if not POSITIONS:
        launch_dependents()
    wait_for_inputs()
    if POSITIONS:
        launch_dependents()


@triton.jit
def _write_tiles(
    tiles, expert, start, stop, num_tiles,
    E: tl.constexpr, BLOCK_M: tl.constexpr, ONE_EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An expert's part of the tiles, whose routed tokens are [start, stop) in order.

    It begins, if ONE_EACH, where its routed tokens begin, else so that there are enough up to the next expert's
    whatever the experts' routed tokens.
    """
    if ONE_EACH:
        tile, end = start, stop
    else:
        tile, end = start // BLOCK_M + expert, stop // BLOCK_M + expert + 1
    if expert == E - 1:
        end = num_tiles
    for at in range(tile, end, BLOCK):
        index = at + tl.arange(0, BLOCK)
        row = start + (index - tile) * BLOCK_M
        mask = index < end
        tl.store(tiles + index * 3, tl.where(row < stop, expert, -1), mask=mask)
        tl.store(tiles + index * 3 + 1, row, mask=mask)
        tl.store(tiles + index * 3 + 2, stop, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "first"])
def _sort_kernel(
    ids, order, positions, tiles, num_pairs, num_tiles, first,
    E: tl.constexpr, BLOCK_M: tl.constexpr, ONE_EACH: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """order: the routed tokens, those of local expert 0 first; at the end routed token 0 for each that is not local.
    tiles [N, 3]: expert, first and end in `order`; expert -1: no tile. With POSITIONS also where each local routed
    token is in `order`; then the next kernel quantises x. One program for each expert.
    """
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    if PDL:
        _begin(POSITIONS)
    counts = tl.zeros([BLOCK], tl.int64)  # of routed tokens before the expert's and, above, of its own: in one sum
    for at in range(0, num_pairs, BLOCK):
        local = tl.load(ids + at + offs, mask=at + offs < num_pairs, other=-1) - first
        counts += ((local >= 0) & (local < expert)).to(tl.int64) + ((local == expert).to(tl.int64) << 32)
    count = tl.sum(counts, 0)
    start = (count & 0xFFFFFFFF).to(tl.int32)
    stop = start + (count >> 32).to(tl.int32)
    position = start
    for at in range(0, num_pairs, BLOCK):
        pair = at + offs
        local = tl.load(ids + pair, mask=pair < num_pairs, other=-1) - first
        same = ((local == expert) & (pair < num_pairs)).to(tl.int32)
        own = position + tl.cumsum(same, 0) - same
        tl.store(order + own, pair, mask=same == 1)
        if POSITIONS:
            tl.store(positions + pair, own, mask=same == 1)
        if at + BLOCK < num_pairs:
            position += tl.sum(same, 0)
    _write_tiles(tiles, expert, start, stop, num_tiles, E, BLOCK_M, ONE_EACH, BLOCK)
    if expert == E - 1:
        for at in range(stop, num_pairs, BLOCK):
            tl.store(order + at + offs, 0, mask=at + offs < num_pairs)


@triton.jit
def _local_experts(ids, pair, num_pairs, first, E: tl.constexpr):
    """Local expert ids of routed tokens; E for those of other ranks' experts."""
    local = tl.load(ids + pair, mask=pair < num_pairs, other=0) - first
    return tl.where((pair < num_pairs) & (local >= 0) & (local < E), local, E)


@triton.jit(do_not_specialize=["num_pairs", "first"])
def _count_kernel(
    ids, counts, num_pairs, first, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """counts [chunks, BINS], BINS > E: a chunk's routed tokens of each local expert, and then those of all others."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    chunk = tl.program_id(0)
    local = _local_experts(ids, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, first, E)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(local, BINS))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "first", "num_chunks"])
def _sort_chunk_kernel(
    ids, counts, order, positions, tiles, num_pairs, num_tiles, first, num_chunks,
    E: tl.constexpr, E_PAD: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, POSITIONS: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort as `_sort_kernel` does, from the counts of all chunks: one program for each, PART routed tokens at a
    time.
    """
    if PDL:
        _begin(POSITIONS)
    chunk = tl.program_id(0)
    expert = tl.arange(0, E_PAD)
    totals = tl.zeros([E_PAD], tl.int32)
    before = tl.zeros([E_PAD], tl.int32)  # in earlier chunks
    for at in range(0, num_chunks, ROWS):
        row = at + tl.arange(0, ROWS)[:, None]
        some = tl.load(counts + row * BINS + expert[None, :], mask=(row < num_chunks) & (expert < E)[None, :], other=0)
        totals += tl.sum(some, 0)
        before += tl.sum(tl.where(row < chunk, some, 0), 0)
    starts = tl.cumsum(totals, 0) - totals
    begin = starts + before
    for part in range(CHUNK // PART):
        pair = chunk * CHUNK + part * PART + tl.arange(0, PART)
        local = _local_experts(ids, pair, num_pairs, first, E)
        same = (local[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.cumsum(same, 0) - same
        position = tl.sum(same * (rank + begin[None, :]), 1)
        tl.store(order + position, pair, mask=local < E)
        if POSITIONS:
            tl.store(positions + pair, position, mask=local < E)
        begin += tl.sum(same, 0)
    for e in range(chunk, E, num_chunks):
        start = tl.sum(tl.where(expert == e, starts, 0), 0)
        stop = start + tl.sum(tl.where(expert == e, totals, 0), 0)
        _write_tiles(tiles, e, start, stop, num_tiles, E, BLOCK_M, False, 128)
    local_pairs = tl.sum(totals, 0)
    for at in range(local_pairs + chunk * PART, num_pairs, num_chunks * PART):
        rest = at + tl.arange(0, PART)
        tl.store(order + rest, 0, mask=rest < num_pairs)


def sort_pairs(ids: Tensor, count: int, first: int, block_m: int, with_positions: bool = False) -> Tiles:
    """Sort the routed tokens of ids [T, chosen] int32 by expert, those of the `count` local ones from `first` on, in
    tiles of block_m.
    """
    num_pairs = ids.numel()
    by_blocks = num_pairs // block_m + count
    num_tiles = min(num_pairs, by_blocks)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    entries = torch.empty(num_tiles, 3, dtype=torch.int32, device=ids.device)
    positions = torch.empty_like(ids) if with_positions else None
    out = order, order if positions is None else positions, entries
    if num_pairs >= MANY and num_tiles == by_blocks:
        bins = next_power_of_2(count + 1)
        chunk = max(next_power_of_2(cdiv(num_pairs, MAX_CHUNKS)), MIN_CHUNK)
        counts = torch.empty(cdiv(num_pairs, chunk), bins, dtype=torch.int32, device=ids.device)
        _count_kernel[(len(counts),)](
            ids, counts, num_pairs, first, E=count, BINS=bins, CHUNK=chunk, num_warps=4, **pdl_options(ids.device)
        )
        padded = next_power_of_2(count)
        _sort_chunk_kernel[(len(counts),)](
            ids, counts, *out, num_pairs, num_tiles, first, len(counts), E=count, E_PAD=padded, BINS=bins,
            BLOCK_M=block_m, POSITIONS=with_positions, CHUNK=chunk, PART=max(min(8192 // padded, 128), 16),
            ROWS=max(2048 // padded, 1), num_warps=4, **pdl_options(ids.device),
        )  # fmt: skip
        return Tiles(order, entries, block_m, positions)
    block = min(max(next_power_of_2(num_pairs), 128), 8192)
    _sort_kernel[(count,)](
        ids, *out, num_pairs, num_tiles, first, E=count, BLOCK_M=block_m, ONE_EACH=num_tiles < by_blocks,
        POSITIONS=with_positions, BLOCK=block, num_warps=min(block // 128, 16), **pdl_options(ids.device),
    )  # fmt: skip
    return Tiles(order, entries, block_m, positions)
