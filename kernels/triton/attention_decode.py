"""Paged attention for sequences of one query token (decode), in Triton: GQA-packed, split over the KV by a balanced
work map.

The work is a line of tiles: for each sequence, for each KV head, the tiles of TILE keys that the context, or its
window, touches. A fixed number of programs cut that line into equal pieces (stream-K), whatever the lengths are, so one
long context does not hold up the rest. A (sequence, head) pair that lies inside one piece is written at once; one that
is cut leaves partial results, and the last program to arrive merges them. Which program starts where is computed on the
device once per step and serves every layer. Nothing here depends on the longest context and every buffer is static, so
a CUDA graph can hold it.

With QUERIES above 1, successive sequences that are successive tokens of one row, such as a newest token and its drafts,
share a tile of queries: the keys and values are read once for all of them (see `DecodePlan.spans`).

Sources: Flash-Decoding (Dao et al., 2023), stream-K (Osama et al., arXiv 2301.03598), PagedAttention (Kwon et al.,
arXiv 2309.06180).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.plan import DecodePlan
from kernels.gpu.attention import Output
from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.gpu.rounding import DTYPES, rounded
from kernels.triton.paged_tile import (
    LOG2E,
    first_local_block,
    first_vertical_block,
    fold,
    load_kv_tile,
    no_sum,
    normalised,
    soft_capped,
    whole_sum,
)

KNOWN = KnownArgs("window", "soft_cap", "alibi_slopes", "sinks", "sparse", "kv_scale", "causal")


@triton.jit
def _vertical_tiles(local_block, TILE: tl.constexpr, SPARSE: tl.constexpr, RESIDUES: tl.constexpr):
    """Tiles before the local blocks that a KV head's queries see: those of RESIDUES blocks in each stride."""
    return tl.cdiv(local_block, SPARSE[2]) * (RESIDUES * (SPARSE[0] // TILE))


@triton.jit
def _joins(context_lens, rows, b, num_seqs, QUERIES: tl.constexpr):
    """Return whether sequence b [B] is the token after that of the sequence before, and shares its tile of queries."""
    inside = (b % QUERIES != 0) & (b < num_seqs)
    len_before = tl.load(context_lens + b - 1, mask=inside, other=0)
    is_next = tl.load(context_lens + b, mask=inside, other=0) == len_before + 1
    is_same = tl.load(rows + b, mask=inside, other=0) == tl.load(rows + b - 1, mask=inside, other=0)
    return inside & (len_before > 0) & is_next & is_same


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["context_lens", "rows"])
def _plan_kernel(
    context_lens, rows, starts, work, spans, num_seqs, QUERIES: tl.constexpr, PREFIX: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SPARSE: tl.constexpr, RESIDUES: tl.constexpr,
    MIN_TILES: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    program = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    lens = tl.load(context_lens + b, mask=b < num_seqs, other=0)
    span = tl.full([BLOCK_B], 1, tl.int32)
    if QUERIES > 1:
        joined = (b < num_seqs) & (lens > 0)
        for nth in tl.static_range(1, QUERIES):
            joined &= _joins(context_lens, rows, b + nth, num_seqs, QUERIES)
            span += joined.to(tl.int32)
        is_first = (lens > 0) & ~_joins(context_lens, rows, b, num_seqs, QUERIES)
        span = tl.where(is_first, span, 0)
        lens = tl.where(is_first, lens, 0)
        tl.store(spans + b, span, mask=(b < num_seqs) & (program == 0))
    tiles = tl.cdiv(tl.where(lens > 0, lens + span - 1, 0), TILE) * NUM_KV_HEADS
    if WINDOW > 0:  # tiles wholly before the window are not counted
        tiles -= tl.maximum(lens - WINDOW, 0) // TILE * NUM_KV_HEADS
    if PREFIX:  # nor those of a prefix that others share
        tiles -= tl.load(starts + b, mask=b < num_seqs, other=0) // TILE * NUM_KV_HEADS
    if SPARSE is not None:
        local = first_local_block(lens - 1, SPARSE)
        tiles += (_vertical_tiles(local, TILE, SPARSE, RESIDUES) - local * (SPARSE[0] // TILE)) * NUM_KV_HEADS
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    per_program = tl.maximum(tl.cdiv(total, tl.num_programs(0)), MIN_TILES)
    first = program * per_program
    passed = ends <= first
    seq = tl.minimum(tl.sum(passed.to(tl.int32), 0), num_seqs - 1)
    entry = work + program * 8
    tl.store(entry, tl.maximum(tl.minimum(per_program, total - first), 0))
    tl.store(entry + 1, per_program)
    tl.store(entry + 2, seq)
    tl.store(entry + 3, first - tl.max(tl.where(passed, ends, 0), 0))
    tl.store(entry + 4, tl.load(context_lens + seq))
    tl.store(entry + 5, tl.load(rows + seq))
    if QUERIES > 1:
        tl.store(entry + 6, tl.sum(tl.where(b == seq, span, 0), 0))


def _sparse_options(plan: DecodePlan) -> dict[str, object]:
    if plan.sparse is None:
        return {"SPARSE": None, "RESIDUES": 0}
    return {"SPARSE": plan.sparse.constants, "RESIDUES": plan.sparse.residues(plan.group)}


def plan_decode(context_lens: Tensor, rows: Tensor, plan: DecodePlan) -> None:
    """See `kernels.reference.plan_decode`."""
    num_programs, prefix = len(plan.work), plan.prefix
    _plan_kernel[(num_programs,)](
        context_lens, rows, rows if prefix is None else prefix.starts, plan.work, plan.spans, len(context_lens),
        QUERIES=plan.queries, PREFIX=prefix is not None,
        NUM_KV_HEADS=plan.num_kv_heads, TILE=plan.tile, WINDOW=plan.window, **_sparse_options(plan),
        MIN_TILES=plan.min_tiles, BLOCK_B=max(16, next_power_of_2(plan.max_seqs)), num_warps=4,
        **pdl_options(context_lens.device),
    )  # fmt: skip


@triton.jit
def _attend_tile(
    start, q, acc, m, l, key_base, value_base, table, oldest, end, seen, lens, slopes, scale, stride_block,
    stride_token, TILE: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
    BY_ROW: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys [start, start + TILE) into the running (acc, m, l). Unmasked, all of them lie inside [oldest, end).

    BY_ROW, only the rows that `seen` names see them. lens: of the context; with several QUERIES, of each row's [M].
    """
    k, v = load_kv_tile(
        key_base, value_base, table, start, oldest, end, stride_block, stride_token, q.dtype,
        TILE, PAGE, HEAD_DIM, D_PAD, PAIRS, WINDOW, MASKED,
    )  # fmt: skip
    s = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFT_CAP > 0:
        s = soft_capped(s, SOFT_CAP)
    positions = start + tl.arange(0, TILE)
    if ALIBI:
        if QUERIES > 1:
            s += slopes[:, None] * (positions[None, :] - (lens - 1)[:, None]).to(tl.float32)
        else:
            s += slopes[:, None] * (positions - (lens - 1)).to(tl.float32)[None, :]
    s *= LOG2E
    if MASKED:
        keep = (positions < end)[None, :]
        if WINDOW > 0:
            keep &= (positions >= oldest)[None, :]
        if BY_ROW:
            keep &= seen[:, None]
        if QUERIES > 1:
            keep &= positions[None, :] < lens[:, None]
            if WINDOW > 0:
                keep &= positions[None, :] >= (lens - WINDOW)[:, None]
        s = tl.where(keep, s, -float("inf"))
    return fold(s, v, acc, m, l, PRECISION)


@triton.jit
def _merged(
    partial_out, partial_stats, first_program, origin, step, count, pair_start, per_program, num_rows,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """The sum (acc [G2, D_PAD], m, l [G2]) of `count` partial results of one (sequence, KV head) pair.

    They are those of the programs origin, origin + step, ...; first_program takes the place of an origin before it. The
    first num_rows of GROUP rows have been stored.
    """
    G2: tl.constexpr = triton.next_power_of_2(GROUP)
    CHUNK: tl.constexpr = max(1, 4096 // (G2 * D_PAD))
    g = tl.arange(0, G2)
    d = tl.arange(0, D_PAD)
    acc = tl.zeros([G2, D_PAD], tl.float32)
    m = tl.full([G2], -float("inf"), tl.float32)
    l = tl.zeros([G2], tl.float32)
    for first in range(0, count, CHUNK):
        some = first + tl.arange(0, CHUNK)
        programs = tl.maximum(origin + some * step, first_program)
        parts = (programs * 2 + tl.where(programs * per_program >= pair_start, 0, 1))[:, None]
        valid = (some < count)[:, None] & (g < num_rows)[None, :]
        at = partial_stats + parts * 2 * GROUP + g[None, :]
        some_m = tl.load(at, mask=valid, other=-float("inf"), cache_modifier=".cg")
        some_l = tl.load(at + GROUP, mask=valid, other=0.0, cache_modifier=".cg")
        some_out = tl.load(
            partial_out + (parts * GROUP + g[None, :])[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=valid[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_m = tl.maximum(m, tl.max(some_m, 0))
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        weights = tl.exp2(some_m - base[None, :])
        rescale = tl.exp2(m - base)
        acc = acc * rescale[:, None] + tl.sum(some_out * weights[:, :, None], 0)
        l = l * rescale + tl.sum(some_l * weights, 0)
        m = new_m
    return acc, m, l


@triton.jit
def _store_heads(
    values, out, scale, stride_ot, stride_row, stride_group, span, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, LARGEST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Store the result of a group's heads [at least GROUP, D_PAD] in out [GROUP, D], rounded to codes unless LARGEST is
    0: with a scale for each head. With several QUERIES, those of the first `span`, each in an out of its own."""
    g = tl.arange(0, values.shape[0])
    d = tl.arange(0, D_PAD)
    valid = g < GROUP
    at = g * HEAD_DIM
    scale_at = g * stride_group
    if QUERIES > 1:
        valid = g < span * GROUP
        at = g // GROUP * stride_ot + g % GROUP * HEAD_DIM
        scale_at = g // GROUP * stride_row + g % GROUP * stride_group
    values = values.to(dtype)
    if LARGEST > 0:
        values, scales = rounded(values.to(tl.float32), out.dtype.element_ty, LARGEST)
        tl.store(scale + scale_at[:, None], scales, mask=valid[:, None])
    tl.store(out + at[:, None] + d[None, :], values, mask=valid[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def _arrive(
    partial_out, partial_stats, counter, group_counters, out, out_scale, stride_ot, stride_row, stride_group, sinks,
    span, program, pair_start, num_tiles, per_program, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SINKS: tl.constexpr,
    FAN_IN: tl.constexpr, LARGEST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Count that `program` has stored its partial result of a pair. The last program to do so merges all into out
    [GROUP, D], see `_store_heads`.

    With FAN_IN, the last of FAN_IN neighbours first merges their results into the part of the first of them.
    """
    ROWS: tl.constexpr = QUERIES * GROUP
    g = tl.arange(0, triton.next_power_of_2(ROWS))
    d = tl.arange(0, D_PAD)
    num_rows = GROUP
    if QUERIES > 1:
        num_rows = span * GROUP
    mask = (g < num_rows)[:, None] & (d < HEAD_DIM)[None, :]
    first_program = pair_start // per_program
    last_program = (pair_start + num_tiles - 1) // per_program
    origin = first_program
    step = 1
    awaited = last_program - first_program + 1
    complete = awaited > 0
    if FAN_IN > 0:  # noqa: SIM102 (what follows is compiled only where it is asked for)
        if awaited > 2 * FAN_IN:
            first = tl.maximum(program // FAN_IN * FAN_IN, first_program)
            neighbours = tl.minimum(program // FAN_IN * FAN_IN + FAN_IN - 1, last_program) - first + 1
            part = first * 2 + tl.where(first * per_program >= pair_start, 0, 1)
            complete = tl.atomic_add(group_counters + part, 1, sem="acq_rel", scope="gpu") == neighbours - 1
            if complete:
                tl.debug_barrier()
                acc, m, l = _merged(
                    partial_out, partial_stats, first, first, 1, neighbours, pair_start, per_program, num_rows, ROWS,
                    HEAD_DIM, D_PAD,
                )  # fmt: skip
                tl.debug_barrier()  # every part is read before one of them is overwritten
                tl.store(partial_out + (part * ROWS + g)[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
                tl.store(partial_stats + part * 2 * ROWS + g, m, mask=g < num_rows)
                tl.store(partial_stats + part * 2 * ROWS + ROWS + g, l, mask=g < num_rows)
                tl.store(group_counters + part, 0)
                tl.debug_barrier()
            origin = first_program // FAN_IN * FAN_IN
            step = FAN_IN
            awaited = last_program // FAN_IN - first_program // FAN_IN + 1
    if complete:
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == awaited - 1:
            tl.debug_barrier()
            acc, m, l = _merged(
                partial_out, partial_stats, first_program, origin, step, awaited, pair_start, per_program,
                num_rows, ROWS, HEAD_DIM, D_PAD,
            )  # fmt: skip
            acc = normalised(acc, m, l, sinks + g % GROUP, g < num_rows, SINKS)
            _store_heads(
                acc, out, out_scale, stride_ot, stride_row, stride_group, span, GROUP, QUERIES, HEAD_DIM, D_PAD,
                LARGEST, dtype,
            )  # fmt: skip
            tl.store(counter, 0)


@triton.jit(
    do_not_specialize=["num_seqs", "stride_row", "stride_group"],
    do_not_specialize_on_alignment=["rows", "context_lens", "alibi_slopes", "sinks", "kv_scale"],
)
def _decode_kernel(
    query, key_cache, value_cache, out, out_scale, block_tables, rows, context_lens, alibi_slopes, sinks, kv_scale,
    work, spans, partial_out, partial_stats, arrivals, group_arrivals, starts, prefix_out, prefix_stats, scale,
    num_seqs, stride_qt, stride_qh, stride_ot, stride_row, stride_group, stride_table, stride_block, stride_head,
    stride_token,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, G_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    PLAN_WINDOW: tl.constexpr, PREFIX: tl.constexpr,
    SPARSE: tl.constexpr, RESIDUES: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FAN_IN: tl.constexpr, LARGEST: tl.constexpr,
    dtype: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The work map, the lengths, the rows and the block tables were written before the preceding kernel began (see
    # `plan_decode`), so they may be read before the wait. The queries and the newest keys and values may not.
    program = tl.program_id(0)
    entry = work + program * 8
    left = tl.load(entry)
    per_program = tl.load(entry + 1)
    seq = tl.load(entry + 2)
    inner = tl.load(entry + 3)
    context_len = tl.load(entry + 4)
    row = tl.load(entry + 5)
    at_tile = program * per_program
    end = at_tile + left
    ROWS: tl.constexpr = QUERIES * GROUP
    r = tl.arange(0, G_PAD)  # a row is a query and a head of the group
    g = r
    d = tl.arange(0, D_PAD)
    head_mask = r < GROUP
    span = 1
    if QUERIES > 1:
        g = r % GROUP
        span = tl.load(entry + 6)
    q_mask = head_mask[:, None] & (d < HEAD_DIM)[None, :]
    FP8: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    if PDL:
        launch_dependents()
        wait_for_inputs()

    for empty in range(program, num_seqs, tl.num_programs(0)):  # a padding row has no tile: its output is 0
        if tl.load(context_lens + empty) == 0:
            for head in range(NUM_KV_HEADS):
                _store_heads(
                    tl.zeros([G_PAD, D_PAD], tl.float32), out + empty * stride_ot + head * GROUP * HEAD_DIM,
                    out_scale + empty * stride_row + head * GROUP * stride_group, stride_ot, stride_row, stride_group,
                    1, GROUP, QUERIES, HEAD_DIM, D_PAD, LARGEST, dtype,
                )  # fmt: skip

    while at_tile < end:
        first_tile = 0
        if PLAN_WINDOW > 0:
            first_tile = tl.maximum(context_len - PLAN_WINDOW, 0) // TILE
        if PREFIX:
            first_tile = tl.load(starts + seq) // TILE
        length = context_len  # of the last query's context
        if QUERIES > 1:
            length = tl.where(span > 0, context_len + span - 1, first_tile * TILE)
        num_tiles = tl.cdiv(length, TILE) - first_tile
        if SPARSE is not None:  # a tile's number is that in the line of those that are seen
            local = first_local_block(context_len - 1, SPARSE)
            vertical = _vertical_tiles(local, TILE, SPARSE, RESIDUES)
            to_local = local * (SPARSE[0] // TILE) - vertical
            num_tiles -= to_local
        if num_tiles == 0:
            seq += 1
            context_len = tl.load(context_lens + seq)
            row = tl.load(rows + seq)
            if QUERIES > 1:
                span = tl.load(spans + seq)
        else:
            head = inner // num_tiles
            first = inner - head * num_tiles
            count = tl.minimum(num_tiles - first, end - at_tile)
            begin = first_tile + first
            last = begin + count

            table = block_tables + row.to(tl.int64) * stride_table
            key_base = key_cache + head.to(tl.int64) * stride_head
            value_base = value_cache + head.to(tl.int64) * stride_head
            heads = head * GROUP + g
            lens = context_len
            q_at = query + seq * stride_qt + heads[:, None] * stride_qh + d[None, :]
            if QUERIES > 1:
                head_mask = r < span * GROUP
                q_mask = head_mask[:, None] & (d < HEAD_DIM)[None, :]
                lens = context_len + r // GROUP
                q_at += (r // GROUP)[:, None] * stride_qt
            q = tl.load(q_at, mask=q_mask, other=0.0)
            score_scale = scale
            if FP8:  # the scores and the sum of values are scaled, not each key and value
                score_scale *= tl.load(kv_scale + head)
                if q.dtype == tl.bfloat16:  # e4m3 becomes float16 in one instruction, exactly
                    q = q.to(tl.float16)
            slopes = tl.zeros([G_PAD], tl.float32)
            if ALIBI:
                slopes = tl.load(alibi_slopes + heads, mask=head_mask, other=0.0)
            acc = no_sum(G_PAD, D_PAD, FP8)
            m = tl.full([G_PAD], -float("inf"), tl.float32)
            l = tl.zeros([G_PAD], tl.float32)

            if SPARSE is not None:
                for tile in tl.range(begin, tl.minimum(last, vertical), num_stages=STAGES):
                    nth = tile // (SPARSE[0] // TILE)
                    block = nth // RESIDUES * SPARSE[2] + first_vertical_block(head * GROUP + nth % RESIDUES, SPARSE)
                    seen = head_mask & ((block + (SPARSE[4] + heads) * SPARSE[3] + 1) % SPARSE[2] == 0)
                    acc, m, l = _attend_tile(
                        block * SPARSE[0] + tile % (SPARSE[0] // TILE) * TILE, q, acc, m, l, key_base, value_base,
                        table, 0, local * SPARSE[0], seen, lens, slopes, score_scale, stride_block, stride_token,
                        TILE, PAGE, HEAD_DIM, D_PAD, FP8, 0, SOFT_CAP, ALIBI, True, True, 1, PRECISION,
                    )  # fmt: skip
                begin = tl.maximum(begin, vertical) + to_local
                last += to_local

            # Tiles [whole, whole_end) need no mask.
            whole = begin
            oldest = 0
            if WINDOW > 0:
                oldest = tl.maximum(context_len - WINDOW, 0)
                whole = tl.maximum(begin, tl.cdiv(tl.maximum(length - WINDOW, 0), TILE))
                for tile in tl.range(tl.maximum(begin, oldest // TILE), tl.minimum(whole, last), num_stages=1):
                    acc, m, l = _attend_tile(
                        tile * TILE, q, acc, m, l, key_base, value_base, table, oldest, length, head_mask, lens,
                        slopes, score_scale, stride_block, stride_token, TILE, PAGE, HEAD_DIM, D_PAD, FP8,
                        WINDOW, SOFT_CAP, ALIBI, True, False, QUERIES, PRECISION,
                    )  # fmt: skip
            whole_end = tl.maximum(whole, tl.minimum(last, context_len // TILE))
            for tile in tl.range(whole, whole_end, num_stages=STAGES):
                acc, m, l = _attend_tile(
                    tile * TILE, q, acc, m, l, key_base, value_base, table, oldest, length, head_mask, lens, slopes,
                    score_scale, stride_block, stride_token, TILE, PAGE, HEAD_DIM, D_PAD, FP8, WINDOW, SOFT_CAP, ALIBI,
                    False, False, QUERIES, PRECISION,
                )  # fmt: skip
            for tile in tl.range(whole_end, last, num_stages=1):
                acc, m, l = _attend_tile(
                    tile * TILE, q, acc, m, l, key_base, value_base, table, oldest, length, head_mask, lens, slopes,
                    score_scale, stride_block, stride_token, TILE, PAGE, HEAD_DIM, D_PAD, FP8, WINDOW, SOFT_CAP, ALIBI,
                    True, False, QUERIES, PRECISION,
                )  # fmt: skip

            acc = whole_sum(acc)
            if PREFIX:  # noqa: SIM102 (what follows is compiled only where it is asked for)
                if (first == 0) & (first_tile > 0):  # the pair's first part has the sums of the prefix, too
                    of_prefix = prefix_stats + seq.to(tl.int64) * (2 * NUM_KV_HEADS * GROUP) + heads
                    prefix_m = tl.load(of_prefix, mask=head_mask, other=-float("inf"))
                    prefix_l = tl.load(of_prefix + NUM_KV_HEADS * GROUP, mask=head_mask, other=0.0)
                    at = prefix_out + (seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM
                    new_m = tl.maximum(m, prefix_m)
                    base = tl.where(new_m == -float("inf"), 0.0, new_m)
                    weight, rescale = tl.exp2(prefix_m - base), tl.exp2(m - base)
                    acc = acc * rescale[:, None] + tl.load(at + d[None, :], mask=q_mask, other=0.0) * weight[:, None]
                    l = l * rescale + prefix_l * weight
                    m = new_m
            if FP8:
                acc *= tl.load(kv_scale + NUM_KV_HEADS + head)
            out_at = out + seq * stride_ot + head * GROUP * HEAD_DIM
            scale_at = out_scale + seq * stride_row + head * GROUP * stride_group
            if count == num_tiles:
                acc = normalised(acc, m, l, sinks + heads, head_mask, SINKS)
                _store_heads(
                    acc, out_at, scale_at, stride_ot, stride_row, stride_group, span, GROUP, QUERIES, HEAD_DIM, D_PAD,
                    LARGEST, dtype,
                )  # fmt: skip
            else:
                pair_start = at_tile - first
                slot = tl.where(program * per_program >= pair_start, 0, 1)
                part = program * 2 + slot
                tl.store(partial_out + (part * ROWS + r)[:, None] * HEAD_DIM + d[None, :], acc, mask=q_mask)
                tl.store(partial_stats + part * 2 * ROWS + r, m, mask=head_mask)
                tl.store(partial_stats + part * 2 * ROWS + ROWS + r, l, mask=head_mask)
                tl.debug_barrier()  # every thread's partial result is written before the arrival is counted
                _arrive(
                    partial_out, partial_stats, arrivals + seq * NUM_KV_HEADS + head, group_arrivals, out_at, scale_at,
                    stride_ot, stride_row, stride_group, sinks + head * GROUP, span, program, pair_start, num_tiles,
                    per_program, GROUP, QUERIES, HEAD_DIM, D_PAD, SINKS, FAN_IN, LARGEST, dtype,
                )  # fmt: skip
            at_tile += count
            inner += count
            if inner == num_tiles * NUM_KV_HEADS:
                inner = 0
                if at_tile < end:
                    seq += 1
                    context_len = tl.load(context_lens + seq)
                    row = tl.load(rows + seq)
                    if QUERIES > 1:
                        span = tl.load(spans + seq)


def launch(
    query: Tensor, context: PagedContext, args: AttentionArgs, plan: DecodePlan, output: Output, dependent: bool
) -> None:
    """Compute the attention of query [B, H, D] into `output`. `dependent`: the plan was written before the preceding
    kernel.
    """
    num_seqs, num_heads, head_dim = query.shape
    keys, lens, prefix = context.key_cache, context.lens, plan.prefix
    _, num_kv_heads, page, _ = keys.shape
    group = num_heads // num_kv_heads
    _decode_kernel[(len(plan.work),)](
        query, keys, context.value_cache, output.values, output.scale, context.block_tables, context.rows, lens,
        lens if args.alibi_slopes is None else args.alibi_slopes, lens if args.sinks is None else args.sinks,
        lens if args.kv_scale is None else args.kv_scale,
        plan.work, plan.spans, plan.partial_out, plan.partial_stats, plan.arrivals, plan.group_arrivals,
        *((lens,) * 3 if prefix is None else (prefix.starts, prefix.out, prefix.stats)), args.scale, num_seqs,
        query.stride(0), query.stride(1), output.values.stride(0), *output.scale.stride()[:2],
        context.block_tables.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, QUERIES=plan.queries,
        G_PAD=max(16, next_power_of_2(plan.queries * group)),
        HEAD_DIM=head_dim, D_PAD=max(16, next_power_of_2(head_dim)),
        TILE=plan.tile, PAGE=page, WINDOW=args.window, PLAN_WINDOW=plan.window,
        PREFIX=prefix is not None, **_sparse_options(plan), SOFT_CAP=args.soft_cap,
        ALIBI=args.alibi_slopes is not None, SINKS=args.sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        STAGES=plan.num_stages, FAN_IN=plan.fan_in, LARGEST=output.largest, dtype=DTYPES[output.dtype],
        num_warps=plan.num_warps,
        **(pdl_options(query.device) if dependent else {"PDL": False}),  # not after the kernel that makes the map
    )  # fmt: skip
