"""Many tokens of a sequence over states in blocks: the delta rule and state-space layers in three kernels, in Triton.

Only what must go from one chunk of tokens to the next does: two matrix multiplications a chunk for the delta rule, one
for a state-space layer, in `states_kernel`. What comes before, in `solve_kernel`, and after, in `outputs_kernel`, is
computed for all chunks at once. A delta rule's updates δ are linear in the state S before the chunk:

    δ = u - w S,  u = T β v,  w = T β e^c k,  T = (1 + tril(β k kᵀ e^(c - c'), -1))⁻¹,  c: the decay since its start.

Of this form are the kernels of Songlin Yang et al., Gated Delta Networks, https://arxiv.org/abs/2412.06464.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.scan_decode import offsets, read_gates


@triton.jit
def _multiply(a, b, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(TYPE), b.to(TYPE), input_precision=PRECISION)


@triton.jit
def _inverse_of(a, t, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + a, where a [64, 64] is strictly lower triangular; t: 0 to 63.

    Two neighbouring blocks on the diagonal, whose inverse is n, and the block e below the first become one:
    (1 - n e) n. So from blocks of 2 to one of 64. Float16 keeps as many digits as tf32. No inverse of a delta rule's
    leaves its range: an entry, (β k)ᵀ (1 - β' k' k'ᵀ) ... k'' times decays, is at most 1.
    """
    row, column = t[:, None], t[None, :]
    n = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a, 0.0))
    for level in range(1, 6):
        is_below = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        narrow = n.to(TYPE)
        below = tl.dot(narrow, tl.where(is_below, a, 0.0).to(TYPE), input_precision=PRECISION)
        n -= tl.dot(below.to(TYPE), narrow, input_precision=PRECISION)
    return n


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_padded"])
def solve_kernel(
    inputs, gates, rate, bias, rows, query_start, sequence_of, num_rows, num_tokens, num_padded,
    scalars, seen, weights, solved, least, most, stride_inputs, stride_gates,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, EQUATIONS: tl.constexpr,
):  # fmt: skip
    """One program for a chunk and a head.

    scalars [5, Hv, padded tokens] float32: the decay since the first token of the sequence in the chunk, β or the step
    size, the factors of key and query, and the token's own decay. seen [chunks, Hv, CHUNK, CHUNK]: what each token sees
    of the others' updates. weights [T, Hv, DK]: w; solved [T, Hv, DV]: u, or of a state-space layer the updates.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, k_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)[None, :]
    token = chunk * CHUNK + t
    is_token = token < num_tokens
    sequence = tl.load(sequence_of + token, mask=is_token, other=0)
    row = tl.load(rows + sequence)
    is_real = is_token & (row < num_rows - 1)
    is_real = is_real & (token >= tl.load(query_start + sequence)) & (token < tl.load(query_start + sequence + 1))
    sequence = tl.where(is_real, sequence, -1)
    is_past = (sequence[:, None] == sequence[None, :]) & is_real[:, None] & (t[:, None] >= t[None, :])
    wide_token = token.to(tl.int64)
    beta, decay = read_gates(
        gates + wide_token * stride_gates, rate, bias, head, is_real, least, most, NUM_VALUES, DELTA
    )
    beta, decay = tl.where(is_real, beta, 0.0), tl.where(is_real, decay, 0.0)
    since = tl.sum(tl.where(is_past, decay[None, :], 0.0), 1)
    # Transposed, so that no layout is converted.
    since_of_row = tl.sum(
        tl.where((t[:, None] <= t[None, :]) & (sequence[:, None] == sequence[None, :]), decay[:, None], 0.0), 0
    )
    q_at, key_at, value_at = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    mask = is_real[:, None] & (k_at < DK)
    from_step = inputs + wide_token[:, None] * stride_inputs
    key = tl.load(from_step + key_at + k_at, mask=mask, other=0.0)
    query = tl.load(from_step + q_at + k_at, mask=mask, other=0.0)
    of_key = tl.full([CHUNK], 1.0, tl.float32)
    of_query = of_key
    if DELTA:
        wide = key.to(tl.float32)
        of_key = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        wide = query.to(tl.float32)
        of_query = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * (DK**-0.5)
    between = tl.where(is_past, tl.exp(tl.where(is_past, since[:, None] - since_of_row[None, :], 0.0)), 0.0)
    between *= of_key[None, :]
    at_matrix = (chunk.to(tl.int64) * NUM_VALUES + head) * (CHUNK * CHUNK) + t[:, None] * CHUNK + t[None, :]
    result = _multiply(query, tl.trans(key), TYPE, PRECISION) * between * of_query[:, None]
    tl.store(seen + at_matrix, result.to(seen.dtype.element_ty))
    inverse = between  # of no use without the delta rule
    if DELTA:
        similar = _multiply(key, tl.trans(key), TYPE, PRECISION) * between * (beta * of_key)[:, None]
        inverse = _inverse_of(tl.where(t[:, None] > t[None, :], similar, 0.0), t, EQUATIONS, EXACT) * beta[None, :]
        shrunk_key = key.to(tl.float32) * (tl.exp(since) * of_key)[:, None]
        result = _multiply(inverse, shrunk_key, TYPE, PRECISION)
        to = weights + (wide_token[:, None] * NUM_VALUES + head) * DK + k_at
        tl.store(to, result.to(weights.dtype.element_ty), mask=is_token[:, None] & (k_at < DK))
    for first in range(0, DV, BLOCK_V):
        v_at = (first + tl.arange(0, BLOCK_V))[None, :]
        value = tl.load(from_step + value_at + v_at, mask=is_real[:, None] & (v_at < DV), other=0.0)
        if DELTA:
            update = _multiply(inverse, value, TYPE, PRECISION)
        else:
            update = value.to(tl.float32) * beta[:, None]
        to_update = solved + (wide_token[:, None] * NUM_VALUES + head) * DV + v_at
        tl.store(to_update, update.to(solved.dtype.element_ty), mask=is_token[:, None] & (v_at < DV))
    at = scalars + head.to(tl.int64) * num_padded + wide_token
    stride = num_padded.to(tl.int64) * NUM_VALUES
    tl.store(at, since)
    tl.store(at + stride, beta)
    tl.store(at + 2 * stride, of_key)
    tl.store(at + 3 * stride, of_query)
    tl.store(at + 4 * stride, decay)


@triton.jit(do_not_specialize=["num_rows", "first_sequence", "num_padded"])
def states_kernel(
    inputs, scalars, weights, solved, starts, before, keys, updates, decays,
    block_tables, rows, query_start, context_lens, num_rows, first_sequence, num_padded, stride_inputs, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, RARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head of a sequence. ENTRIES: at most as many blocks begin in a chunk.

    RARE: precision of products in branches, whose factors are float32.

    starts [chunks + sequences, Hv, DK, DV]: the state before what a chunk has of a sequence, at the sum of both
    indices; sequences count from the first that is not a decode. `solved` becomes the updates.
    """
    head, sequence = tl.program_id(0), tl.program_id(2) + first_sequence
    key_head = head // (NUM_VALUES // NUM_KEYS)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    is_real = (row < num_rows - 1) & (end > start)
    first = tl.load(context_lens + sequence) - (end - start)  # position of the first token
    table = block_tables + row.to(tl.int64) * stride_table
    t = tl.arange(0, CHUNK)
    k_at = tl.arange(0, BLOCK_K)[None, :]
    v_at = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    is_k, is_v = k_at < DK, v_at < DV

    source_index = tl.maximum(first - 1, 0) // SIZE
    num_old = tl.where(is_real, first - source_index * SIZE, 0)
    source = tl.load(table + source_index, mask=num_old > 0, other=0).to(tl.int64)
    at_state = head.to(tl.int64) * (DK * DV) + tl.trans(k_at) * DV + v_at  # [K, V]
    is_state = tl.trans(is_k) & is_v
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
        added = _multiply(tl.trans(old_key * of_old[:, None]), old_update, tl.float32, RARE)
        state = tl.exp(since_old) * state + added

    _, key_at, _ = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    stride = num_padded.to(tl.int64) * NUM_VALUES
    end = tl.where(is_real, end, start // CHUNK * CHUNK)
    for chunk in tl.range(start // CHUNK, tl.cdiv(end, CHUNK), num_stages=STAGES):
        low, high = tl.maximum(start, chunk * CHUNK), tl.minimum(end, chunk * CHUNK + CHUNK)
        token = chunk * CHUNK + t
        is_own = (token >= low) & (token < high)
        wide_token = token.to(tl.int64)
        at = scalars + head.to(tl.int64) * num_padded + wide_token
        since, of_key = tl.load(at), tl.load(at + 2 * stride)
        from_keys = inputs + wide_token[:, None] * stride_inputs + key_at + k_at
        key = tl.load(from_keys, mask=is_own[:, None] & is_k, other=0.0)
        at_update = solved + (wide_token[:, None] * NUM_VALUES + head) * DV + v_at
        update = tl.load(at_update, mask=is_own[:, None] & is_v, other=0.0).to(tl.float32)
        part = (chunk + tl.program_id(2)).to(tl.int64)
        at_start = starts + part * (NUM_VALUES * DK * DV) + at_state
        tl.store(at_start, state.to(starts.dtype.element_ty), mask=is_state)
        if DELTA:
            weight = tl.load(
                weights + (wide_token[:, None] * NUM_VALUES + head) * DK + k_at,
                mask=is_own[:, None] & is_k,
                other=0.0,
            )
            update -= _multiply(weight, state, TYPE, PRECISION)
            tl.store(at_update, update.to(solved.dtype.element_ty), mask=is_own[:, None] & is_v)

        position = first + low - start
        index = (position + SIZE - 1) // SIZE + tl.arange(0, ENTRIES)  # of the blocks that may begin in the chunk
        begin = low + index * SIZE - position
        blocks = tl.load(table + index, mask=begin < high, other=-1)
        if tl.max(blocks, 0) >= 0:
            # Loaded again: before a branch the copy for a later chunk begins, into the memory of `key` (Triton 3.6).
            own_key = tl.load(from_keys, mask=is_own[:, None] & is_k, other=0.0)
            for entry in range(ENTRIES):
                block = tl.sum(tl.where(tl.arange(0, ENTRIES) == entry, blocks, 0), 0).to(tl.int64)
                if block >= 0:
                    cut = low + ((position + SIZE - 1) // SIZE + entry) * SIZE - position
                    to_cut = tl.sum(tl.where((token == cut - 1) & is_own, since, 0.0), 0)
                    of_past = tl.where(is_own & (token < cut), tl.exp(tl.minimum(to_cut - since, 0.0)) * of_key, 0.0)
                    then = tl.exp(to_cut) * state
                    then += _multiply(tl.trans(own_key), update * of_past[:, None], tl.float32, RARE)
                    tl.store(before + block * (NUM_VALUES * DK * DV) + at_state, then, mask=is_state)

        total = tl.sum(tl.where(token == high - 1, since, 0.0), 0)
        left = tl.where(is_own, tl.exp(tl.minimum(total - since, 0.0)) * of_key, 0.0)
        state = tl.exp(total) * state + _multiply(tl.trans(key), update * left[:, None], TYPE, PRECISION)


@triton.jit(do_not_specialize=["num_rows", "first_sequence", "num_tokens", "num_padded"])
def outputs_kernel(
    inputs, skip, scalars, seen, solved, starts, keys, updates, decays, out,
    block_tables, rows, query_start, context_lens, sequence_of, num_rows, first_sequence, num_tokens, num_padded,
    stride_inputs, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head and a chunk. Also stores keys, updates and decays of tokens in
    blocks that are held.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    t, k_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)[None, :]
    v_at = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    is_k, is_v = k_at < DK, v_at < DV
    token = chunk * CHUNK + t
    is_token = token < num_tokens
    sequences = tl.load(sequence_of + token, mask=is_token, other=0)
    is_own = is_token & (sequences >= first_sequence)
    wide_token = token.to(tl.int64)
    stride = num_padded.to(tl.int64) * NUM_VALUES
    at = scalars + head.to(tl.int64) * num_padded + wide_token
    since, of_query = tl.load(at), tl.load(at + 3 * stride)
    q_at, key_at, value_at = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    from_step = inputs + wide_token[:, None] * stride_inputs
    query = tl.load(from_step + q_at + k_at, mask=is_own[:, None] & is_k, other=0.0).to(tl.float32)
    query *= (tl.exp(since) * of_query)[:, None]
    update = tl.load(
        solved + (wide_token[:, None] * NUM_VALUES + head) * DV + v_at, mask=is_own[:, None] & is_v, other=0.0
    )
    matrix = (chunk.to(tl.int64) * NUM_VALUES + head) * (CHUNK * CHUNK) + t[:, None] * CHUNK + t[None, :]
    output = _multiply(tl.load(seen + matrix), update, TYPE, PRECISION)
    if not DELTA:
        value = tl.load(from_step + value_at + v_at, mask=is_own[:, None] & is_v, other=0.0)
        output += tl.load(skip + head) * value.to(tl.float32)
    is_real = is_own & (t < 0)
    last_token = tl.minimum(chunk * CHUNK + CHUNK, num_tokens) - 1
    last_sequence = tl.load(sequence_of + last_token)
    for sequence in range(tl.maximum(tl.load(sequence_of + chunk * CHUNK), first_sequence), last_sequence + 1):
        row = tl.load(rows + sequence)
        start = tl.load(query_start + sequence)
        end = tl.load(query_start + sequence + 1)
        low, high = tl.maximum(start, chunk * CHUNK), tl.minimum(end, chunk * CHUNK + CHUNK)
        has_tokens = (row < num_rows - 1) & (high > low)
        is_its = (token >= low) & (token < high) & has_tokens
        is_real = is_real | is_its
        at_state = head.to(tl.int64) * (DK * DV) + tl.trans(k_at) * DV + v_at  # [K, V]
        part = (chunk + sequence - first_sequence).to(tl.int64)
        at_start = starts + part * (NUM_VALUES * DK * DV) + at_state
        state = tl.load(at_start, mask=tl.trans(is_k) & is_v & has_tokens, other=0.0)
        # Not in the branch: there products of 16 bits were wrong on an H200 with Triton 3.6.
        output += _multiply(tl.where(is_its[:, None], query, 0.0), state, TYPE, PRECISION)
        if has_tokens:
            first = tl.load(context_lens + sequence) - (end - start)
            position = first + token - start
            table = block_tables + row.to(tl.int64) * stride_table
            block = tl.load(table + position // SIZE, mask=is_its, other=-1).to(tl.int64)
            if tl.max(block, 0) >= 0:
                # The decay since a block's first token: less that before the token, in this chunk; or in chunks before,
                # and in steps before.
                begin = token - position % SIZE
                is_before = is_its & (begin > low)
                before_it = tl.load(
                    scalars + head.to(tl.int64) * num_padded + begin.to(tl.int64) - 1, mask=is_before, other=0.0
                )
                o, begin_of_low = tl.arange(0, BLOCK_T), low - (first + low - start) % SIZE
                past = begin_of_low + o
                is_past = (past < low) & (past >= start)
                own_decay = scalars + 4 * stride + head.to(tl.int64) * num_padded + past.to(tl.int64)
                carry = tl.sum(tl.load(own_decay, mask=is_past, other=0.0), 0)
                source = tl.load(table + tl.maximum(first - 1, 0) // SIZE, mask=begin_of_low < start, other=-1)
                newest = source.to(tl.int64) * SIZE + (first - 1) % SIZE
                carry += tl.load(
                    decays + newest * NUM_VALUES + head, mask=(begin_of_low < start) & (source >= 0), other=0.0
                )
                since_block = since - before_it + tl.where(begin < low, carry, 0.0)
                slot = block * SIZE + position % SIZE
                is_held = is_its & (block >= 0)
                key = tl.load(from_step + key_at + k_at, mask=is_held[:, None] & is_k, other=0.0)
                writes_decays = tl.program_id(2) == 0
                writes_keys = writes_decays & (head % (NUM_VALUES // NUM_KEYS) == 0)
                at_key = keys + (slot[:, None] * NUM_KEYS + key_head) * DK + k_at
                tl.store(at_key, key, mask=is_held[:, None] & is_k & writes_keys)
                at_update = updates + (slot[:, None] * NUM_VALUES + head) * DV + v_at
                tl.store(at_update, update.to(tl.float32), mask=is_held[:, None] & is_v)
                tl.store(decays + slot * NUM_VALUES + head, since_block, mask=is_held & writes_decays)
    output = tl.where(is_real[:, None], output, 0.0)
    to = out + (wide_token[:, None] * NUM_VALUES + head) * DV + v_at
    tl.store(to, output.to(out.dtype.element_ty), mask=is_own[:, None] & is_v)
