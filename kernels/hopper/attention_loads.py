"""What brings the queries, keys and values of Hopper's prefill attention to shared memory, each in a partition of its own.

By the tensor memory accelerator, but keys and values of an e4m3 cache through registers, where they become float16.
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
    """Of a sequence: first token, end of its tokens, context length, row of the block tables."""
    return gl.load(query_start + seq), gl.load(query_start + seq + 1), gl.load(context_lens + seq), gl.load(rows + seq)


@gluon.jit
def keys_of(first_pos, context_len, TILE_Q: gl.constexpr, WINDOW: gl.constexpr, SPARSE: gl.constexpr):
    """Which keys the TILE_Q queries from first_pos on see: from the oldest one's window, or local blocks, to the newest one."""
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
def _blocks(
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
def _load_tile(
    desc, boxes, full, empty, step, table, start, oldest, context_len, kv_head,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Ask for BLOCK_N keys (or values) of one sequence and head as soon as the stage is empty."""
    BOX: gl.constexpr = desc.block_shape[2]
    BOXES: gl.constexpr = BLOCK_N // BOX
    blocks = _blocks(table, start, oldest, context_len, BOX, BOXES, PAGE, WINDOW)
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
                desc, [blocks[i], kv_head, offset, half * 64], full.index(stage), boxes.index(at)
            )


@gluon.jit
def _load_tiles(
    desc, smem, full, empty, step, table, oldest, end, context_len, head, kv_head,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, WINDOW: gl.constexpr,
    SPARSE: gl.constexpr,
):  # fmt: skip
    """Ask for the keys (or values) [oldest, end), and before them, with SPARSE, whose blocks are tiles, vertical blocks."""
    BOX: gl.constexpr = desc.block_shape[2]
    boxes = smem._reinterpret(smem.dtype, [STAGES * HALVES * (BLOCK_N // BOX), 1, 1, BOX, 64], desc.layout)
    if SPARSE is not None:
        first, vertical = vertical_blocks(head, oldest, SPARSE)
        for i in range(vertical):
            start = (first + i * SPARSE[2]) * BLOCK_N
            _load_tile(
                desc,
                boxes,
                full,
                empty,
                step,
                table,
                start,
                oldest,
                context_len,
                kv_head,
                BLOCK_N,
                PAGE,
                STAGES,
                HALVES,
                WINDOW,
            )
            step += 1
    for start in range(oldest // BLOCK_N * BLOCK_N, end, BLOCK_N):
        _load_tile(
            desc,
            boxes,
            full,
            empty,
            step,
            table,
            start,
            oldest,
            context_len,
            kv_head,
            BLOCK_N,
            PAGE,
            STAGES,
            HALVES,
            WINDOW,
        )
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
def _blocks_of_slots(table, start, oldest, context_len, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr):
    """The blocks of the slots of a tile of keys, 64 after 64; -1 for slots behind the context or before `oldest`."""
    blocks = ()
    for i in gl.static_range(BLOCK_N // 64):
        position = start + i * 64 + gl.arange(0, 64, layout=SLOTS)
        inside = (position < context_len) & (position >= oldest)
        block = gl.load(table + position // PAGE, mask=inside, other=-1)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def _e4m3_chunk(
    cache, blocks, start, stride_block, stride_token,
    CHUNK: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE: gl.constexpr, HALVES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """64 slots and 64 channels of a tile, of which the channels come first: [64, 16] int32, as registers hold them."""
    block = blocks[CHUNK // HALVES]
    position = start + CHUNK // HALVES * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    four = CHUNK % HALVES * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    at = (
        cache
        + (block.to(gl.int64) * (stride_block // 4) + position % PAGE * (stride_token // 4))[:, None]
        + four[None, :]
    )
    mask = (block >= 0)[:, None]
    if HALVES * 64 != HEAD_DIM:
        mask &= (four < HEAD_DIM // 4)[None, :]
    return gl.load(at, mask=mask, other=0)


@gluon.jit
def _float16_pairs(chunk):
    """[64, 32] int32, each two float16, of [64, 16] int32, each four e4m3."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r", [chunk], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(low, high).reshape([64, 32]), PAIRS)


@gluon.jit
def _convert_tiles(
    keys, values, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, table, oldest, end, context_len, stride_block,
    stride_token,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Fill each empty stage with BLOCK_N of the e4m3 keys and values [oldest, end) as float16.

    A tile is one line of chunks, the keys' and then the values'. AHEAD chunks are on their way.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    SLOTS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    PARTS: gl.constexpr = BLOCK_N // 64
    CHUNKS: gl.constexpr = PARTS * HALVES
    AHEAD: gl.constexpr = min(4, 2 * CHUNKS)
    PAIRS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    key_chunks = k_smem._reinterpret(gl.int32, [STAGES * CHUNKS, 64, 32], PAIRS_LAYOUT)
    value_chunks = v_smem._reinterpret(gl.int32, [STAGES * CHUNKS, 64, 32], PAIRS_LAYOUT)
    begin = oldest // BLOCK_N * BLOCK_N
    blocks = _blocks_of_slots(table, begin, oldest, context_len, BLOCK_N, PAGE, SLOTS)
    loaded = ()
    for c in gl.static_range(AHEAD):
        chunk = _e4m3_chunk(
            keys if c < CHUNKS else values, blocks, begin, stride_block, stride_token, c % CHUNKS,
            HEAD_DIM, PAGE, HALVES, LAYOUT,
        )  # fmt: skip
        loaded = loaded + (chunk,)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(begin, end, BLOCK_N):
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        after = start + BLOCK_N
        next_blocks = _blocks_of_slots(table, after, oldest, context_len, BLOCK_N, PAGE, SLOTS)
        for c in gl.static_range(2 * CHUNKS):
            converted = _float16_pairs(loaded[0])  # type: ignore[misc]
            chunk = _e4m3_chunk(
                keys if (c + AHEAD) % (2 * CHUNKS) < CHUNKS else values,
                blocks if c + AHEAD < 2 * CHUNKS else next_blocks,
                start if c + AHEAD < 2 * CHUNKS else after,
                stride_block, stride_token, (c + AHEAD) % CHUNKS, HEAD_DIM, PAGE, HALVES, LAYOUT,
            )  # fmt: skip
            loaded = loaded[1:] + (chunk,)  # type: ignore[assignment]  # noqa: RUF005
            if c % CHUNKS == 0:
                mbarrier.wait((k_empty if c < CHUNKS else v_empty).index(stage), phase)
            at = stage * CHUNKS + c % CHUNKS % HALVES * PARTS + c % CHUNKS // HALVES
            (key_chunks if c < CHUNKS else value_chunks).index(at).store(converted)
            if (c + 1) % CHUNKS == 0:
                fence_async_shared()
                mbarrier.arrive((k_full if c < CHUNKS else v_full).index(stage))
        blocks = next_blocks
        step += 1
    return step


@gluon.jit
def bring_items(
    query, key_cache, value_cache, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    block_tables, rows, query_start, context_lens, tiles, num_items, stride_table, stride_block, stride_head, stride_token,
    KEYS: gl.constexpr, FP8: gl.constexpr, NUM_KV_HEADS: gl.constexpr, KV_GROUP: gl.constexpr, GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, HALVES: gl.constexpr, WINDOW: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """The partition that brings every item's queries, with two stages one item ahead, and keys; without KEYS its values.

    With FP8 it brings values besides keys; the caches are pointers then, else descriptors of boxes, as the query is.
    """
    TILE_Q: gl.constexpr = 128 // GROUP_ROWS
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    step = 0
    iteration = 0
    index = snake(iteration, program, num_programs)
    # Loads run ahead: an item's sequence is loaded one iteration early, its tile two iterations early.
    seq, first_query = item_tile(index, tiles, num_items, NUM_KV_HEADS)
    start, stop, context_len, row_of_table = sequence_of(seq, rows, query_start, context_lens)
    next_seq, next_first = item_tile(snake(1, program, num_programs), tiles, num_items, NUM_KV_HEADS)
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
        if FP8:
            head_at = head.to(gl.int64) * (stride_head // 4)
            keys = key_cache.to(gl.pointer_type(gl.int32), bitcast=True) + head_at
            values = value_cache.to(gl.pointer_type(gl.int32), bitcast=True) + head_at
            step = _convert_tiles(
                keys, values, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, table,
                oldest, end, context_len, stride_block, stride_token, HEAD_DIM, BLOCK_N, PAGE, STAGES, HALVES,
            )  # fmt: skip
        else:
            step = _load_tiles(
                key_cache if KEYS else value_cache, k_smem if KEYS else v_smem, k_full if KEYS else v_full,
                k_empty if KEYS else v_empty, step, table, oldest, end, context_len, head, head // KV_GROUP,
                BLOCK_N, PAGE, STAGES, HALVES, WINDOW, SPARSE,
            )  # fmt: skip
        first_query, start, stop = first_after, next_start, next_stop
        context_len, row_of_table = next_context_len, next_row
        iteration += 1
        index = snake(iteration, program, num_programs)
