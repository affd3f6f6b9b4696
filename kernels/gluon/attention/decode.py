"""Paged attention of decode steps of many sequences on Hopper, warp-specialised, in Gluon: over caches of 16-bit
numbers.

The work is cut up as in `kernels.triton.attention_decode`, a line of tiles of 64 keys in as many equal pieces as there
are programs, two on each multiprocessor. One warp brings the queries, keys and values of all pairs (sequence, KV head)
in a piece, by TMA, several stages ahead, so loads go on from one pair to the next. A warpgroup multiplies. Keys are the
rows of the tensor core's tile and query heads the columns: a tile may have few of these.

A step writes only each sequence's newest key and value, so tiles before them are asked for before the preceding kernel
ends. `kernels.gluon.attention.prefill` says how a tile is loaded in boxes.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.plan import DecodePlan
from kernels.gluon.attention.loads import ask_boxes, blocks_of_boxes
from kernels.gluon.common.layouts import barrier, box_descriptor
from kernels.gpu.attention import Output
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

LOG2E = gl.constexpr(1.4426950408889634)
TILE = 64
KNOWN = KnownArgs("window", "soft_cap", "alibi_slopes", "sinks", "causal")
SHARED_BYTES, REGISTERS = 112_000, 96  # of a program (two share a multiprocessor), and of each thread


@gluon.jit
def _piece_of_pair(
    at_tile, end, inner, context_len, skipped, TILE: gl.constexpr, WINDOW: gl.constexpr, PLAN_WINDOW: gl.constexpr
):
    """The part of a (sequence, KV head) that this program computes.

    (KV head; tiles that the plan counts; first of them here, and their number here; first and end of the context's
    tiles that are computed here; the oldest key that the query sees). skipped: keys of a prefix that others share.
    """
    first_tile = skipped // TILE
    if PLAN_WINDOW > 0:
        first_tile = gl.maximum(context_len - PLAN_WINDOW, 0) // TILE
    num_tiles = gl.cdiv(context_len, TILE) - first_tile
    head = inner // gl.maximum(num_tiles, 1)
    first = inner - head * num_tiles
    count = gl.minimum(num_tiles - first, end - at_tile)
    begin = first_tile + first
    last = begin + count
    oldest = context_len * 0
    if WINDOW > 0:
        oldest = gl.maximum(context_len - WINDOW, 0)
        begin = gl.maximum(begin, oldest // TILE)
    return head, num_tiles, first, count, begin, last, oldest


@gluon.jit
def _following(seq, context_lens, rows, starts, num_seqs, PREFIX: gl.constexpr):
    """Context length, row and skipped keys of the next sequence, if there is one."""
    after = gl.minimum(seq + 1, num_seqs - 1)
    return gl.load(context_lens + after), gl.load(rows + after), _skipped(after, starts, PREFIX)


@gluon.jit
def _skipped(seq, starts, PREFIX: gl.constexpr):
    """Keys of a sequence's prefix that are computed for others, too, elsewhere."""
    skipped = seq * 0
    if PREFIX:
        skipped = gl.load(starts + seq)
    return skipped


@gluon.jit
def _next_pair(
    inner, count, num_tiles, seq, context_len, row, skipped, next_len, next_row, next_skipped, context_lens, rows,
    starts, num_seqs, NUM_KV_HEADS: gl.constexpr, PREFIX: gl.constexpr,
):  # fmt: skip
    """Start of the next (sequence, KV head): in the same sequence, or in the next one, whose length and row are
    loaded.
    """
    inner += count
    if inner == num_tiles * NUM_KV_HEADS:
        inner = inner * 0
        seq += 1
        context_len = next_len
        row = next_row
        skipped = next_skipped
        next_len, next_row, next_skipped = _following(seq, context_lens, rows, starts, num_seqs, PREFIX)
    return inner, seq, context_len, row, skipped, next_len, next_row, next_skipped


@gluon.jit
def _ask_tile(
    keys, values, k_boxes, v_boxes, full, stage, blocks, start, context_len, head,
    BOXES: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """Ask for a tile's keys and values."""
    ask_boxes(keys, k_boxes, full.index(stage), stage, blocks, start, context_len, head, True, BOXES, PAGE, PANELS)
    ask_boxes(values, v_boxes, full.index(stage), stage, blocks, start, context_len, head, True, BOXES, PAGE, PANELS)


@gluon.jit
def _bring(
    queries, keys, values, q_smem, k_smem, v_smem, q_full, q_empty, full, empty, block_tables, rows, context_lens,
    starts, at_tile, end, seq, inner, context_len, row, num_seqs, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    PANELS: gl.constexpr, WINDOW: gl.constexpr, PLAN_WINDOW: gl.constexpr, PREFIX: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The partition that brings each pair's queries, and its tiles of keys and values."""
    BOX: gl.constexpr = keys.block_shape[2]
    BOXES: gl.constexpr = TILE // BOX
    k_boxes = k_smem._reinterpret(k_smem.dtype, [STAGES * PANELS * BOXES, 1, 1, BOX, 64], keys.layout)
    v_boxes = v_smem._reinterpret(v_smem.dtype, [STAGES * PANELS * BOXES, 1, 1, BOX, 64], values.layout)
    q_boxes = q_smem._reinterpret(q_smem.dtype, [2 * PANELS, 1, queries.block_shape[1], 64], queries.layout)
    skipped = _skipped(seq, starts, PREFIX)
    next_len, next_row, next_skipped = _following(seq, context_lens, rows, starts, num_seqs, PREFIX)
    early = at_tile * 0
    if PDL:
        head, _, _, _, begin, last, oldest = _piece_of_pair(
            at_tile, end, inner, context_len, skipped, TILE, WINDOW, PLAN_WINDOW
        )
        table = block_tables + row.to(gl.int64) * stride_table
        early = gl.maximum(gl.minimum(gl.minimum(last, (context_len - 1) // TILE) - begin, STAGES), 0)
        for stage in range(early):
            start = (begin + stage) * TILE
            blocks = blocks_of_boxes(table, start, oldest, context_len, BOX, BOXES, PAGE, WINDOW)
            _ask_tile(
                keys, values, k_boxes, v_boxes, full, stage, blocks, start, context_len, head, BOXES, PAGE, PANELS
            )  # fmt: skip
        wait_for_inputs()
    step = at_tile * 0
    item = at_tile * 0
    while at_tile < end:
        head, num_tiles, _, count, begin, last, oldest = _piece_of_pair(
            at_tile, end, inner, context_len, skipped, TILE, WINDOW, PLAN_WINDOW
        )
        if num_tiles > 0:
            q_stage = item % 2
            mbarrier.wait(q_empty.index(q_stage), ((item // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(q_stage), PANELS * queries.block_type.nbytes)
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    queries, [seq, head * GROUP, panel * 64], q_full.index(q_stage),
                    q_boxes.index(q_stage * PANELS + panel)
                )  # fmt: skip
            item += 1
        table = block_tables + row.to(gl.int64) * stride_table
        for tile in range(begin, last):
            if step >= early:
                start = tile * TILE
                stage = step % STAGES
                blocks = blocks_of_boxes(table, start, oldest, context_len, BOX, BOXES, PAGE, WINDOW)
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                _ask_tile(
                    keys, values, k_boxes, v_boxes, full, stage, blocks, start, context_len, head,
                    BOXES, PAGE, PANELS,
                )  # fmt: skip
            step += 1
        at_tile += count
        inner, seq, context_len, row, skipped, next_len, next_row, next_skipped = _next_pair(
            inner, count, num_tiles, seq, context_len, row, skipped, next_len, next_row, next_skipped, context_lens,
            rows, starts, num_seqs, NUM_KV_HEADS, PREFIX,
        )  # fmt: skip


@gluon.jit
def _masked(
    s, start, oldest, context_len, slopes,
    TILE: gl.constexpr, BOX: gl.constexpr, WINDOW: gl.constexpr, ALIBI: gl.constexpr, EDGE: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Scores [TILE, N] with ALiBi's bias; at an EDGE -inf for what is no key of the context and the window.

    The context's last box holds its keys shifted to the box's end.
    """
    position = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, ACC))
    key = position
    if EDGE:
        last_box = (context_len - 1) // BOX * BOX
        missing = last_box + BOX - context_len
        key = gl.where(position >= last_box, position - missing, position)
        there = (position < last_box) | ((key >= last_box) & (key < context_len))
        if WINDOW > 0:
            there &= key >= oldest
    if ALIBI:
        s += slopes[None, :] * (key - (context_len - 1)).to(gl.float32)[:, None] * LOG2E
    if EDGE:
        s = gl.where(there[:, None], s, -float("inf"))
    return s


@gluon.jit
def _merged(
    partial_out, partial_stats, first_program, origin, step, count, pair_start, per_program,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, N: gl.constexpr, D_PAD: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The sum (acc [N, D_PAD], m, l [N]) of `count` partial results of a pair, four at a time.

    They are those of the programs origin, origin + step, ...; first_program takes the place of an origin before it.
    """
    n = gl.arange(0, N, layout=gl.SliceLayout(1, OUT))
    acc = gl.zeros([N, D_PAD], gl.float32, OUT)
    m = gl.full([N], -float("inf"), gl.float32, gl.SliceLayout(1, OUT))
    l = gl.zeros([N], gl.float32, gl.SliceLayout(1, OUT))
    for at in range(0, count, 4):
        loaded = ()
        for i in gl.static_range(4):
            program = gl.maximum(origin + (at + i) * step, first_program)
            part = program * 2 + gl.where(program * per_program >= pair_start, 0, 1)
            valid = (n < GROUP) & (at + i < count)
            loaded = loaded + (_load_partial(partial_out, partial_stats, part, valid, GROUP, HEAD_DIM, N, D_PAD, OUT),)
        for i in gl.static_range(4):
            acc, m, l = _joined(acc, m, l, loaded[i][0], loaded[i][1], loaded[i][2])
    return acc, m, l


@gluon.jit
def _joined(acc, m, l, others, other_m, other_l):
    """Two partial results of a pair as one: sums of weighted values [N, D_PAD], maximal scores [N] and sums of weights
    [N].

    The roundings must not depend on which program does this, so fused multiply-adds are not left to the compiler.
    """
    new_m = gl.maximum(m, other_m)
    base = gl.where(new_m == -float("inf"), 0.0, new_m)
    weight = gl.exp2(other_m - base)
    decay = gl.exp2(m - base)
    acc = gl.fma(acc, gl.expand_dims(decay, 1).broadcast_to(acc.shape), others * weight[:, None])
    l = gl.fma(l, decay, other_l * weight)
    return acc, new_m, l


@gluon.jit
def _load_partial(
    partial_out, partial_stats, part, valid,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, N: gl.constexpr, D_PAD: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """A partial result stored by `_store_partial`, read past L1; none where `valid` [N] is False."""
    n = gl.arange(0, N, layout=gl.SliceLayout(1, OUT))
    d = gl.arange(0, D_PAD, layout=gl.SliceLayout(0, OUT))
    stats = partial_stats + part * 2 * GROUP + n
    at = partial_out + (part * GROUP + n)[:, None] * HEAD_DIM + d[None, :]
    values = gl.load(at, mask=valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg")
    m = gl.load(stats, mask=valid, other=-float("inf"), cache_modifier=".cg")
    return values, m, gl.load(stats + GROUP, mask=valid, other=0.0, cache_modifier=".cg")


@gluon.jit
def _store_partial(
    partial_out, partial_stats, part, acc, m, l, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, OUT: gl.constexpr
):
    n = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, OUT))
    d = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, OUT))
    at = partial_out + (part * GROUP + n)[:, None] * HEAD_DIM + d[None, :]
    gl.store(at, acc, mask=(n < GROUP)[:, None] & (d < HEAD_DIM)[None, :])
    gl.store(partial_stats + part * 2 * GROUP + n, m, mask=n < GROUP)
    gl.store(partial_stats + part * 2 * GROUP + GROUP + n, l, mask=n < GROUP)


@gluon.jit
def _store_heads(
    acc, m, l, sinks, out, scale, stride_group, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SINKS: gl.constexpr,
    LARGEST: gl.constexpr, DTYPE: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Store the weighted means of a group's heads, from sums [N, D_PAD] and their weights, in out [GROUP, HEAD_DIM];
    rounded to codes unless LARGEST is 0: with a scale for each head."""
    n = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, OUT))
    d = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, OUT))
    if SINKS:
        l += gl.exp2(gl.load(sinks + n, mask=n < GROUP, other=0.0) * LOG2E - m)
    values = (acc / gl.where(l > 0, l, 1.0)[:, None]).to(DTYPE)
    if LARGEST > 0:
        wide = values.to(gl.float32)
        scales = gl.maximum(gl.max(gl.abs(wide), 1), 1e-12) / LARGEST
        wide = wide / scales[:, None]
        if out.dtype.element_ty == gl.int8:
            wide = gl.where(wide < 0, wide - 0.5, wide + 0.5)
        values = wide.to(out.dtype.element_ty)
        gl.store(scale + n * stride_group, scales, mask=n < GROUP)
    gl.store(out + n[:, None] * HEAD_DIM + d[None, :], values, mask=(n < GROUP)[:, None] & (d < HEAD_DIM)[None, :])


@gluon.jit
def _arrive(
    partial_out, partial_stats, counter, group_counters, sinks, out, scale, stride_group, program, pair_start,
    num_tiles, per_program,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, N: gl.constexpr, D_PAD: gl.constexpr, SINKS: gl.constexpr,
    FAN_IN: gl.constexpr, LARGEST: gl.constexpr, DTYPE: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Merge as `kernels.triton.attention_decode._arrive`: the last program to store its partial result merges all of
    them.
    """
    first_program = pair_start // per_program
    last_program = (pair_start + num_tiles - 1) // per_program
    origin = first_program
    step = first_program * 0 + 1
    awaited = last_program - first_program + 1
    complete = awaited > 0
    if FAN_IN > 0:  # noqa: SIM102 (what follows is compiled only where it is asked for)
        if awaited > 2 * FAN_IN:
            first = gl.maximum(program // FAN_IN * FAN_IN, first_program)
            neighbours = gl.minimum(program // FAN_IN * FAN_IN + FAN_IN - 1, last_program) - first + 1
            part = first * 2 + gl.where(first * per_program >= pair_start, 0, 1)
            complete = gl.atomic_add(group_counters + part, 1, sem="acq_rel", scope="gpu") == neighbours - 1
            if complete:
                barrier()
                acc, m, l = _merged(
                    partial_out, partial_stats, first, first, 1, neighbours, pair_start, per_program,
                    GROUP, HEAD_DIM, N, D_PAD, OUT,
                )  # fmt: skip
                barrier()  # every part is read before one of them is overwritten
                _store_partial(partial_out, partial_stats, part, acc, m, l, GROUP, HEAD_DIM, OUT)
                gl.store(group_counters + part, 0)
                barrier()
            origin = first_program // FAN_IN * FAN_IN
            step = first_program * 0 + FAN_IN
            awaited = last_program // FAN_IN - first_program // FAN_IN + 1
    if complete:
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == awaited - 1:
            barrier()
            acc, m, l = _merged(
                partial_out, partial_stats, first_program, origin, step, awaited, pair_start, per_program,
                GROUP, HEAD_DIM, N, D_PAD, OUT,
            )  # fmt: skip
            _store_heads(acc, m, l, sinks, out, scale, stride_group, GROUP, HEAD_DIM, SINKS, LARGEST, DTYPE, OUT)
            gl.store(counter, 0)


@gluon.jit
def _attend(
    q_smem, k_smem, v_smem, p_smem, q_full, q_empty, full, empty, out, out_scale, rows, context_lens, alibi_slopes,
    sinks, partial_out, partial_stats, arrivals, group_arrivals, starts, prefix_out, prefix_stats, scale, at_tile, end,
    per_program, seq, inner, context_len, row, num_seqs, stride_ot, stride_row, stride_group,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, N: gl.constexpr, TILE: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, PLAN_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    ALIBI: gl.constexpr, SINKS: gl.constexpr, FAN_IN: gl.constexpr, LARGEST: gl.constexpr, PREFIX: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The partition that multiplies: scores of a tile, exponentials, weighted values; then a pair's output, or a part
    of it.
    """
    DTYPE: gl.constexpr = k_smem.dtype
    D_PAD: gl.constexpr = k_smem.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_PAD, D_PAD // 8], [4, 1], [1, 0])
    program = gl.program_id(0)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, ACC))
    n_out = gl.arange(0, N, layout=gl.SliceLayout(1, OUT))
    skipped = _skipped(seq, starts, PREFIX)
    next_len, next_row, next_skipped = _following(seq, context_lens, rows, starts, num_seqs, PREFIX)
    if PDL:
        wait_for_inputs()
    for empty_seq in range(program, num_seqs, gl.num_programs(0)):  # a padding row has no tile: its output is 0
        if gl.load(context_lens + empty_seq) == 0:
            zeros = gl.zeros([N, D_PAD], gl.float32, OUT)
            none = gl.zeros([N], gl.float32, gl.SliceLayout(1, OUT))
            for head in range(NUM_KV_HEADS):
                _store_heads(
                    zeros, none, none, sinks, out + empty_seq * stride_ot + head * GROUP * HEAD_DIM,
                    out_scale + empty_seq * stride_row + head * GROUP * stride_group, stride_group, GROUP, HEAD_DIM,
                    False, LARGEST, DTYPE, OUT,
                )  # fmt: skip
    step = at_tile * 0
    item = at_tile * 0
    while at_tile < end:
        head, num_tiles, first, count, begin, last, oldest = _piece_of_pair(
            at_tile, end, inner, context_len, skipped, TILE, WINDOW, PLAN_WINDOW
        )
        if num_tiles > 0:
            acc = gl.zeros([D_PAD, N], gl.float32, ACC)
            m = gl.full([N], -float("inf"), gl.float32, gl.SliceLayout(0, ACC))
            l = gl.zeros([TILE, N], gl.float32, ACC)
            pair_start = at_tile - first
            counter = arrivals + seq * NUM_KV_HEADS + head
            whole = count == num_tiles
            others = gl.zeros([N, D_PAD], gl.float32, OUT)
            other_m = gl.full([N], -float("inf"), gl.float32, gl.SliceLayout(1, OUT))
            other_l = gl.zeros([N], gl.float32, gl.SliceLayout(1, OUT))
            if (first == 0) & (count < num_tiles) & (num_tiles - count <= per_program):
                # The rest of this pair is the first part of the next program. If that is there, this program writes the
                # output.
                whole = gl.atomic_add(counter, 0, sem="acquire", scope="gpu") == 1
                if whole:
                    barrier()
                    others, other_m, other_l = _load_partial(
                        partial_out, partial_stats, 2 * program + 2, n_out < GROUP, GROUP, HEAD_DIM, N, D_PAD, OUT
                    )
                    gl.store(counter, 0)
            slopes = gl.zeros([N], gl.float32, gl.SliceLayout(0, ACC))
            if ALIBI:
                slopes = gl.load(alibi_slopes + head * GROUP + n, mask=n < GROUP, other=0.0)
            q_stage = item % 2
            mbarrier.wait(q_full.index(q_stage), (item // 2) & 1)
            whole_end = context_len // BOX * BOX  # keys up to here lie where they belong
            for tile in range(begin, last):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                k = k_smem.index(stage)
                q = q_smem.index(q_stage).permute((1, 0))
                s = warpgroup_mma(k, q, gl.zeros_like(l), use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                if SOFT_CAP > 0:
                    s *= scale
                    s = SOFT_CAP * (1.0 - 2.0 / (gl.exp2(s * (2.0 * LOG2E / SOFT_CAP)) + 1.0)) * LOG2E
                else:
                    s *= scale * LOG2E
                start = tile * TILE
                if (start + TILE > whole_end) | (start < oldest):
                    s = _masked(s, start, oldest, context_len, slopes, TILE, BOX, WINDOW, ALIBI, True, ACC)
                else:
                    s = _masked(s, start, oldest, context_len, slopes, TILE, BOX, WINDOW, ALIBI, False, ACC)
                new_m = gl.maximum(m, gl.max(s, 0))
                decay = gl.exp2(m - new_m)
                p = gl.exp2(s - new_m[None, :])
                m = new_m
                l = l * decay[None, :] + p
                p_smem.store(gl.permute(p.to(DTYPE), (1, 0)))
                acc *= decay[None, :]
                fence_async_shared()
                barrier()
                acc = warpgroup_mma(v_smem.index(stage).permute((1, 0)), p_smem.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(stage))
                step += 1
            mbarrier.arrive(q_empty.index(q_stage))
            item += 1
            sums = gl.convert_layout(gl.permute(acc, (1, 0)), OUT)
            total = gl.convert_layout(gl.sum(l, 0), gl.SliceLayout(1, OUT))
            largest = gl.convert_layout(m, gl.SliceLayout(1, OUT))
            out_at = out + seq.to(gl.int64) * stride_ot + head * GROUP * HEAD_DIM
            scale_at = out_scale + seq * stride_row + head * GROUP * stride_group
            sinks_at = sinks + head * GROUP
            if PREFIX:  # noqa: SIM102 (what follows is compiled only where it is asked for)
                if (first == 0) & (skipped > 0):  # the pair's first part has the sums of the prefix, too
                    own_heads = seq.to(gl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + n_out
                    d_out = gl.arange(0, D_PAD, layout=gl.SliceLayout(0, OUT))
                    at = prefix_out + own_heads[:, None] * HEAD_DIM + d_out[None, :]
                    own_mask = (n_out < GROUP)[:, None] & (d_out < HEAD_DIM)[None, :]
                    own_stats = prefix_stats + own_heads + seq.to(gl.int64) * (NUM_KV_HEADS * GROUP)
                    prefix_m = gl.load(own_stats, mask=n_out < GROUP, other=-float("inf"))
                    prefix_l = gl.load(own_stats + NUM_KV_HEADS * GROUP, mask=n_out < GROUP, other=0.0)
                    sums, largest, total = _joined(
                        sums, largest, total, gl.load(at, mask=own_mask, other=0.0), prefix_m, prefix_l
                    )
            if whole:
                sums, largest, total = _joined(sums, largest, total, others, other_m, other_l)
                _store_heads(
                    sums, largest, total, sinks_at, out_at, scale_at, stride_group,
                    GROUP, HEAD_DIM, SINKS, LARGEST, DTYPE, OUT,
                )  # fmt: skip
            else:
                part = program * 2 + gl.where(program * per_program >= pair_start, 0, 1)
                _store_partial(partial_out, partial_stats, part, sums, largest, total, GROUP, HEAD_DIM, OUT)
                barrier()  # every thread's partial result is written before the arrival is counted
                _arrive(
                    partial_out, partial_stats, counter, group_arrivals, sinks_at, out_at, scale_at,
                    stride_group, program, pair_start, num_tiles, per_program,
                    GROUP, HEAD_DIM, N, D_PAD, SINKS, FAN_IN, LARGEST, DTYPE, OUT,
                )  # fmt: skip
        at_tile += count
        inner, seq, context_len, row, skipped, next_len, next_row, next_skipped = _next_pair(
            inner, count, num_tiles, seq, context_len, row, skipped, next_len, next_row, next_skipped, context_lens,
            rows, starts, num_seqs, NUM_KV_HEADS, PREFIX,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_seqs", "stride_row", "stride_group"],
    do_not_specialize_on_alignment=["rows", "context_lens", "alibi_slopes", "sinks"],
)
def _hopper_decode_kernel(
    queries, keys, values, out, out_scale, block_tables, rows, context_lens, alibi_slopes, sinks,
    work, partial_out, partial_stats, arrivals, group_arrivals, starts, prefix_out, prefix_stats, scale, num_seqs,
    stride_ot, stride_row, stride_group, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, PLAN_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    ALIBI: gl.constexpr, SINKS: gl.constexpr, FAN_IN: gl.constexpr, LARGEST: gl.constexpr, PREFIX: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Each program one piece of the work. GROUP query heads of a KV head, padded to N."""
    PANELS: gl.constexpr = (HEAD_DIM + 63) // 64
    DTYPE: gl.constexpr = keys.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, N, PANELS * 64], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, PANELS * 64], SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, PANELS * 64], SHARED)
    p_smem = gl.allocate_shared_memory(DTYPE, [N, TILE], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # of keys and of values
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    # The map, the lengths, the rows and the tables were written before the preceding kernel began, see `plan_decode`.
    program = gl.program_id(0)
    entry = work + program * 8
    left = gl.load(entry)
    per_program = gl.load(entry + 1)
    seq = gl.load(entry + 2)
    inner = gl.load(entry + 3)
    context_len = gl.load(entry + 4)
    row = gl.load(entry + 5)
    at_tile = program * per_program
    end = at_tile + left
    if PDL:
        launch_dependents()
    gl.warp_specialize(
        [
            (_attend, (
                q_smem, k_smem, v_smem, p_smem, q_full, q_empty, full, empty, out, out_scale, rows, context_lens,
                alibi_slopes, sinks, partial_out, partial_stats, arrivals, group_arrivals, starts, prefix_out,
                prefix_stats, scale, at_tile, end, per_program, seq, inner, context_len, row, num_seqs, stride_ot,
                stride_row, stride_group,
                NUM_KV_HEADS, GROUP, HEAD_DIM, N, TILE, gl.constexpr(keys.block_shape[2]), STAGES, WINDOW, PLAN_WINDOW,
                SOFT_CAP, ALIBI, SINKS, FAN_IN, LARGEST, PREFIX, PDL,
            )),
            (_bring, (
                queries, keys, values, q_smem, k_smem, v_smem, q_full, q_empty, full, empty, block_tables, rows,
                context_lens, starts, at_tile, end, seq, inner, context_len, row, num_seqs, stride_table,
                NUM_KV_HEADS, GROUP, TILE, PAGE, STAGES, PANELS, WINDOW, PLAN_WINDOW, PREFIX, PDL,
            )),
        ],
        [1], [40],
    )  # fmt: skip


def supports(query: Tensor, key_cache: Tensor, args: AttentionArgs, plan: DecodePlan) -> bool:
    """Return whether `launch` computes the call: a plan for it, queries of the cache's dtype, blocks of at least 8
    slots.
    """
    return (
        plan.streams
        and KNOWN.cover(args)
        and query.dtype == key_cache.dtype
        and key_cache.shape[2] >= 8
        and query.stride(0) % 8 == 0
        and query.stride(1) % 8 == 0
        and query.data_ptr() % 16 == 0
    )


def launch(
    query: Tensor, context: PagedContext, args: AttentionArgs, plan: DecodePlan, output: Output, dependent: bool
) -> None:
    """Compute as `kernels.triton.attention_decode.launch`; see `supports`."""
    num_seqs, num_heads, head_dim = query.shape
    lens, out, prefix = context.lens, output.values, plan.prefix
    _, num_kv_heads, page, _ = context.key_cache.shape
    group = num_heads // num_kv_heads
    columns, width = max(next_power_of_2(group), 8), cdiv(head_dim, 64) * 64
    # Beside keys and values: queries, probabilities, and accumulators on their way to another layout.
    others = columns * (4 * width + 2 * TILE + 4 * width)
    caches = [box_descriptor(cache, 1, 1, min(page, TILE), 64) for cache in (context.key_cache, context.value_cache)]
    assert plan.tile == TILE
    _hopper_decode_kernel[(len(plan.work),)](
        box_descriptor(query, 1, columns, 64), *caches, out, output.scale, context.block_tables, context.rows, lens,
        lens if args.alibi_slopes is None else args.alibi_slopes, lens if args.sinks is None else args.sinks,
        plan.work, plan.partial_out, plan.partial_stats, plan.arrivals, plan.group_arrivals,
        *((lens,) * 3 if prefix is None else (prefix.starts, prefix.out, prefix.stats)), args.scale, num_seqs,
        out.stride(0), *output.scale.stride()[:2], context.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, N=columns, HEAD_DIM=head_dim, TILE=TILE, PAGE=page,
        STAGES=(SHARED_BYTES - others) // (4 * TILE * width), WINDOW=args.window, PLAN_WINDOW=plan.window,
        SOFT_CAP=args.soft_cap, ALIBI=args.alibi_slopes is not None, SINKS=args.sinks is not None, FAN_IN=plan.fan_in,
        LARGEST=output.largest, PREFIX=prefix is not None, num_warps=4, maxnreg=REGISTERS,
        **(pdl_options(query.device) if dependent else {"PDL": False}),
    )  # fmt: skip
