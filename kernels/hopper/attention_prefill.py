"""Paged attention of prefill chunks on Hopper, warp-specialised, in Gluon: causal only, without windows, caps or biases.

A program stays on its multiprocessor and takes one item after another: a tile of 128 rows, which are queries times the query
heads of one KV head, and that KV head. One warp loads the queries and keys, another the values, by the tensor memory
accelerator; two warpgroups multiply, 64 rows each. While one takes the exponentials of a tile of keys, the matrix unit is busy
with the values of its previous tile and with the other one's scores, since they alternate.

Keys and values are loaded in boxes, a page or a part of one. Where the context ends within a box, the box begins as many slots
early, so that its last key is the context's last. What lies before its page is read as 0, and so is a box behind the context:
no slot outside the context is read.

Sources: FlashAttention-3 (Shah et al., arXiv 2407.08608).
"""

from __future__ import annotations

import functools

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.plan import prefill_query_rows
from kernels.triton.launch import launch_dependents, pdl_options, wait_for_inputs

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _snake(iteration, program, num_programs):
    """A program's item in an iteration: forth and back over the programs, so that long and short items even out."""
    return iteration * num_programs + gl.where(iteration % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _tile(index, tiles, num_items, NUM_KV_HEADS: gl.constexpr):
    """Sequence and first query of an item's tile; of the last item where `index` is beyond it."""
    at = tiles + gl.minimum(index, num_items - 1) // NUM_KV_HEADS * 2
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def _sequence(seq, rows, query_start, context_lens):
    """Of a sequence: first token, end of its tokens, context length, row of the block tables."""
    return gl.load(query_start + seq), gl.load(query_start + seq + 1), gl.load(context_lens + seq), gl.load(rows + seq)


@gluon.jit
def _blocks(table, start, context_len, BOX: gl.constexpr, BOXES: gl.constexpr, PAGE: gl.constexpr):
    """The blocks of the boxes that make up a tile of keys; -1 for a box behind the context."""
    blocks = ()
    for i in gl.static_range(BOXES):
        position = start + i * BOX
        block = gl.load(table + position // PAGE, mask=position < context_len, other=-1)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def _load_tiles(
    desc, smem, full, empty, step, table, end, context_len, head,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Ask for the keys (or values) [0, end) of one sequence and head, BLOCK_N at a time, each time a stage is empty."""
    BOX: gl.constexpr = desc.block_shape[2]
    BOXES: gl.constexpr = BLOCK_N // BOX
    boxes = smem._reinterpret(smem.dtype, [STAGES * HALVES * BOXES, 1, 1, BOX, 64], desc.layout)
    for start in range(0, end, BLOCK_N):
        blocks = _blocks(table, start, context_len, BOX, BOXES, PAGE)
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BLOCK_N * HALVES * 64 * 2)
        for i in gl.static_range(BOXES):
            position = start + i * BOX
            offset = -gl.maximum(0, gl.minimum(BOX, position + BOX - context_len))
            if PAGE > BOX:
                offset += position % PAGE
            for half in gl.static_range(HALVES):
                at = (stage * HALVES + half) * BOXES + i
                tma.async_copy_global_to_shared(
                    desc, [blocks[i], head, offset, half * 64], full.index(stage), boxes.index(at)
                )
        step += 1
    return step


@gluon.jit
def _load_queries_and_keys(
    query_desc, key_desc, q_smem, k_smem, q_full, q_empty, k_full, k_empty,
    block_tables, rows, query_start, context_lens, tiles, num_items, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """The warp that brings every item's queries, one item ahead, and its keys."""
    TILE_Q: gl.constexpr = 128 // GROUP_ROWS
    q_boxes = q_smem._reinterpret(q_smem.dtype, [4 * HALVES, TILE_Q // 2, GROUP_ROWS, 64], query_desc.layout)
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    iteration = 0
    index = _snake(iteration, program, num_programs)
    # Loads run ahead: an item's sequence is loaded one iteration early, its tile two iterations early.
    seq, first_query = _tile(index, tiles, num_items, NUM_KV_HEADS)
    start, stop, context_len, row_of_table = _sequence(seq, rows, query_start, context_lens)
    next_seq, next_first = _tile(_snake(1, program, num_programs), tiles, num_items, NUM_KV_HEADS)
    while index < num_items:
        head = index % NUM_KV_HEADS
        token = start + first_query
        first_pos = context_len - stop + token
        next_start, next_stop, next_context_len, next_row = _sequence(next_seq, rows, query_start, context_lens)
        first_after = next_first
        next_seq, next_first = _tile(_snake(iteration + 2, program, num_programs), tiles, num_items, NUM_KV_HEADS)
        table = block_tables + row_of_table.to(gl.int64) * stride_table
        mbarrier.wait(q_empty.index(iteration % 2), ((iteration // 2) & 1) ^ 1)
        mbarrier.expect(q_full.index(iteration % 2), 128 * HALVES * 64 * 2)
        for group in gl.static_range(2):
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    query_desc, [token + group * (TILE_Q // 2), head * GROUP, half * 64],
                    q_full.index(iteration % 2), q_boxes.index(((iteration % 2) * 2 + group) * HALVES + half),
                )  # fmt: skip
        end = gl.minimum(first_pos + TILE_Q, context_len)
        step = _load_tiles(
            key_desc, k_smem, k_full, k_empty, step, table, end, context_len, head, BLOCK_N, PAGE, STAGES, HALVES
        )
        first_query, start, stop = first_after, next_start, next_stop
        context_len, row_of_table = next_context_len, next_row
        iteration += 1
        index = _snake(iteration, program, num_programs)


@gluon.jit
def _load_values(
    value_desc, v_smem, v_full, v_empty,
    block_tables, rows, query_start, context_lens, tiles, num_items, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """The warp that brings every item's values."""
    TILE_Q: gl.constexpr = 128 // GROUP_ROWS
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    iteration = 0
    index = _snake(iteration, program, num_programs)
    # Loads run ahead: an item's sequence is loaded one iteration early, its tile two iterations early.
    seq, first_query = _tile(index, tiles, num_items, NUM_KV_HEADS)
    start, stop, context_len, row_of_table = _sequence(seq, rows, query_start, context_lens)
    next_seq, next_first = _tile(_snake(1, program, num_programs), tiles, num_items, NUM_KV_HEADS)
    while index < num_items:
        head = index % NUM_KV_HEADS
        token = start + first_query
        first_pos = context_len - stop + token
        next_start, next_stop, next_context_len, next_row = _sequence(next_seq, rows, query_start, context_lens)
        first_after = next_first
        next_seq, next_first = _tile(_snake(iteration + 2, program, num_programs), tiles, num_items, NUM_KV_HEADS)
        table = block_tables + row_of_table.to(gl.int64) * stride_table
        end = gl.minimum(first_pos + TILE_Q, context_len)
        step = _load_tiles(
            value_desc, v_smem, v_full, v_empty, step, table, end, context_len, head, BLOCK_N, PAGE, STAGES, HALVES
        )
        first_query, start, stop = first_after, next_start, next_stop
        context_len, row_of_table = next_context_len, next_row
        iteration += 1
        index = _snake(iteration, program, num_programs)


@gluon.jit
def _masked(s, start, query_pos, context_len, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
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
        s = gl.where(key[None, :] <= last_seen[:, None], s, -float("inf"))
    else:
        s = gl.where(slots[None, :] <= last_seen[:, None], s, -float("inf"))
    return s


@gluon.jit
def _exponentials(s, m, l, scale_log2):
    """Base-2 probabilities of scores [M, N] under the new running maximum, the factor of what was summed before, and m and l."""
    new_m = gl.maximum(m, gl.max(s, 1))
    shift = new_m * scale_log2
    p = gl.exp2(s * scale_log2 - shift[:, None])
    rescale = gl.exp2(m * scale_log2 - shift)
    return p, rescale, new_m, l * rescale + gl.sum(p, 1)


@gluon.jit
def _fold_tiles(
    begin, end, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full, v_empty, may_multiply, query_pos, context_len,
    scale_log2, WG: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Fold key tiles [begin, end) into acc, m and l. Each adds the values of the tile before it, whose probabilities p are."""
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
        if MASKED:
            s = _masked(s, tile * BLOCK_N, query_pos, context_len, BLOCK_N, PAGE)
        probabilities, rescale, m, l = _exponentials(s, m, l, scale_log2)
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
    rows, query_start, context_lens, tiles, num_items, scale_log2, stride_ot,
    WG: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: rows [64 * WG, 64 * WG + 64) of every item."""
    TILE_Q: gl.constexpr = 128 // GROUP_ROWS
    D_PAD: gl.constexpr = HALVES * 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D_PAD // 8), D_PAD // 8], [4, 1], [1, 0])
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    iteration = 0
    index = _snake(iteration, program, num_programs)
    # Loads run ahead: an item's sequence is loaded one iteration early, its tile two iterations early.
    seq, first_query = _tile(index, tiles, num_items, NUM_KV_HEADS)
    start, stop, context_len, _ = _sequence(seq, rows, query_start, context_lens)
    next_seq, next_first = _tile(_snake(1, program, num_programs), tiles, num_items, NUM_KV_HEADS)
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
        next_start, next_stop, next_context_len, _ = _sequence(next_seq, rows, query_start, context_lens)
        first_after = next_first
        next_seq, next_first = _tile(_snake(iteration + 2, program, num_programs), tiles, num_items, NUM_KV_HEADS)
        row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        query_pos = gl.minimum(first_pos + row // GROUP_ROWS, context_len - 1)
        num_tiles = gl.cdiv(gl.minimum(first_pos + TILE_Q, context_len), BLOCK_N)
        num_whole = (first_pos + 1) // BLOCK_N

        step += 1
        if num_whole == 0:
            s = _masked(s, 0, query_pos, context_len, BLOCK_N, PAGE)
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        probabilities, _rescale, m, l = _exponentials(s, m, l, scale_log2)
        p = gl.convert_layout(probabilities.to(q.dtype), P_LAYOUT)
        acc = gl.zeros([64, D_PAD], gl.float32, ACC_LAYOUT)
        step, p, acc, m, l = _fold_tiles(
            1, num_whole, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full, v_empty, may_multiply, query_pos,
            context_len, scale_log2, WG, BLOCK_N, PAGE, STAGES, False,
        )  # fmt: skip
        step, p, acc, m, l = _fold_tiles(
            gl.maximum(num_whole, 1), num_tiles, step, q, p, acc, m, l, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            may_multiply, query_pos, context_len, scale_log2, WG, BLOCK_N, PAGE, STAGES, True,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(iteration % 2))

        # The matrix unit has the next item's first scores to compute while this one's output is stored.
        iteration += 1
        index = _snake(iteration, program, num_programs)
        previous = (step - 1) % STAGES
        stage = step % STAGES
        mbarrier.wait(v_full.index(previous), ((step - 1) // STAGES) & 1)
        mbarrier.wait(may_multiply.index(WG), step & 1)
        sum_of_values = warpgroup_mma(p, v_smem.index(previous), acc, is_async=True)
        mbarrier.wait(q_full.index(iteration % 2), (iteration // 2) & 1, pred=index < num_items)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1, pred=index < num_items)
        q = q_smem.index((iteration % 2) * 2 + WG)
        scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.arrive(may_multiply.index(1 - WG))
        acc = warpgroup_mma_wait(1, deps=[sum_of_values])
        mbarrier.arrive(v_empty.index(previous))

        acc *= (1.0 / gl.convert_layout(l, gl.SliceLayout(1, ACC_LAYOUT)))[:, None]
        result = gl.convert_layout(acc.to(q.dtype), OUT_LAYOUT)
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
    do_not_specialize_on_alignment=["rows", "query_start", "context_lens", "tiles"],
)
def _hopper_prefill_kernel(
    query_desc, key_desc, value_desc, out, block_tables, rows, query_start, context_lens, tiles, num_items, scale_log2,
    stride_ot, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Item i is tile i // NUM_KV_HEADS of `tiles` with KV head i % NUM_KV_HEADS. REGISTERS: of a multiplying thread."""
    HALVES: gl.constexpr = (HEAD_DIM + 63) // 64
    D_PAD: gl.constexpr = HALVES * 64
    DTYPE: gl.constexpr = key_desc.dtype
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2 * 2, 64, D_PAD], TILE_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D_PAD], TILE_LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D_PAD], TILE_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(may_multiply.index(i), count=1)
    fence_async_shared()
    mbarrier.arrive(may_multiply.index(0))  # warpgroup 0 multiplies first
    if PDL:
        launch_dependents()
        wait_for_inputs()
    gl.warp_specialize(
        [
            (_multiply, (
                out, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, may_multiply,
                rows, query_start, context_lens, tiles, num_items, scale_log2, stride_ot,
                gl.constexpr(0), NUM_KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, BLOCK_N, PAGE, STAGES, HALVES,
            )),
            (_multiply, (
                out, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, may_multiply,
                rows, query_start, context_lens, tiles, num_items, scale_log2, stride_ot,
                gl.constexpr(1), NUM_KV_HEADS, GROUP, GROUP_ROWS, HEAD_DIM, BLOCK_N, PAGE, STAGES, HALVES,
            )),
            (_load_queries_and_keys, (
                query_desc, key_desc, q_smem, k_smem, q_full, q_empty, k_full, k_empty, block_tables, rows, query_start,
                context_lens, tiles, num_items, stride_table,
                NUM_KV_HEADS, GROUP, GROUP_ROWS, BLOCK_N, PAGE, STAGES, HALVES,
            )),
            (_load_values, (
                value_desc, v_smem, v_full, v_empty, block_tables, rows, query_start, context_lens, tiles, num_items,
                stride_table, NUM_KV_HEADS, GROUP, GROUP_ROWS, BLOCK_N, PAGE, STAGES, HALVES,
            )),
        ],
        [4, 1, 1], [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


def applies(query: Tensor, key_cache: Tensor, scale: float) -> bool:
    """Whether this kernel computes the call: a Hopper GPU, 16-bit values, 64 <= head_dim <= 128, pages of 2^n, groups of
    query heads that fill three quarters of 2^n."""
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, page, _ = key_cache.shape
    rows = prefill_query_rows(num_heads // num_kv_heads)
    return (
        _num_multiprocessors(query.device) > 0
        and query.dtype in (torch.bfloat16, torch.float16)
        and key_cache.dtype == query.dtype
        and 64 <= head_dim <= 128
        and head_dim % 8 == 0
        and rows & (rows - 1) == 0
        and rows <= 64
        and page & (page - 1) == 0
        and page >= 8
        and scale > 0
        and query.stride(0) % 8 == 0
        and query.data_ptr() % 16 == 0
    )


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    """Of a Hopper GPU; 0 for any other device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _boxes(tensor: Tensor, *box: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box), _layout(len(box)))


def launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    tiles: Tensor,
    scale: float,
    block_n: int = 128,
    stages: int = 2,
    registers: int = 232,
) -> None:
    """Writes the attention of `tiles`' queries to `out`. Shapes as in `kernels.paged_attention_prefill`; see `applies`."""
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, page, _ = key_cache.shape
    group = num_heads // num_kv_heads
    num_items = len(tiles) * num_kv_heads
    rows_of_query = prefill_query_rows(group)
    box = min(page, block_n)
    _hopper_prefill_kernel[(min(num_items, _num_multiprocessors(query.device)),)](
        _boxes(query, 64 // rows_of_query, rows_of_query, 64), _boxes(key_cache, 1, 1, box, 64),
        _boxes(value_cache, 1, 1, box, 64), out, block_tables, rows, query_start, context_lens, tiles, num_items,
        scale * LOG2E.value, out.stride(0), block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=rows_of_query, HEAD_DIM=head_dim, BLOCK_N=block_n, PAGE=page,
        STAGES=stages, REGISTERS=registers, num_warps=4, **pdl_options(query.device),
    )  # fmt: skip
