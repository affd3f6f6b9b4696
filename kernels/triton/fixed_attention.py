"""Paged attention with one order of sums, in Triton: by ranges of RANGE keys, whose results are merged in their order.

A query's keys are read in the same tiles, range by range from the sequence's beginning on, whether it is decoded or is
one of a prompt. A decode of few sequences divides its ranges among programs, and the last one to arrive merges them.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.plan import prefill_block_m, prefill_tile_queries
from kernels.gpu.device import num_multiprocessors
from kernels.gpu.launch import (
    cdiv,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    prefetch_lines,
    wait_for_inputs,
)
from kernels.triton.attention_prefill import attend_tile
from kernels.triton.paged_tile import no_sum, normalised

KNOWN = KnownArgs("window", "soft_cap", "alibi_slopes", "sinks", "kv_scale")
RANGE = 256  # keys
PROGRAMS = 4  # of a multiprocessor, up to which the ranges of a sequence are divided
MOST_BYTES = 64 << 20  # of the results of ranges


@triton.jit
def _merged(acc, m, l, more, more_m, more_l):
    """Add a range's result to those before it. Products and sums are fused explicitly, so in any kernel alike."""
    new_m = tl.maximum(m, more_m)
    base = tl.where(new_m == -float("inf"), 0.0, new_m)
    rescale = tl.exp2(m - base)
    weight = tl.exp2(more_m - base)
    more *= weight[:, None]
    more_l *= weight
    return tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), more), new_m, tl.fma(l, rescale, more_l)


@triton.jit
def _prefetch_range(
    key_cache, value_cache, block_tables, rows, context_lens, seq, head, split, stride_table, stride_block, stride_head,
    stride_token, HEAD_DIM: tl.constexpr, RANGE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Prefetch a sequence's keys and values of the first range that a program reads in a decode."""
    BYTES: tl.constexpr = key_cache.dtype.element_ty.primitive_bitwidth // 8
    LINE: tl.constexpr = 128 // BYTES  # elements of a line of the cache
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM + LINE - 1) // LINE)
    context_len = tl.load(context_lens + seq, cache_modifier=".cg")
    row = tl.load(rows + seq, cache_modifier=".cg").to(tl.int64)
    oldest = tl.maximum(context_len - WINDOW, 0) if WINDOW > 0 else 0
    at = (oldest // RANGE + split) * RANGE + tl.arange(0, RANGE)
    inside = (at < context_len) & (at >= oldest)
    block = tl.load(block_tables + row * stride_table + at // PAGE, mask=inside, other=0, cache_modifier=".cg")
    offsets = block.to(tl.int64) * stride_block + (at % PAGE) * stride_token + head * stride_head
    element = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)
    offsets = tl.where(inside, offsets, 0)[:, None] + element[None, :]
    prefetch_lines(key_cache + offsets)
    prefetch_lines(value_cache + offsets)


@triton.jit(
    do_not_specialize=["num_ranges"],
    do_not_specialize_on_alignment=[
        "rows",
        "query_start",
        "context_lens",
        "alibi_slopes",
        "sinks",
        "kv_scale",
        "tiles",
    ],
)
def _fixed_attention_kernel(
    query, key_cache, value_cache, out, parts, stats, arrivals, block_tables, rows, query_start, context_lens,
    alibi_slopes, sinks, kv_scale, tiles, scale, num_ranges,
    stride_qt, stride_qh, stride_ot, stride_table, stride_block, stride_head, stride_token,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE_Q: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, DECODE: tl.constexpr,
    SUM_BY_DOT: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for TILE_Q queries of a sequence and the GROUP heads of a KV head, and for one of SPLITS parts of
    the ranges. DECODE: each sequence has one query; query_start and tiles are not read.
    SUM_BY_DOT: see `fold`; tiles of 16 rows then have the bytes of larger ones. EARLY: lengths, rows and block tables
    were written before the kernel ahead began, and the first range's keys are asked for before it has ended; and
    results of four ranges are loaded at once.

    parts [sequences, num_ranges, H, D], stats [sequences, num_ranges, 2, H] float32: results of ranges. arrivals: 0
    before and after, one for each sequence and KV head.
    """
    if PDL:
        launch_dependents()
        if EARLY:
            _prefetch_range(
                key_cache, value_cache, block_tables, rows, context_lens, tl.program_id(0) // NUM_KV_HEADS,
                tl.program_id(0) % NUM_KV_HEADS, tl.program_id(1), stride_table, stride_block, stride_head,
                stride_token, HEAD_DIM, RANGE, PAGE, WINDOW,
            )  # fmt: skip
        wait_for_inputs()
    head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)
    if DECODE:
        seq = tile
        first_query = 0
        start = tile
        query_len = 1
    else:
        seq = tl.load(tiles + tile * 2)
        first_query = tl.load(tiles + tile * 2 + 1)
        start = tl.load(query_start + seq)
        query_len = tl.load(query_start + seq + 1) - start
    context_len = tl.load(context_lens + seq)
    table = block_tables + tl.load(rows + seq).to(tl.int64) * stride_table

    m_index = tl.arange(0, BLOCK_M)
    query_index = first_query + m_index // GROUP
    heads = head * GROUP + m_index % GROUP
    d = tl.arange(0, D_PAD)
    row_mask = (m_index < TILE_Q * GROUP) & (query_index < query_len)
    q_mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    tokens = (start + query_index).to(tl.int64)
    q = tl.load(query + tokens[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :], mask=q_mask, other=0.0)
    if SCALED:  # the scores and the sum of values, not each key and value
        scale *= tl.load(kv_scale + head)
    FP8: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    if FP8 and q.dtype == tl.bfloat16:  # e4m3 becomes float16 in one instruction, exactly
        q = q.to(tl.float16)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_slopes + heads)
    key_base = key_cache + head.to(tl.int64) * stride_head
    value_base = value_cache + head.to(tl.int64) * stride_head

    first_pos = context_len - query_len + first_query
    end = tl.minimum(first_pos + TILE_Q, context_len)  # of the keys that any row sees
    query_pos = tl.minimum(context_len - query_len + query_index, context_len - 1)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(first_pos - WINDOW + 1, 0)
    first_range, end_range = oldest // RANGE, tl.cdiv(end, RANGE)

    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for index in range(first_range + split, end_range, SPLITS):
        part = no_sum(BLOCK_M, D_PAD, False)
        part_m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        part_l = tl.zeros([BLOCK_M], tl.float32)
        begin = tl.maximum(index * RANGE, oldest // BLOCK_N * BLOCK_N)
        for at in tl.range(begin, tl.minimum(index * RANGE + RANGE, end), BLOCK_N, num_stages=STAGES):
            part, part_m, part_l = attend_tile(
                at, q, part, part_m, part_l, key_base, value_base, table, oldest, context_len, query_pos, slopes,
                scale, stride_block, stride_token, head, BLOCK_N, PAGE, HEAD_DIM, D_PAD, WINDOW, None, SOFT_CAP,
                ALIBI, True, PRECISION, True, SUM_BY_DOT,
            )  # fmt: skip
        if SPLITS == 1:
            acc, m, l = _merged(acc, m, l, part[0], part_m, part_l)
        else:
            at_part = seq.to(tl.int64) * num_ranges + index
            at_head = at_part * (NUM_KV_HEADS * GROUP) + heads
            tl.store(parts + at_head[:, None] * HEAD_DIM + d[None, :], part[0], mask=q_mask)
            at_stat = stats + at_part * (2 * NUM_KV_HEADS * GROUP) + heads
            tl.store(at_stat, part_m, mask=row_mask)
            tl.store(at_stat + NUM_KV_HEADS * GROUP, part_l, mask=row_mask)
    is_last = split >= 0
    counter = arrivals + seq * NUM_KV_HEADS + head
    if SPLITS > 1:
        tl.debug_barrier()  # all of this program's results are stored before it arrives
        is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        tl.debug_barrier()
    if is_last:
        if SPLITS > 1:
            TOGETHER: tl.constexpr = 4 if EARLY and BLOCK_M == 16 else 1  # what is no range changes nothing
            for first in range(first_range, end_range, TOGETHER):
                loaded = ()
                for i in tl.static_range(TOGETHER):
                    inside = row_mask & (first + i < end_range)
                    at_part = seq.to(tl.int64) * num_ranges + first + i
                    at_head = parts + (at_part * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + d[None, :]
                    at_stat = stats + at_part * (2 * NUM_KV_HEADS * GROUP) + heads
                    found = (
                        tl.load(at_head, mask=q_mask & inside[:, None], other=0.0, cache_modifier=".cg"),
                        tl.load(at_stat, mask=inside, other=-float("inf"), cache_modifier=".cg"),
                        tl.load(at_stat + NUM_KV_HEADS * GROUP, mask=inside, other=0.0, cache_modifier=".cg"),
                    )
                    loaded = loaded + (found,)  # type: ignore[assignment]  # noqa: RUF005
                for i in tl.static_range(TOGETHER):
                    acc, m, l = _merged(acc, m, l, loaded[i][0], loaded[i][1], loaded[i][2])
            tl.store(counter, 0)
        if SCALED:
            acc *= tl.load(kv_scale + NUM_KV_HEADS + head)
        acc = normalised(acc, m, l, sinks + heads, row_mask, SINKS)
        to = out + tokens[:, None] * stride_ot + heads[:, None] * HEAD_DIM + d[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=q_mask)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Counters of the sequences' heads whose ranges are divided. Kernels of a device run one after the other."""
    return torch.zeros(PROGRAMS * num_multiprocessors(device), dtype=torch.int32, device=device)


class Tile(NamedTuple):
    """Rows and queries of a program, how many of them share a sequence's ranges, stages and warps. early: see the
    kernel.
    """

    rows: int
    queries: int
    splits: int = 1
    stages: int = 3
    warps: int = 4
    early: bool = False


class DecodeForm(NamedTuple):
    """A way to compute decodes, which changes no bit: rows of a tile of 16-bit queries, its warps, stages of a program
    that has a sequence's ranges alone and of those that share them: with 2 to 4 there is room for one tile of keys,
    then for one more each second stage. early: lengths, rows and block tables were written before the kernel ahead
    began.
    """

    rows: int = 16
    warps: int = 4
    stages: int = 2
    shared_stages: int = 2
    early: bool = False


PLAIN = DecodeForm()


def prefill(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    tiles: Tensor,
    out: Tensor,
    stages: int = 3,
) -> None:
    """Compute the attention of the queries [T, H, D] of tiles [N, 2] into `out`; see
    `kernels.paged_attention_prefill`. stages: of loads; keys are loaded beside products from 5 on.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads = context.key_cache.shape[1]
    queries = prefill_tile_queries(num_heads, num_kv_heads, head_dim, query.dtype)
    tile = Tile(prefill_block_m(head_dim, query.dtype), queries, stages=stages)
    _launch(query, query_start, context, args, tiles, out, tile)


def decode(query: Tensor, context: PagedContext, args: AttentionArgs, out: Tensor, form: DecodeForm = PLAIN) -> None:
    """Compute the attention of the query [B, H, D] of each sequence into `out`."""
    num_seqs, num_heads, head_dim = query.shape
    _, num_kv_heads, page, _ = context.key_cache.shape
    ranges, splits = cdiv(context.block_tables.shape[1] * page, RANGE), 1
    if num_seqs * ranges * num_heads * head_dim * 4 <= MOST_BYTES:
        most = PROGRAMS * num_multiprocessors(query.device)
        while 2 * splits <= ranges and 2 * splits * num_seqs * num_kv_heads <= most:
            splits *= 2
    stages = form.stages if splits == 1 else form.shared_stages
    tile = Tile(prefill_block_m(head_dim, query.dtype), 1, splits, stages, early=form.early)
    if query.itemsize == 2 and head_dim <= 128:
        is_low = _sums_by_dot(query, context) and num_heads // num_kv_heads <= form.rows
        tile = tile._replace(rows=form.rows, warps=form.warps) if is_low else tile._replace(rows=64)
    _launch(query, context.lens, context, args, None, out, tile)


def _sums_by_dot(query: Tensor, context: PagedContext) -> bool:
    """Return whether tensor cores add up probabilities. An e4m3 cache's channels are multiplied in another order by the
    instruction of 16 rows, so they have no such tiles.
    """
    return query.itemsize == context.key_cache.itemsize == 2


def _launch(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    tiles: Tensor | None,
    out: Tensor,
    tile: Tile,
) -> None:
    """tiles: None: of a query for each sequence."""
    if missing := KNOWN.missing(args):
        raise NotImplementedError(f"no deterministic kernel computes attention with {', '.join(missing)}")
    _, num_heads, head_dim = query.shape
    keys, lens, tables = context.key_cache, context.lens, context.block_tables
    _, num_kv_heads, page, _ = keys.shape
    small = query.dtype == torch.float32 or head_dim > 128
    ranges, parts, stats = cdiv(tables.shape[1] * page, RANGE), out, out
    if tile.splits > 1:
        parts = query.new_empty(len(query), ranges, num_heads, head_dim, dtype=torch.float32)
        stats = query.new_empty(len(query), ranges, 2, num_heads, dtype=torch.float32)
    optional: list[Any] = [lens if each is None else each for each in (args.alibi_slopes, args.sinks, args.kv_scale)]
    num_tiles = len(query) if tiles is None else len(tiles)
    _fixed_attention_kernel[(num_tiles * num_kv_heads, tile.splits)](
        query, keys, context.value_cache, out, parts, stats,
        _counters(query.device) if tile.splits > 1 else lens, tables, context.rows, query_start, lens, *optional,
        lens if tiles is None else tiles, args.scale, ranges,
        query.stride(0), query.stride(1), out.stride(0), tables.stride(0), keys.stride(0), keys.stride(1),
        keys.stride(2), NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        D_PAD=max(16, next_power_of_2(head_dim)), BLOCK_M=tile.rows, TILE_Q=tile.queries, BLOCK_N=32 if small else 64,
        RANGE=RANGE, PAGE=page, WINDOW=args.window, SOFT_CAP=args.soft_cap, ALIBI=args.alibi_slopes is not None,
        SINKS=args.sinks is not None, SCALED=args.kv_scale is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", STAGES=2 if small else tile.stages,
        SPLITS=tile.splits, DECODE=tiles is None, SUM_BY_DOT=_sums_by_dot(query, context), EARLY=tile.early,
        num_warps=8 if tile.rows == 128 else tile.warps, **pdl_options(query.device),
    )  # fmt: skip
