"""The partitions of Hopper's prefill attention that bring queries, keys and values to shared memory.

They ask TMA: one for queries and keys, one for values. For an e4m3 cache there is one partition for
all of them, which also makes float16 of the codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def snake(iteration, program, num_programs):
    """A program's item in an iteration: forth and back over the programs, so that long and short items even out."""
    return iteration * num_programs + gl.where(iteration % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def item_tile(index, tiles, num_items, NUM_KV_HEADS: gl.constexpr):
    """Sequence and first query of an item's tile; of the last item where `index` is beyond it."""
    at = tiles + gl.minimum(index, num_items - 1) // NUM_KV_HEADS * 2
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def sequence_of(seq, rows, query_start, context_lens):
    """First token, end of tokens, context length and row in the block tables of a sequence."""
    return gl.load(query_start + seq), gl.load(query_start + seq + 1), gl.load(context_lens + seq), gl.load(rows + seq)


@gluon.jit
def first_items(program, num_programs, tiles, num_items, rows, query_start, context_lens, NUM_KV_HEADS: gl.constexpr):
    """A program's first item: its first query, and `sequence_of` it; then the tile of the second item.

    Loads run ahead: an item's sequence is loaded one iteration early, its tile two iterations early.
    """
    seq, first_query = item_tile(snake(0, program, num_programs), tiles, num_items, NUM_KV_HEADS)
    start, stop, context_len, row = sequence_of(seq, rows, query_start, context_lens)
    next_seq, next_first = item_tile(snake(1, program, num_programs), tiles, num_items, NUM_KV_HEADS)
    return first_query, start, stop, context_len, row, next_seq, next_first


@gluon.jit
def keys_of(first_pos, context_len, TILE_Q: gl.constexpr, WINDOW: gl.constexpr, SPARSE: gl.constexpr):
    """Range of keys that the TILE_Q queries from first_pos on see: from the oldest one's window, or local blocks,
    on.
    """
    oldest = first_pos * 0
    if WINDOW > 0:
        oldest = gl.maximum(first_pos - WINDOW + 1, 0)
    if SPARSE is not None:
        oldest = gl.maximum(first_pos // SPARSE[0] - SPARSE[1] + 1, 0) * SPARSE[0]
    return oldest, gl.minimum(first_pos + TILE_Q, context_len)


@gluon.jit
def vertical_blocks(head, oldest, SPARSE: gl.constexpr):
    """The blocks before the local ones that a query head sees, each a stride from the next: the first, and how many."""
    first = (SPARSE[2] - ((SPARSE[4] + head) * SPARSE[3] + 1) % SPARSE[2]) % SPARSE[2]
    return first, gl.cdiv(gl.maximum(oldest // SPARSE[0] - first, 0), SPARSE[2])


@gluon.jit
def blocks_of_boxes(
    table, start, oldest, context_len, BOX: gl.constexpr, BOXES: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr
):
    """The blocks of the boxes that make up a tile of keys; -1 for a box behind the context or before the window."""
    blocks = ()
    for i in gl.static_range(BOXES):
        position = start + i * BOX
        inside = position < context_len
        if WINDOW > 0:
            inside &= position + BOX > oldest
        block = gl.load(table + position // PAGE, mask=inside, other=-1)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def ask_boxes(
    desc, boxes, full, stage, blocks, start, context_len, kv_head, pred,
    BOXES: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """Ask for the boxes of a tile of keys (or values), if `pred`."""
    BOX: gl.constexpr = desc.block_shape[2]
    mbarrier.expect(full, BOXES * PANELS * desc.block_type.nbytes, pred=pred)
    for i in gl.static_range(BOXES):
        position = start + i * BOX
        offset = -gl.maximum(0, gl.minimum(BOX, position + BOX - context_len))
        if PAGE > BOX:
            offset += position % PAGE
        for panel in gl.static_range(PANELS):
            to = boxes.index((stage * PANELS + panel) * BOXES + i)
            tma.async_copy_global_to_shared(
                desc, [blocks[i], kv_head, offset, panel * desc.block_shape[3]], full, to, pred=pred
            )


@gluon.jit
def _load_tile(
    desc, boxes, full, empty, step, table, start, oldest, context_len, kv_head,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, PANELS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Ask for BLOCK_N keys (or values) of one sequence and head as soon as the stage is empty."""
    BOX: gl.constexpr = desc.block_shape[2]
    BOXES: gl.constexpr = BLOCK_N // BOX
    blocks = blocks_of_boxes(table, start, oldest, context_len, BOX, BOXES, PAGE, WINDOW)
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    ask_boxes(desc, boxes, full.index(stage), stage, blocks, start, context_len, kv_head, True, BOXES, PAGE, PANELS)


@gluon.jit
def _load_tiles(
    desc, smem, full, empty, step, table, oldest, end, context_len, head, kv_head,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, PANELS: gl.constexpr, WINDOW: gl.constexpr,
    SPARSE: gl.constexpr,
):  # fmt: skip
    """Ask for the keys (or values) [oldest, end), and before them, with SPARSE, whose blocks are tiles, vertical
    blocks.
    """
    BOX: gl.constexpr = desc.block_shape[2]
    COUNT: gl.constexpr = STAGES * PANELS * (BLOCK_N // BOX)
    boxes = smem._reinterpret(smem.dtype, [COUNT, 1, 1, BOX, desc.block_shape[3]], desc.layout)
    if SPARSE is not None:
        first, vertical = vertical_blocks(head, oldest, SPARSE)
        for i in range(vertical):
            start = (first + i * SPARSE[2]) * BLOCK_N
            _load_tile(
                desc, boxes, full, empty, step, table, start, oldest, context_len, kv_head, BLOCK_N, PAGE, STAGES,
                PANELS, WINDOW,
            )  # fmt: skip
            step += 1
    for start in range(oldest // BLOCK_N * BLOCK_N, end, BLOCK_N):
        _load_tile(
            desc, boxes, full, empty, step, table, start, oldest, context_len, kv_head, BLOCK_N, PAGE, STAGES, PANELS,
            WINDOW,
        )  # fmt: skip
        step += 1
    return step


@gluon.jit
def _load_queries(
    desc, q_smem, full, q_stage, token, head,
    GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, Q_STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Ask for an item's 128 rows of queries."""
    QUERIES: gl.constexpr = 64 // GROUP_ROWS
    boxes = q_smem._reinterpret(q_smem.dtype, [2 * Q_STAGES * HALVES, QUERIES, GROUP_ROWS, 64], desc.layout)
    mbarrier.expect(full.index(q_stage), 128 * HALVES * 64 * 2)
    for group in gl.static_range(2):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc, [token + group * QUERIES, head * GROUP, half * 64],
                full.index(q_stage), boxes.index((q_stage * 2 + group) * HALVES + half),
            )  # fmt: skip


@gluon.jit
def bring_items(
    query, cache, q_smem, smem, q_full, q_empty, full, empty,
    block_tables, rows, query_start, context_lens, tiles, num_items, stride_table,
    KEYS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, KV_GROUP: gl.constexpr, GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    HALVES: gl.constexpr, WINDOW: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """The partition that brings every item's queries, with two stages one item ahead, and keys; without KEYS its
    values.
    """
    TILE_Q: gl.constexpr = 128 // GROUP_ROWS
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    iteration = 0
    index = snake(iteration, program, num_programs)
    first_query, start, stop, context_len, row_of_table, next_seq, next_first = first_items(
        program, num_programs, tiles, num_items, rows, query_start, context_lens, NUM_KV_HEADS
    )
    while index < num_items:
        head = index % NUM_KV_HEADS
        token = start + first_query
        first_pos = context_len - stop + token
        next_start, next_stop, next_context_len, next_row = sequence_of(next_seq, rows, query_start, context_lens)
        first_after = next_first
        next_seq, next_first = item_tile(snake(iteration + 2, program, num_programs), tiles, num_items, NUM_KV_HEADS)
        table = block_tables + row_of_table.to(gl.int64) * stride_table
        oldest, end = keys_of(first_pos, context_len, TILE_Q, WINDOW, SPARSE)
        if KEYS:
            q_stage = iteration % Q_STAGES
            mbarrier.wait(q_empty.index(q_stage), ((iteration // Q_STAGES) & 1) ^ 1)
            _load_queries(query, q_smem, q_full, q_stage, token, head, GROUP, GROUP_ROWS, Q_STAGES, HALVES)
        step = _load_tiles(
            cache, smem, full, empty, step, table, oldest, end, context_len, head, head // KV_GROUP,
            BLOCK_N, PAGE, STAGES, HALVES * 64 // cache.block_shape[3], WINDOW, SPARSE,
        )  # fmt: skip
        first_query, start, stop = first_after, next_start, next_stop
        context_len, row_of_table = next_context_len, next_row
        iteration += 1
        index = snake(iteration, program, num_programs)


@gluon.jit
def _float16_pairs(chunk):
    """[64, 32] int32, each two float16, of [64, 16] int32, each four e4m3."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r", [gl.convert_layout(chunk, CODES)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(low, high).reshape([64, 32]), PAIRS)


@gluon.jit
def _ask_codes(
    desc, codes, full, blocks, start, context_len, kv_head, pred, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Ask for the e4m3 codes of a tile of keys (or values), if `pred`."""
    BOX: gl.constexpr = desc.block_shape[2]
    PANELS: gl.constexpr = HALVES * 64 // desc.block_shape[3]
    boxes = codes._reinterpret(codes.dtype, [PANELS * (BLOCK_N // BOX), 1, 1, BOX, desc.block_shape[3]], desc.layout)
    ask_boxes(desc, boxes, full, 0, blocks, start, context_len, kv_head, pred, BLOCK_N // BOX, PAGE, PANELS)


@gluon.jit
def _convert_tile(
    desc, codes, smem, codes_full, full, empty, step, blocks, start, context_len, kv_head, more,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Fill the next stage with BLOCK_N keys (or values) as float16, from the codes that were asked for: 64 of them at a
    time, and a panel of 128 channels, or of 64. As soon as all are read, ask for those of another tile, if there are
    `more`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    PARTS: gl.constexpr = BLOCK_N // 64
    SIDES: gl.constexpr = min(HALVES, 2)  # halves of a panel
    PANELS: gl.constexpr = HALVES // SIDES
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64 * SIDES, element_bitwidth=32, rank=2)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    sources = codes._reinterpret(gl.int32, [PANELS * PARTS, 64, 16 * SIDES], CODES)
    targets = smem._reinterpret(gl.int32, [STAGES * HALVES * PARTS, 64, 32], PAIRS)
    stage = step % STAGES
    mbarrier.wait(codes_full, step & 1)
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    for i in gl.static_range(PANELS * PARTS):
        chunk = sources.index(i).load(LAYOUT)
        if i == PANELS * PARTS - 1:
            _ask_codes(desc, codes, codes_full, blocks, start, context_len, kv_head, more, BLOCK_N, PAGE, HALVES)
        at = (stage * HALVES + i // PARTS * SIDES) * PARTS + i % PARTS
        if SIDES == 1:
            targets.index(at).store(_float16_pairs(chunk))
        else:
            left, right = gl.split(chunk.reshape([64, 2, 16]).permute([0, 2, 1]))
            targets.index(at).store(_float16_pairs(left))
            targets.index(at + PARTS).store(_float16_pairs(right))
    fence_async_shared()
    mbarrier.arrive(full.index(stage))


@gluon.jit
def convert_items(
    query, keys, values, q_smem, k_codes, v_codes, k_smem, v_smem, q_full, q_empty, codes_full, k_full, k_empty, v_full,
    v_empty, block_tables, rows, query_start, context_lens, tiles, num_items, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, HALVES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The partition that brings every item's queries, keys and values, if these are e4m3 codes: it makes them float16.

    A tile's codes are asked for while those of the tile before, which may be the last one of another item, become
    float16. codes_full: a barrier for keys, and one for values.
    """
    TILE_Q: gl.constexpr = 128 // GROUP_ROWS
    BOX: gl.constexpr = keys.block_shape[2]
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    iteration = 0
    index = snake(iteration, program, num_programs)
    more = index < num_items  # there is another tile to ask for; at first, one at all
    first_query, start, stop, context_len, row_of_table, next_seq, next_first = first_items(
        program, num_programs, tiles, num_items, rows, query_start, context_lens, NUM_KV_HEADS
    )
    while index < num_items:
        head = index % NUM_KV_HEADS
        token = start + first_query
        next_index = snake(iteration + 1, program, num_programs)
        next_start, next_stop, next_context_len, next_row = sequence_of(next_seq, rows, query_start, context_lens)
        first_after = next_first
        next_seq, next_first = item_tile(snake(iteration + 2, program, num_programs), tiles, num_items, NUM_KV_HEADS)
        oldest, end = keys_of(context_len - stop + token, context_len, TILE_Q, WINDOW, None)
        next_pos = next_context_len - next_stop + next_start + first_after
        next_oldest, _ = keys_of(next_pos, next_context_len, TILE_Q, WINDOW, None)
        begin = oldest // BLOCK_N * BLOCK_N
        if step == 0:
            table = block_tables + row_of_table.to(gl.int64) * stride_table
            blocks = blocks_of_boxes(table, begin, oldest, context_len, BOX, BLOCK_N // BOX, PAGE, WINDOW)
            _ask_codes(
                keys, k_codes, codes_full.index(0), blocks, begin, context_len, head, more, BLOCK_N, PAGE, HALVES
            )
            _ask_codes(
                values, v_codes, codes_full.index(1), blocks, begin, context_len, head, more, BLOCK_N, PAGE, HALVES
            )
        q_stage = iteration % Q_STAGES
        mbarrier.wait(q_empty.index(q_stage), ((iteration // Q_STAGES) & 1) ^ 1)
        _load_queries(query, q_smem, q_full, q_stage, token, head, GROUP, GROUP_ROWS, Q_STAGES, HALVES)
        for tile in range(begin, end, BLOCK_N):
            # What to ask for: this item's next tile, or the next item's first one.
            own = tile + BLOCK_N < end
            at = gl.where(own, tile + BLOCK_N, next_oldest // BLOCK_N * BLOCK_N)
            at_len = gl.where(own, context_len, next_context_len)
            at_head = gl.where(own, head, next_index % NUM_KV_HEADS)
            table = block_tables + gl.where(own, row_of_table, next_row).to(gl.int64) * stride_table
            blocks = blocks_of_boxes(
                table, at, gl.where(own, oldest, next_oldest), at_len, BOX, BLOCK_N // BOX, PAGE, WINDOW
            )
            more = own | (next_index < num_items)
            _convert_tile(
                keys, k_codes, k_smem, codes_full.index(0), k_full, k_empty, step, blocks, at, at_len, at_head, more,
                BLOCK_N, PAGE, STAGES, HALVES,
            )  # fmt: skip
            _convert_tile(
                values, v_codes, v_smem, codes_full.index(1), v_full, v_empty, step, blocks, at, at_len, at_head, more,
                BLOCK_N, PAGE, STAGES, HALVES,
            )  # fmt: skip
            step += 1
        first_query, start, stop = first_after, next_start, next_stop
        context_len, row_of_table = next_context_len, next_row
        iteration += 1
        index = next_index
