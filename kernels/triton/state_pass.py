"""The delta rule and state-space layers over a prompt's chunks and states in blocks, in three kernels, in Triton.

Only what must go from one chunk of tokens to the next does: two matrix multiplications a chunk for the delta rule, one
for a state-space layer, in `pass_kernel`. What comes before, in `chunk_states.solve_kernel`, and after, the outputs in
`read_kernel` and what blocks keep in `keep_kernel`, is computed for all chunks at once. The loop only stores the state
before the chunk in which a held block begins, so it needs little shared memory.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.scan_decode import offsets


@triton.jit
def _blocks_that_begin(table, position, low, high, SIZE: tl.constexpr, ENTRIES: tl.constexpr):
    """Return the blocks [ENTRIES] that begin with one of a sequence's tokens low to high - 1, and
    their first tokens; -1 where no block is held. position: of token low.
    """
    index = (position + SIZE - 1) // SIZE + tl.arange(0, ENTRIES)
    begin = low + index * SIZE - position
    return tl.load(table + index, mask=begin < high, other=-1), begin


@triton.jit(do_not_specialize=["num_rows", "first_sequence", "num_padded"])
def pass_kernel(
    inputs, scalars, weights, solved, starts, before, keys, updates, decays,
    block_tables, rows, query_start, context_lens, num_rows, first_sequence, num_padded, stride_inputs, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, RARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head of a sequence. ENTRIES: at most as many blocks begin in a chunk.

    solved: becomes the updates. starts [chunks + sequences, Hv, DK, DV]: the state before each chunk of a sequence, at
    the sum of both numbers. before: of the last held block that begins in a chunk, the state before the chunk.
    """
    head, sequence = tl.program_id(0), tl.program_id(2) + first_sequence
    key_head = head // (NUM_VALUES // NUM_KEYS)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    is_real = (row < num_rows - 1) & (end > start)
    first = tl.load(context_lens + sequence) - (end - start)  # position of the first token
    table = block_tables + row.to(tl.int64) * stride_table
    t, k_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)[None, :]
    v_at = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    is_k, is_v = k_at < DK, v_at < DV

    source_index = tl.maximum(first - 1, 0) // SIZE
    num_old = tl.where(is_real, first - source_index * SIZE, 0)
    source = tl.load(table + source_index, mask=num_old > 0, other=0).to(tl.int64)
    at_state = tl.trans(k_at) * DV + v_at  # [K, V]
    is_state = tl.trans(is_k) & is_v
    before += head * (DK * DV)
    starts += head * (DK * DV)
    state = tl.load(
        before + source * (NUM_VALUES * DK * DV) + at_state,
        mask=is_state & (num_old > 0) & (source_index > 0),
        other=0.0,
    ).to(tl.float32)
    if num_old > 0:
        o = tl.arange(0, BLOCK_T)
        is_old, old_slot = o < num_old, source * SIZE + o
        old_decays = tl.load(decays + old_slot * NUM_VALUES + head, mask=is_old, other=0.0)
        since_old = tl.sum(tl.where(o == num_old - 1, old_decays, 0.0), 0)
        old_key = tl.load(
            keys + (old_slot[:, None] * NUM_KEYS + key_head) * DK + k_at, mask=is_old[:, None] & is_k, other=0.0
        ).to(tl.float32)
        of_old = tl.where(is_old, tl.exp(since_old - old_decays), 0.0)
        if DELTA:
            of_old *= tl.rsqrt(tl.sum(old_key * old_key, 1) + 1e-6)
        old_update = tl.load(
            updates + (old_slot[:, None] * NUM_VALUES + head) * DV + v_at, mask=is_old[:, None] & is_v, other=0.0
        )
        added = tl.dot(tl.trans(old_key * of_old[:, None]), old_update, input_precision=RARE)
        state = tl.exp(since_old) * state + added

    _, key_at, _ = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    since_of_head = scalars + head.to(tl.int64) * num_padded
    factors_of_head = since_of_head + 2 * num_padded.to(tl.int64) * NUM_VALUES
    at_key = t[:, None] * stride_inputs + k_at
    at_weight = t[:, None] * (NUM_VALUES * DK) + k_at
    at_update = t[:, None] * (NUM_VALUES * DV) + v_at
    end = tl.where(is_real, end, start // CHUNK * CHUNK)
    for chunk in tl.range(start // CHUNK, tl.cdiv(end, CHUNK), num_stages=STAGES):
        low, high = tl.maximum(start, chunk * CHUNK), tl.minimum(end, chunk * CHUNK + CHUNK)
        begin = start.to(tl.int64) + (chunk * CHUNK - start)
        is_own = (begin + t >= low) & (begin + t < high)
        is_key = is_own[:, None] & is_k
        since, of_key = tl.load(since_of_head + begin + t), tl.load(factors_of_head + begin + t)
        total = tl.load(since_of_head + high - 1)
        key = tl.load(inputs + begin * stride_inputs + key_at + at_key, mask=is_key, other=0.0)
        to_update = solved + (begin * NUM_VALUES + head) * DV + at_update
        update = tl.load(to_update, mask=is_own[:, None] & is_v, other=0.0).to(tl.float32)
        part = (chunk + tl.program_id(2)).to(tl.int64) * (NUM_VALUES * DK * DV)
        narrow = state.to(starts.dtype.element_ty)
        tl.store(starts + part + at_state, narrow, mask=is_state)
        if DELTA:
            weight = tl.load(weights + (begin * NUM_VALUES + head) * DK + at_weight, mask=is_key, other=0.0)
            update -= tl.dot(weight.to(TYPE), state.to(TYPE), input_precision=PRECISION)
            tl.store(to_update, update.to(solved.dtype.element_ty), mask=is_own[:, None] & is_v)
        blocks, _begins = _blocks_that_begin(table, first + low - start, low, high, SIZE, ENTRIES)
        block = tl.max(blocks, 0)
        if block >= 0:
            tl.store(before + block.to(tl.int64) * (NUM_VALUES * DK * DV) + at_state, state, mask=is_state)
        left = (tl.exp(tl.minimum(total - since, 0.0)) * of_key)[:, None]
        added = tl.dot(tl.trans(key).to(TYPE), (update * left).to(TYPE), input_precision=PRECISION)
        state = tl.exp(total) * state + added


@triton.jit(do_not_specialize=["num_rows", "first_sequence", "num_tokens", "num_padded"])
def read_kernel(
    inputs, skip, scalars, seen, solved, starts, out, rows, query_start, sequence_of,
    num_rows, first_sequence, num_tokens, num_padded, stride_inputs,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head and a chunk: the outputs."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, k_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)[None, :]
    v_at = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    is_k, is_v = k_at < DK, v_at < DV
    token = chunk * CHUNK + t
    begin = chunk.to(tl.int64) * CHUNK
    first = tl.maximum(tl.load(sequence_of + begin), first_sequence)
    last = tl.load(sequence_of + tl.minimum(chunk * CHUNK + CHUNK, num_tokens) - 1)
    is_own = (token >= tl.load(query_start + first_sequence)) & (token < num_tokens)
    at = scalars + head.to(tl.int64) * num_padded + begin + t
    since, of_query = tl.load(at), tl.load(at + 3 * num_padded.to(tl.int64) * NUM_VALUES)
    q_at, _, value_at = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    from_chunk = inputs + begin * stride_inputs
    query = tl.load(from_chunk + q_at + t[:, None] * stride_inputs + k_at, mask=is_own[:, None] & is_k, other=0.0)
    query = query.to(tl.float32) * (tl.exp(since) * of_query)[:, None]
    at_value = t[:, None] * (NUM_VALUES * DV) + v_at
    of_head = (begin * NUM_VALUES + head) * DV
    update = tl.load(solved + of_head + at_value, mask=is_own[:, None] & is_v, other=0.0)
    matrix = seen + (chunk.to(tl.int64) * NUM_VALUES + head) * (CHUNK * CHUNK)
    sees = tl.load(matrix + t[:, None] * CHUNK + t[None, :])
    output = tl.dot(sees.to(TYPE), update.to(TYPE), input_precision=PRECISION)
    if not DELTA:
        value = tl.load(
            from_chunk + value_at + t[:, None] * stride_inputs + v_at, mask=is_own[:, None] & is_v, other=0.0
        )
        output += tl.load(skip + head) * value.to(tl.float32)
    is_real = is_own & (t < 0)
    at_state = tl.trans(k_at) * DV + v_at  # [K, V]
    for sequence in range(first, last + 1):
        low, high = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
        is_its = (token >= low) & (token < high) & (tl.load(rows + sequence) < num_rows - 1)
        is_real = is_real | is_its
        has_tokens = tl.minimum(high, chunk * CHUNK + CHUNK) > tl.maximum(low, chunk * CHUNK)
        has_tokens = has_tokens & (tl.load(rows + sequence) < num_rows - 1)
        part = starts + ((chunk + sequence - first_sequence).to(tl.int64) * NUM_VALUES + head) * (DK * DV)
        state = tl.load(part + at_state, mask=tl.trans(is_k) & is_v & has_tokens, other=0.0)
        own = tl.where(is_its[:, None], query, 0.0)
        output += tl.dot(own.to(TYPE), state.to(TYPE), input_precision=PRECISION)
    output = tl.where(is_real[:, None], output, 0.0)
    tl.store(out + of_head + at_value, output.to(out.dtype.element_ty), mask=is_own[:, None] & is_v)


@triton.jit
def _keep_states(
    from_keys, scalars_of_chunk, solved_of_chunk, before, blocks, begins, low, t, k_at, v_at,
    NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ENTRIES: tl.constexpr, RARE: tl.constexpr,
):  # fmt: skip
    """Store the states before blocks that begin with a sequence's tokens, by some value channels.

    begins [ENTRIES]: the blocks' first tokens in the chunk; low: the sequence's. All pointers are a head's.
    """
    is_state = tl.trans(k_at < DK) & (v_at < DV)
    at_state = tl.trans(k_at) * DV + v_at
    newest = tl.max(blocks, 0).to(tl.int64)
    start_state = tl.load(before + newest * (NUM_VALUES * DK * DV) + at_state, mask=is_state, other=0.0)
    start_state = start_state.to(tl.float32)
    tl.debug_barrier()  # this memory is written below
    since, of_key = scalars_of_chunk
    for entry in range(ENTRIES):
        block = tl.sum(tl.where(tl.arange(0, ENTRIES) == entry, blocks, 0), 0).to(tl.int64)
        if block >= 0:
            cut = tl.sum(tl.where(tl.arange(0, ENTRIES) == entry, begins, 0), 0)
            to_cut = tl.sum(tl.where((t == cut - 1) & (cut > low), since, 0.0), 0)
            is_past = (t >= low) & (t < cut)
            of_past = tl.where(is_past, tl.exp(tl.minimum(to_cut - since, 0.0)) * of_key, 0.0)
            key = tl.load(from_keys, mask=is_past[:, None] & (k_at < DK), other=0.0).to(tl.float32)
            update = tl.load(
                solved_of_chunk + t[:, None] * (NUM_VALUES * DV) + v_at, mask=is_past[:, None] & (v_at < DV), other=0.0
            ).to(tl.float32)
            then = tl.exp(to_cut) * start_state
            then += tl.dot(tl.trans(key), update * of_past[:, None], input_precision=RARE)
            tl.store(before + block * (NUM_VALUES * DK * DV) + at_state, then, mask=is_state)


@triton.jit(do_not_specialize=["num_rows", "first_sequence", "num_tokens", "num_padded"])
def keep_kernel(
    inputs, scalars, solved, before, keys, updates, decays, block_tables, rows, query_start, context_lens, sequence_of,
    num_rows, first_sequence, num_tokens, num_padded, stride_inputs, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr, RARE: tl.constexpr,
):  # fmt: skip
    """One program for a chunk and a head: what held blocks keep of its tokens; states before those that begin."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    t, k_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)[None, :]
    token, begin = chunk * CHUNK + t, chunk.to(tl.int64) * CHUNK
    of_head = scalars + head.to(tl.int64) * num_padded
    stride = num_padded.to(tl.int64) * NUM_VALUES
    _, key_at, _ = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    from_keys = inputs + begin * stride_inputs + key_at + t[:, None] * stride_inputs + k_at
    solved += (begin * NUM_VALUES + head) * DV
    before += head * (DK * DV)
    last_sequence = tl.load(sequence_of + tl.minimum(chunk * CHUNK + CHUNK, num_tokens) - 1)
    for sequence in range(tl.maximum(tl.load(sequence_of + begin), first_sequence), last_sequence + 1):
        row = tl.load(rows + sequence)
        start, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
        low, high = tl.maximum(start, chunk * CHUNK), tl.minimum(end, chunk * CHUNK + CHUNK)
        has_tokens = (row < num_rows - 1) & (high > low)
        first = tl.load(context_lens + sequence) - (end - start)
        position = first + token - start
        table = block_tables + row.to(tl.int64) * stride_table
        is_its = (token >= low) & (token < high) & has_tokens
        block = tl.load(table + position // SIZE, mask=is_its, other=-1).to(tl.int64)
        if tl.max(block, 0) >= 0:
            since = tl.load(of_head + begin + t)
            of_key = tl.load(of_head + 2 * stride + begin + t)
            blocks, begins = _blocks_that_begin(table, first + low - start, low, high, SIZE, ENTRIES)
            if tl.max(blocks, 0) >= 0:
                for first_v in range(0, DV, BLOCK_V):
                    _keep_states(
                        from_keys, (since, of_key), solved, before, blocks, begins - chunk * CHUNK, low - chunk * CHUNK,
                        t, k_at, (first_v + tl.arange(0, BLOCK_V))[None, :], NUM_VALUES, DK, DV, ENTRIES, RARE,
                    )  # fmt: skip
            # The decay since a block's first token: less that before the token, in this chunk; or in chunks before, and
            # in steps before.
            begin_of_own = token - position % SIZE
            is_before = is_its & (begin_of_own > low)
            before_it = tl.load(of_head + begin_of_own.to(tl.int64) - 1, mask=is_before, other=0.0)
            begin_of_low = low - (first + low - start) % SIZE
            past = begin_of_low + tl.arange(0, BLOCK_T)
            is_past = (past < low) & (past >= start)
            carry = tl.sum(tl.load(of_head + 4 * stride + past.to(tl.int64), mask=is_past, other=0.0), 0)
            source = tl.load(table + tl.maximum(first - 1, 0) // SIZE, mask=begin_of_low < start, other=-1)
            newest = source.to(tl.int64) * SIZE + (first - 1) % SIZE
            is_older = (begin_of_low < start) & (source >= 0)
            carry += tl.load(decays + newest * NUM_VALUES + head, mask=is_older, other=0.0)
            since_block = since - before_it + tl.where(begin_of_own < low, carry, 0.0)
            slot = block * SIZE + position % SIZE
            is_held = is_its & (block >= 0)
            tl.store(decays + slot * NUM_VALUES + head, since_block, mask=is_held)
            is_key = is_held[:, None] & (k_at < DK)
            key = tl.load(from_keys, mask=is_key, other=0.0)
            writes_keys = head % (NUM_VALUES // NUM_KEYS) == 0
            tl.store(keys + (slot[:, None] * NUM_KEYS + key_head) * DK + k_at, key, mask=is_key & writes_keys)
            for first_v in range(0, DV, BLOCK_V):
                v_at = (first_v + tl.arange(0, BLOCK_V))[None, :]
                is_value = is_held[:, None] & (v_at < DV)
                update = tl.load(solved + t[:, None] * (NUM_VALUES * DV) + v_at, mask=is_value, other=0.0)
                to = updates + (slot[:, None] * NUM_VALUES + head) * DV + v_at
                tl.store(to, update.to(tl.float32), mask=is_value)
