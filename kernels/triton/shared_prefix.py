"""Decode attention over prefixes that several sequences have in common, in Triton: their keys are read once for all.

Sequences have a prefix in common where their block tables name the same blocks, so that is found on the device, once a
step: `plan_prefix` sorts sequences into groups by one entry of their tables, and counts how many leading ones agree. A
layer's `attend_prefix` computes the sums over a prefix for tiles of queries of its group, on tensor cores. The decode
kernel begins after the prefix, and adds them to its own (`DecodePlan.prefix`).

Sources: Hydragen (Juravsky et al., arXiv 2402.05099); stream-K (Osama et al., arXiv 2301.03598).
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.plan import MIN_MEMBERS, MIN_SHARED, SHARED_ROWS, DecodePlan
from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.attention_decode import _merged
from kernels.triton.attention_prefill import attend_tile
from kernels.triton.paged_tile import no_sum, whole_sum

KNOWN = KnownArgs("soft_cap", "sinks", "kv_scale")
MIN_TILES = 4  # of keys for a program: fewer cost more in merging than they gain
CHUNK = 32  # sequences that are compared with all others at a time
_LONG = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["context_lens", "rows"])
def _groups_kernel(
    context_lens, rows, block_tables, keys, shared, members, num_seqs, stride_table,
    PAGE: tl.constexpr, MIN_SHARED: tl.constexpr, MIN_MEMBERS: tl.constexpr, MAX_SEQS: tl.constexpr,
    QUERIES: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_B: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. A group's key is the block of the last of the first MIN_SHARED tokens, which implies all before."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    b = tl.arange(0, BLOCK_B)
    inside = b < num_seqs
    lens = tl.load(context_lens + b, mask=inside, other=0)
    row = tl.load(rows + b, mask=inside, other=0).to(tl.int64)
    is_long = lens > MIN_SHARED
    key = tl.load(block_tables + row * stride_table + (MIN_SHARED - 1) // PAGE, mask=is_long, other=-1)
    key = tl.where(is_long, key, -1 - b)  # no other sequence's
    tl.store(keys + b, key, mask=b < MAX_SEQS)
    tl.store(shared + b, tl.full([BLOCK_B], _LONG, tl.int32), mask=b < MAX_SEQS)
    at = tl.arange(0, triton.next_power_of_2(NUM_TILES * QUERIES))
    tl.store(members + at, tl.full(at.shape, -1, tl.int32), mask=at < NUM_TILES * QUERIES)
    tl.debug_barrier()
    count = tl.zeros([BLOCK_B], tl.int32)
    rank = tl.zeros([BLOCK_B], tl.int32)
    first = tl.full([BLOCK_B], BLOCK_B, tl.int32)
    for begin in range(0, num_seqs, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_key = tl.load(keys + other, mask=other < num_seqs, other=-_LONG)
        same = key[:, None] == other_key[None, :]
        count += tl.sum(same.to(tl.int32), 1)
        rank += tl.sum((same & (other[None, :] < b[:, None])).to(tl.int32), 1)
        first = tl.minimum(first, tl.min(tl.where(same, other[None, :], BLOCK_B), 1))
    is_member = inside & is_long & (count >= MIN_MEMBERS)
    tiles = tl.where(is_member & (rank == 0), tl.cdiv(count, QUERIES), 0)
    tl.store(keys + MAX_SEQS + b, tiles, mask=b < MAX_SEQS)
    tl.store(keys + 2 * MAX_SEQS + b, tl.where(is_member, first, -1), mask=b < MAX_SEQS)
    tl.debug_barrier()
    before = tl.zeros([BLOCK_B], tl.int32)  # tiles of groups that begin before
    for begin in range(0, num_seqs, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_tiles = tl.load(keys + MAX_SEQS + other, mask=other < num_seqs, other=0)
        before += tl.sum(tl.where(other[None, :] < first[:, None], other_tiles[None, :], 0), 1)
    tl.store(members + before * QUERIES + rank, b, mask=is_member)


@triton.jit(do_not_specialize_on_alignment=["context_lens", "rows"])
def _lengths_kernel(
    context_lens, rows, block_tables, keys, shared, stride_table, PAGE: tl.constexpr, MAX_SEQS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a sequence: how many of its leading blocks are those of its group's first member."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    b = tl.program_id(0)
    first = tl.load(keys + 2 * MAX_SEQS + b)
    if first >= 0:
        own = block_tables + tl.load(rows + b).to(tl.int64) * stride_table
        leader = block_tables + tl.load(rows + first).to(tl.int64) * stride_table
        # The newest token's block is never common, and a prefix lies before it.
        most = (tl.minimum(tl.load(context_lens + b), tl.load(context_lens + first)) - 1) // PAGE
        equal = most
        at = most * 0
        while at < most:
            index = at + tl.arange(0, BLOCKS)
            mine = tl.load(own + index, mask=index < most, other=0)
            differs = (index < most) & (mine != tl.load(leader + index, mask=index < most, other=0))
            equal = tl.minimum(equal, tl.min(tl.where(differs, index, _LONG), 0))
            at = tl.where(equal < most, most, at + BLOCKS)
        tl.atomic_min(shared + first, equal * PAGE)


@triton.jit
def _starts_kernel(keys, shared, starts, MAX_SEQS: tl.constexpr, TILE: tl.constexpr, BLOCK_B: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    b = tl.arange(0, BLOCK_B)
    first = tl.load(keys + 2 * MAX_SEQS + b, mask=b < MAX_SEQS, other=-1)
    length = tl.load(shared + first, mask=first >= 0, other=0)
    tl.store(starts + b, length // TILE * TILE, mask=b < MAX_SEQS)


def plan_prefix(context_lens: Tensor, rows: Tensor, block_tables: Tensor, page: int, plan: DecodePlan) -> None:
    """See `kernels.reference.plan_prefix`."""
    prefix = plan.prefix
    assert prefix is not None
    num_seqs, max_seqs = len(context_lens), len(prefix.shared)
    options = pdl_options(context_lens.device)
    block_b = max(16, next_power_of_2(max_seqs))
    num_tiles, queries = prefix.members.shape
    _groups_kernel[(1,)](
        context_lens, rows, block_tables, prefix.keys, prefix.shared, prefix.members, num_seqs, block_tables.stride(0),
        PAGE=page, MIN_SHARED=MIN_SHARED, MIN_MEMBERS=MIN_MEMBERS, MAX_SEQS=max_seqs, QUERIES=queries,
        NUM_TILES=num_tiles, BLOCK_B=block_b, CHUNK=CHUNK, num_warps=8, **options,
    )  # fmt: skip
    _lengths_kernel[(num_seqs,)](
        context_lens, rows, block_tables, prefix.keys, prefix.shared, block_tables.stride(0), PAGE=page,
        MAX_SEQS=max_seqs, BLOCKS=256, num_warps=2, **options,
    )  # fmt: skip
    _starts_kernel[(1,)](
        prefix.keys, prefix.shared, prefix.starts, MAX_SEQS=max_seqs, TILE=plan.tile, BLOCK_B=block_b, num_warps=4,
        **options,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["rows", "kv_scale"])
def _prefix_kernel(
    query, key_cache, value_cache, block_tables, rows, kv_scale, starts, members, out, stats, partial_out,
    partial_stats, arrivals, scale, stride_qt, stride_qh, stride_table, stride_block, stride_head, stride_token,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, NUM_TILES: tl.constexpr,
    MIN_TILES: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The work is a line: for each tile of queries, for each KV head, the prefix's tiles of keys. Programs have equal
    parts of it. Results of a (tile, head) that is cut are merged by the last program to arrive.
    """
    if PDL:
        launch_dependents()
        wait_for_inputs()
    program = tl.program_id(0)
    i = tl.arange(0, triton.next_power_of_2(NUM_TILES))
    leaders = tl.load(members + i * QUERIES, mask=i < NUM_TILES, other=-1)
    keys_of = tl.load(starts + leaders, mask=leaders >= 0, other=0) // TILE
    ends = tl.cumsum(keys_of * NUM_KV_HEADS, 0)
    total = tl.sum(keys_of * NUM_KV_HEADS, 0)
    per_program = tl.maximum(tl.cdiv(total, tl.num_programs(0)), MIN_TILES)
    at_tile = program * per_program
    end = tl.minimum(at_tile + per_program, total)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    FP8: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    while at_tile < end:
        nth = tl.sum((ends <= at_tile).to(tl.int32), 0)
        before = tl.max(tl.where(i < nth, ends, 0), 0)
        num_tiles = tl.sum(tl.where(i == nth, keys_of, 0), 0)
        head = (at_tile - before) // num_tiles
        first = at_tile - before - head * num_tiles
        count = tl.minimum(num_tiles - first, end - at_tile)

        member = tl.load(members + nth * QUERIES + r // GROUP, mask=r < QUERIES * GROUP, other=-1)
        is_row = member >= 0
        member = tl.maximum(member, 0).to(tl.int64)
        heads = head * GROUP + r % GROUP
        mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
        q = tl.load(query + member[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :], mask=mask, other=0.0)
        score_scale = scale
        if FP8:  # the scores, not each key; the sum of values is scaled where it is finished
            score_scale *= tl.load(kv_scale + head)
            if q.dtype == tl.bfloat16:  # e4m3 becomes float16 in one instruction, exactly
                q = q.to(tl.float16)
        leader = tl.load(members + nth * QUERIES)
        table = block_tables + tl.load(rows + leader).to(tl.int64) * stride_table
        key_base = key_cache + head.to(tl.int64) * stride_head
        value_base = value_cache + head.to(tl.int64) * stride_head
        acc = no_sum(ROWS, D_PAD, False)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        for tile in tl.range(first, first + count, num_stages=STAGES):
            acc, m, l = attend_tile(
                tile * TILE, q, acc, m, l, key_base, value_base, table, 0, 0, r, m, score_scale, stride_block,
                stride_token, head, TILE, PAGE, HEAD_DIM, D_PAD, 0, None, SOFT_CAP, False, False, PRECISION,
            )  # fmt: skip
        values = whole_sum(acc)
        complete = count == num_tiles
        if not complete:
            pair_start = at_tile - first
            part = program * 2 + tl.where(program * per_program >= pair_start, 0, 1)
            tl.store(partial_out + (part * ROWS + r)[:, None] * HEAD_DIM + d[None, :], values, mask=mask)
            tl.store(partial_stats + part * 2 * ROWS + r, m)
            tl.store(partial_stats + part * 2 * ROWS + ROWS + r, l)
            tl.debug_barrier()  # every thread's partial result is written before the arrival is counted
            first_program = pair_start // per_program
            awaited = (pair_start + num_tiles - 1) // per_program - first_program + 1
            counter = arrivals + nth * NUM_KV_HEADS + head
            complete = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == awaited - 1
            if complete:
                tl.debug_barrier()
                values, m, l = _merged(
                    partial_out, partial_stats, first_program, first_program, 1, awaited, pair_start, per_program,
                    ROWS, ROWS, HEAD_DIM, D_PAD,
                )  # fmt: skip
                tl.store(counter, 0)
        if complete:
            at_out = out + (member * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + d[None, :]
            tl.store(at_out, values, mask=mask)
            at_stats = stats + member * (2 * NUM_KV_HEADS * GROUP) + heads
            tl.store(at_stats, m, mask=is_row)
            tl.store(at_stats + NUM_KV_HEADS * GROUP, l, mask=is_row)
        at_tile += count


def attend_prefix(query: Tensor, context: PagedContext, args: AttentionArgs, plan: DecodePlan) -> None:
    """Write the sums over common prefixes of query [B, H, D] into the plan's `prefix`; see `plan_prefix`."""
    prefix = plan.prefix
    assert prefix is not None
    assert KNOWN.cover(args)
    _, num_heads, head_dim = query.shape
    keys = context.key_cache
    _, num_kv_heads, page, _ = keys.shape
    num_tiles, queries = prefix.members.shape
    d_pad = max(16, next_power_of_2(head_dim))
    small = query.dtype == torch.float32 or d_pad > 128
    _prefix_kernel[(len(prefix.partial_out),)](
        query, keys, context.value_cache, context.block_tables, context.rows,
        context.rows if args.kv_scale is None else args.kv_scale, prefix.starts, prefix.members, prefix.out,
        prefix.stats, prefix.partial_out, prefix.partial_stats, prefix.arrivals, args.scale, query.stride(0),
        query.stride(1), context.block_tables.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, QUERIES=queries, HEAD_DIM=head_dim, D_PAD=d_pad,
        ROWS=SHARED_ROWS, TILE=plan.tile, PAGE=page, NUM_TILES=num_tiles, MIN_TILES=MIN_TILES, SOFT_CAP=args.soft_cap,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", STAGES=2 if small else 3,
        num_warps=SHARED_ROWS // 16, **pdl_options(query.device),
    )  # fmt: skip
