"""Paged attention of prefill chunks on Hopper, warp-specialised, in Gluon: all of it but biases.

A program stays on its multiprocessor and takes one item after another: a tile of 128 rows, which are queries times the
query heads of one KV head, and that KV head. One warp loads the queries and keys, another the values, by the tensor
TMA, or, from an e4m3 cache, a warpgroup loads all and makes float16 of the codes. Two warpgroups multiply, 64 rows
each. While one takes the exponentials of a tile of keys, the tensor core is busy with the values of its previous tile
and with the other one's scores, since they alternate.

Keys and values are loaded in boxes, a page or a part of one. Where the context ends within a box, the box begins as
many slots early, so that its last key is the context's last. What lies before its page is read as 0, and so is a box
behind the context or before the window: no slot outside the context is read.

Sources: FlashAttention-3 (Shah et al., arXiv 2407.08608).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.plan import prefill_query_rows
from kernels.gluon.attention.loads import (
    bring_items,
    convert_items,
    first_items,
    item_tile,
    keys_of,
    sequence_of,
    snake,
    vertical_blocks,
)
from kernels.gluon.common.layouts import box_descriptor, side_by_side
from kernels.gpu.device import is_hopper, num_multiprocessors
from kernels.gpu.launch import launch_dependents, pdl_options, wait_for_inputs

KNOWN = KnownArgs("window", "soft_cap", "sinks", "sparse", "kv_scale")
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _masked(
    s, start, query_pos, context_len, head,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """-inf where a row's query does not see the key. The context's last box holds its keys shifted to the box's end."""
    BOX: gl.constexpr = min(PAGE, BLOCK_N)
    slots = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
    last_box = (context_len - 1) // BOX * BOX
    missing = last_box + BOX - context_len
    last_seen = query_pos - start
    if (missing > 0) & (start + BLOCK_N > last_box):
        shifted = slots >= last_box - start
        key = gl.where(shifted, slots - missing, slots)
        key = gl.where(shifted & (key < last_box - start), context_len, key)
        s = _seen(s, key, last_seen, WINDOW)
    else:
        s = _seen(s, slots, last_seen, WINDOW)
    if SPARSE is not None:  # a tile is a block
        block = start // BLOCK_N
        vertical = (block + (SPARSE[4] + head) * SPARSE[3] + 1) % SPARSE[2] == 0
        s = gl.where((query_pos // BLOCK_N < block + gl.where(vertical, 1 << 30, SPARSE[1]))[:, None], s, -float("inf"))
    return s


@gluon.jit
def _seen(s, key, last_seen, WINDOW: gl.constexpr):
    keep = key[None, :] <= last_seen[:, None]
    if WINDOW > 0:
        keep &= key[None, :] > last_seen[:, None] - WINDOW
    return gl.where(keep, s, -float("inf"))


@gluon.jit
def _capped(s, scale_log2, SOFT_CAP: gl.constexpr):
    """Base-2 scores from raw ones: SOFT_CAP * tanh(score / SOFT_CAP), with a tanh that does not overflow."""
    return (SOFT_CAP * LOG2E) * (1.0 - 2.0 / (gl.exp2(s * (scale_log2 * (2.0 / SOFT_CAP))) + 1.0))


@gluon.jit
def _exponentials(s, m, l, scale_log2, SOME: gl.constexpr):
    """Base-2 probabilities of scores [M, N] under the new running maximum, the factor of what was summed before, and m
    and l.
    """
    new_m = gl.maximum(m, gl.max(s, 1))
    shift = new_m * scale_log2
    if SOME:  # a row may see none of its first keys
        shift = gl.where(new_m == -float("inf"), 0.0, shift)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    rescale = gl.exp2(m * scale_log2 - shift)
    return p, rescale, new_m, l * rescale + gl.sum(p, 1)


@gluon.jit
def _fold_tiles(
    begin, end, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full, v_empty, may_multiply, query_pos,
    context_len, head, scale_log2, WG: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SPARSE: gl.constexpr, SOFT_CAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Fold key tiles [begin, end) into acc, m and l. Each iteration accumulates P·V of the previous tile, whose P is
    p.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    P_LAYOUT: gl.constexpr = p.type.layout
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    for tile in range(begin, end):
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        mbarrier.wait(may_multiply.index(WG), step & 1)
        zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        previous = (step - 1) % STAGES
        mbarrier.wait(v_full.index(previous), ((step - 1) // STAGES) & 1)
        sum_of_values = warpgroup_mma(p, v_smem.index(previous), acc, is_async=True)
        mbarrier.arrive(may_multiply.index(1 - WG))
        s = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        if SOFT_CAP > 0:
            s = _capped(s, scale_log2, SOFT_CAP)
        if MASKED:
            s = _masked(s, tile * BLOCK_N, query_pos, context_len, head, BLOCK_N, PAGE, WINDOW, SPARSE)
        probabilities, rescale, m, l = _exponentials(
            s, m, l, 1.0 if SOFT_CAP > 0 else scale_log2, WINDOW > 0 or SPARSE is not None
        )
        # A branch: the assembler would otherwise move the wait before the exponentials, which the multiplication hides.
        mbarrier.wait(v_full.index(previous), ((step - 1) // STAGES) & 1)
        acc, probabilities, l = warpgroup_mma_wait(0, deps=[sum_of_values, probabilities, l])
        mbarrier.arrive(v_empty.index(previous))
        p = gl.convert_layout(probabilities.to(q.dtype), P_LAYOUT)
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        step += 1
    return step, p, acc, m, l


@gluon.jit
def _multiply(
    out, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, may_multiply,
    rows, query_start, context_lens, tiles, sinks, kv_scale, num_items, score_scale, stride_ot,
    WG: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, HALVES: gl.constexpr,
    WINDOW: gl.constexpr, SPARSE: gl.constexpr, SOFT_CAP: gl.constexpr, SINKS: gl.constexpr, FP8: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: rows [64 * WG, 64 * WG + 64) of every item."""
    TILE_Q: gl.constexpr = 128 // GROUP_ROWS
    D_PAD: gl.constexpr = HALVES * 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    # Trading 16 bytes takes shared memory, of which codes leave none.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D_PAD // 8), D_PAD // 8], [4, 1], [1, 0])
    OUT_LAYOUT: gl.constexpr = side_by_side(D_PAD, 4) if FP8 else ROWS
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    iteration = 0
    index = snake(iteration, program, num_programs)
    first_query, start, stop, context_len, _, next_seq, next_first = first_items(
        program, num_programs, tiles, num_items, rows, query_start, context_lens, NUM_KV_HEADS
    )
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(may_multiply.index(WG), 0)
    q = q_smem.index(WG)
    scores = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.arrive(may_multiply.index(1 - WG))
    s = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0))
    while index < num_items:
        head = index % NUM_KV_HEADS
        token = start + first_query
        first_pos = context_len - stop + token
        next_start, next_stop, next_context_len, _ = sequence_of(next_seq, rows, query_start, context_lens)
        first_after = next_first
        next_seq, next_first = item_tile(snake(iteration + 2, program, num_programs), tiles, num_items, NUM_KV_HEADS)
        row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        query_pos = gl.minimum(first_pos + row // GROUP_ROWS, context_len - 1)
        scale_log2 = score_scale
        if SCALED:  # the scores and the sum of values, not each key and value
            scale_log2 *= gl.load(kv_scale + head)
        oldest, end = keys_of(first_pos, context_len, TILE_Q, WINDOW, SPARSE)
        first_tile = oldest // BLOCK_N
        num_tiles = gl.cdiv(end, BLOCK_N)
        # Tiles [first_whole, last_whole) need no mask.
        first_whole = 0
        if WINDOW > 0:
            first_whole = gl.cdiv(gl.maximum(end - WINDOW, 0), BLOCK_N)
        vertical = 0
        if SPARSE is not None:
            _, vertical = vertical_blocks(head, oldest, SPARSE)
            first_whole = gl.maximum((end - 1) // BLOCK_N - SPARSE[1] + 1, 0)
        last_whole = (first_pos + 1) // BLOCK_N

        step += 1
        if SOFT_CAP > 0:
            s = _capped(s, scale_log2, SOFT_CAP)
        if (vertical == 0) & ((last_whole <= first_tile) | (first_tile < first_whole)):
            s = _masked(s, first_tile * BLOCK_N, query_pos, context_len, head, BLOCK_N, PAGE, WINDOW, SPARSE)
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        probabilities, _rescale, m, l = _exponentials(
            s, m, l, 1.0 if SOFT_CAP > 0 else scale_log2, WINDOW > 0 or SPARSE is not None
        )
        p = gl.convert_layout(probabilities.to(q.dtype), P_LAYOUT)
        acc = gl.zeros([64, D_PAD], gl.float32, ACC_LAYOUT)
        begin = first_tile + 1
        if SPARSE is not None:
            step, p, acc, m, l = _fold_tiles(
                1, vertical, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full, v_empty, may_multiply,
                query_pos, context_len, head, scale_log2, WG, BLOCK_N, PAGE, STAGES, WINDOW, SPARSE, SOFT_CAP, False,
            )  # fmt: skip
            begin = gl.where(vertical > 0, first_tile, begin)
        if WINDOW > 0 or SPARSE is not None:
            edge = gl.maximum(begin, gl.minimum(first_whole, num_tiles))
            step, p, acc, m, l = _fold_tiles(
                begin, edge, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full, v_empty, may_multiply,
                query_pos, context_len, head, scale_log2, WG, BLOCK_N, PAGE, STAGES, WINDOW, SPARSE, SOFT_CAP, True,
            )  # fmt: skip
            begin = edge
        step, p, acc, m, l = _fold_tiles(
            begin, last_whole, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full, v_empty, may_multiply,
            query_pos, context_len, head, scale_log2, WG, BLOCK_N, PAGE, STAGES, WINDOW, SPARSE, SOFT_CAP, False,
        )  # fmt: skip
        step, p, acc, m, l = _fold_tiles(
            gl.maximum(begin, last_whole), num_tiles, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full,
            v_empty, may_multiply, query_pos, context_len, head, scale_log2, WG, BLOCK_N, PAGE, STAGES, WINDOW, SPARSE,
            SOFT_CAP, True,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(iteration % Q_STAGES))
        if SINKS:
            inside = row % GROUP_ROWS < GROUP
            sink = gl.load(sinks + head * GROUP + row % GROUP_ROWS, mask=inside, other=0.0)
            l += gl.exp2(sink * LOG2E - m * (1.0 if SOFT_CAP > 0 else scale_log2))

        # The tensor core has the next item's first scores to compute while this one's output is stored.
        iteration += 1
        index = snake(iteration, program, num_programs)
        previous = (step - 1) % STAGES
        stage = step % STAGES
        mbarrier.wait(v_full.index(previous), ((step - 1) // STAGES) & 1)
        mbarrier.wait(may_multiply.index(WG), step & 1)
        sum_of_values = warpgroup_mma(p, v_smem.index(previous), acc, is_async=True)
        q_stage = iteration % Q_STAGES
        mbarrier.wait(q_full.index(q_stage), (iteration // Q_STAGES) & 1, pred=index < num_items)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1, pred=index < num_items)
        q = q_smem.index(q_stage * 2 + WG)
        scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.arrive(may_multiply.index(1 - WG))
        acc = warpgroup_mma_wait(1, deps=[sum_of_values])
        mbarrier.arrive(v_empty.index(previous))

        factor = 1.0 / l
        if SCALED:
            factor *= gl.load(kv_scale + NUM_KV_HEADS + head)
        acc *= gl.convert_layout(factor, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        result = gl.convert_layout(acc.to(out.dtype.element_ty), OUT_LAYOUT)
        row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT_LAYOUT))
        d = gl.arange(0, D_PAD, layout=gl.SliceLayout(0, OUT_LAYOUT))
        inside = (token + row // GROUP_ROWS < stop) & (row % GROUP_ROWS < GROUP)
        base = (token + row // GROUP_ROWS).to(gl.int64) * stride_ot + (head * GROUP + row % GROUP_ROWS) * HEAD_DIM
        gl.store(out + base[:, None] + d[None, :], result, mask=inside[:, None] & (d < HEAD_DIM)[None, :])
        s = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        first_query, start, stop, context_len = first_after, next_start, next_stop, next_context_len


@gluon.jit(
    do_not_specialize=["num_items"],
    do_not_specialize_on_alignment=["rows", "query_start", "context_lens", "tiles", "sinks", "kv_scale"],
)
def _hopper_prefill_kernel(
    query, key_cache, value_cache, out, block_tables, rows, query_start, context_lens, tiles, sinks, kv_scale,
    num_items, scale_log2, stride_ot, stride_table,
    NUM_KV_HEADS: gl.constexpr, KV_GROUP: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, WINDOW: gl.constexpr, SPARSE: gl.constexpr, SOFT_CAP: gl.constexpr, SINKS: gl.constexpr,
    FP8: gl.constexpr, SCALED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Item i is tile i // NUM_KV_HEADS of `tiles` with KV head i % NUM_KV_HEADS. REGISTERS: of a multiplying thread."""
    HALVES: gl.constexpr = 1 if HEAD_DIM <= 64 else 2 if HEAD_DIM <= 128 else 4
    D_PAD: gl.constexpr = HALVES * 64
    DTYPE: gl.constexpr = gl.float16 if FP8 else key_cache.dtype
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(DTYPE, [Q_STAGES * 2, 64, D_PAD], TILE_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D_PAD], TILE_LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D_PAD], TILE_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    codes_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(may_multiply.index(i), count=1)
        mbarrier.init(codes_full.index(i), count=1)
    fence_async_shared()
    mbarrier.arrive(may_multiply.index(0))  # warpgroup 0 multiplies first
    if PDL:
        launch_dependents()
        wait_for_inputs()
    REST: gl.constexpr = 504 - 2 * REGISTERS
    if FP8:
        PANEL: gl.constexpr = min(D_PAD, 128)
        CODES_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=PANEL, element_bitwidth=8, rank=2)
        k_codes = gl.allocate_shared_memory(key_cache.dtype, [D_PAD // PANEL, BLOCK_N, PANEL], CODES_LAYOUT)
        v_codes = gl.allocate_shared_memory(key_cache.dtype, [D_PAD // PANEL, BLOCK_N, PANEL], CODES_LAYOUT)
        gl.warp_specialize(
            [
                (_multiply, (
                    out, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, may_multiply,
                    rows, query_start, context_lens, tiles, sinks, kv_scale, num_items, scale_log2, stride_ot,
                    gl.constexpr(0), NUM_KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, BLOCK_N, PAGE, STAGES, Q_STAGES, HALVES,
                    WINDOW, SPARSE, SOFT_CAP, SINKS, FP8, SCALED,
                )),
                (_multiply, (
                    out, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, may_multiply,
                    rows, query_start, context_lens, tiles, sinks, kv_scale, num_items, scale_log2, stride_ot,
                    gl.constexpr(1), NUM_KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, BLOCK_N, PAGE, STAGES, Q_STAGES, HALVES,
                    WINDOW, SPARSE, SOFT_CAP, SINKS, FP8, SCALED,
                )),
                (convert_items, (
                    query, key_cache, value_cache, q_smem, k_codes, v_codes, k_smem, v_smem, q_full, q_empty,
                    codes_full, k_full, k_empty, v_full, v_empty, block_tables, rows, query_start, context_lens, tiles,
                    num_items, stride_table, NUM_KV_HEADS, GROUP, GROUP_ROWS, BLOCK_N, PAGE, STAGES, Q_STAGES, HALVES,
                    WINDOW,
                )),
            ],
            [4, 4], [REGISTERS, REST],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, may_multiply,
                    rows, query_start, context_lens, tiles, sinks, kv_scale, num_items, scale_log2, stride_ot,
                    gl.constexpr(0), NUM_KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, BLOCK_N, PAGE, STAGES, Q_STAGES, HALVES,
                    WINDOW, SPARSE, SOFT_CAP, SINKS, FP8, SCALED,
                )),
                (_multiply, (
                    out, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, may_multiply,
                    rows, query_start, context_lens, tiles, sinks, kv_scale, num_items, scale_log2, stride_ot,
                    gl.constexpr(1), NUM_KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, BLOCK_N, PAGE, STAGES, Q_STAGES, HALVES,
                    WINDOW, SPARSE, SOFT_CAP, SINKS, FP8, SCALED,
                )),
                (bring_items, (
                    query, key_cache, q_smem, k_smem, q_full, q_empty, k_full, k_empty,
                    block_tables, rows, query_start, context_lens, tiles, num_items, stride_table, gl.constexpr(True),
                    NUM_KV_HEADS, KV_GROUP, GROUP, GROUP_ROWS, BLOCK_N, PAGE, STAGES, Q_STAGES, HALVES, WINDOW, SPARSE,
                )),
                (bring_items, (
                    query, value_cache, q_smem, v_smem, q_full, q_empty, v_full, v_empty,
                    block_tables, rows, query_start, context_lens, tiles, num_items, stride_table, gl.constexpr(False),
                    NUM_KV_HEADS, KV_GROUP, GROUP, GROUP_ROWS, BLOCK_N, PAGE, STAGES, Q_STAGES, HALVES, WINDOW, SPARSE,
                )),
            ],
            [4, 1, 1], [REGISTERS, REST, REST],
        )  # fmt: skip


def supports(query: Tensor, key_cache: Tensor, args: AttentionArgs) -> bool:
    """Return whether `launch` computes the call: a Hopper GPU, causal, no ALiBi, 16-bit queries, a cache of the same
    dtype or e4m3, 64 <= head_dim <= 256, pages of 2^n, groups of query heads that fill three quarters of 2^n.
    """
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, page, _ = key_cache.shape
    sparse = args.sparse
    rows = prefill_query_rows(num_heads // num_kv_heads if sparse is None else 1)
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    return (
        is_hopper(query.device)
        and KNOWN.cover(args)
        and query.dtype in (torch.bfloat16, torch.float16)
        and (fp8 or key_cache.dtype == query.dtype)
        and 64 <= head_dim <= 256
        and head_dim % (16 if fp8 else 8) == 0
        and rows & (rows - 1) == 0
        and rows <= 64
        and page & (page - 1) == 0
        and page >= 8
        and args.scale > 0
        and (sparse is None or (sparse.block == 64 and args.kv_scale is None))
        and query.stride(0) % 8 == 0
        and query.data_ptr() % 16 == 0
    )


def launch(
    query: Tensor, query_start: Tensor, context: PagedContext, args: AttentionArgs, tiles: Tensor, out: Tensor
) -> None:
    """Compute as `kernels.triton.attention_prefill.launch`; see `supports`.

    Over an e4m3 cache, queries are multiplied as float16: others are copied first.
    """
    _, num_heads, head_dim = query.shape
    keys, lens, sparse, window = context.key_cache, context.lens, args.sparse, args.window
    _, num_kv_heads, page, _ = keys.shape
    fp8, packed = keys.dtype == torch.float8_e4m3fn, num_kv_heads if sparse is None else num_heads
    group, num_items = num_heads // packed, len(tiles) * packed
    rows_of_query = prefill_query_rows(group)
    # Two stages of keys and of values, and the queries, fit; and small windows have few keys beside their edges.
    block_n = 128 if head_dim <= 128 and not 0 < window <= 1024 and sparse is None else 64
    registers = 240 if not fp8 else 200 if head_dim <= 128 else 208  # the conversion of e4m3 needs some, too
    queries = box_descriptor(query.half() if fp8 else query, 64 // rows_of_query, rows_of_query, 64)
    channels = 64 if not fp8 or head_dim <= 64 else 128
    caches = [box_descriptor(cache, 1, 1, min(page, block_n), channels) for cache in (keys, context.value_cache)]
    _hopper_prefill_kernel[(min(num_items, num_multiprocessors(query.device)),)](
        queries, *caches, out, context.block_tables, context.rows, query_start, lens, tiles,
        lens if args.sinks is None else args.sinks, lens if args.kv_scale is None else args.kv_scale, num_items,
        args.scale * LOG2E.value, out.stride(0), context.block_tables.stride(0),
        NUM_KV_HEADS=packed, KV_GROUP=packed // num_kv_heads, GROUP=group, GROUP_ROWS=rows_of_query,
        HEAD_DIM=head_dim, BLOCK_N=block_n, PAGE=page, STAGES=2,
        Q_STAGES=2 if head_dim <= 128 else 1, REGISTERS=registers, WINDOW=window,
        SPARSE=None if sparse is None else sparse.constants, SOFT_CAP=args.soft_cap,
        SINKS=args.sinks is not None, FP8=fp8, SCALED=args.kv_scale is not None, num_warps=4,
        **pdl_options(query.device),
    )  # fmt: skip
