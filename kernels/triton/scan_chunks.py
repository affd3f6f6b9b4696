"""Many tokens of a sequence over states in blocks: the delta rule and state-space layers, in Triton.

Tokens are computed in chunks of the step's tokens. What depends on a chunk's inputs alone is computed for all chunks at
once, by `prepare_kernel`. Then `scan_kernel` goes through a sequence's chunks, with some value channels of a head's
state in registers. It cuts a chunk before the first token of a block that is held, so that it has this block's state.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.scan_decode import offsets, read_gates


@triton.jit
def _multiply(a, b, PRECISION: tl.constexpr):
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def inverse_of(a, t, PRECISION: tl.constexpr):
    """Return the inverse of 1 + a, where a [64, 64] is strictly lower triangular; t: 0 to 63.

    Two neighbouring blocks on the diagonal, whose inverse is n, and the block e below the first become one:
    (1 - n e) n. So from blocks of 2 to one of 64.
    """
    row, column = t[:, None], t[None, :]
    n = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a, 0.0))
    for level in range(1, 6):
        is_below = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        below = tl.dot(n, tl.where(is_below, a, 0.0), input_precision=PRECISION)
        n -= tl.dot(below, n, input_precision=PRECISION)
    return n


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_padded"])
def prepare_kernel(
    inputs, gates, rate, bias, rows, query_start, sequence_of, num_rows, num_tokens, num_padded,
    scalars, seen, inverse, least, most, stride_inputs, stride_gates,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for a chunk and a head: what each token sees of the others, and the equations of the updates, solved.

    scalars [4, Hv, padded tokens]: the decay since the first token of the sequence in the chunk, β or the step size,
    and the factors of key and query. seen, inverse [chunks, Hv, CHUNK, CHUNK]; inverse: of the delta rule's equations,
    columns times β.
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
    decay = tl.where(is_real, decay, 0.0)
    since = tl.sum(tl.where(is_past, decay[None, :], 0.0), 1)
    # Transposed, so that no layout is converted.
    since_of_row = tl.sum(
        tl.where((t[:, None] <= t[None, :]) & (sequence[:, None] == sequence[None, :]), decay[:, None], 0.0), 0
    )

    q_at, key_at, _ = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    mask = is_real[:, None] & (k_at < DK)
    key = tl.load(inputs + wide_token[:, None] * stride_inputs + key_at + k_at, mask=mask, other=0.0)
    query = tl.load(inputs + wide_token[:, None] * stride_inputs + q_at + k_at, mask=mask, other=0.0)
    of_key = tl.full([CHUNK], 1.0, tl.float32)
    of_query = of_key
    if DELTA:
        wide = key.to(tl.float32)
        of_key = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        wide = query.to(tl.float32)
        of_query = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * (DK**-0.5)
    between = tl.where(is_past, tl.exp(tl.where(is_past, since[:, None] - since_of_row[None, :], 0.0)), 0.0)
    between *= of_key[None, :]
    to = (chunk.to(tl.int64) * NUM_VALUES + head) * (CHUNK * CHUNK) + t[:, None] * CHUNK + t[None, :]
    result = _multiply(query, tl.trans(key), PRECISION) * between * of_query[:, None]
    tl.store(seen + to, result.to(seen.dtype.element_ty))
    if DELTA:
        similar = _multiply(key, tl.trans(key), PRECISION) * between * (beta * of_key)[:, None]
        result = inverse_of(tl.where(t[:, None] > t[None, :], similar, 0.0), t, PRECISION) * beta[None, :]
        result = tl.where(t[:, None] > t[None, :], result, 0.0)
        tl.store(inverse + to, result.to(inverse.dtype.element_ty))
    at = scalars + head.to(tl.int64) * num_padded + wide_token
    stride = num_padded.to(tl.int64) * NUM_VALUES
    tl.store(at, since)
    tl.store(at + stride, tl.where(is_real, beta, 0.0))
    tl.store(at + 2 * stride, of_key)
    tl.store(at + 3 * stride, of_query)


@triton.jit(do_not_specialize=["num_rows", "first_sequence", "num_padded"])
def scan_kernel(
    inputs, skip, scalars, seen, inverse, before, keys, updates, decays, out,
    block_tables, rows, query_start, context_lens, num_rows, first_sequence, num_padded, stride_inputs, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head of a sequence. ENTRIES: at most as many blocks begin in a chunk.

    A part is a chunk's tokens of the sequence from `low` on, up to `high`: up to the first token of a block that is
    held. So no block but that of its first token is held.
    """
    head, sequence = tl.program_id(0), tl.program_id(2) + first_sequence
    key_head = head // (NUM_VALUES // NUM_KEYS)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    context_len = tl.load(context_lens + sequence)
    is_real = (row < num_rows - 1) & (end > start)
    first = context_len - (end - start)  # position of the first token
    table = block_tables + row.to(tl.int64) * stride_table
    t = tl.arange(0, CHUNK)
    k_at = tl.arange(0, BLOCK_K)[None, :]
    v_at = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    is_k, is_v = k_at < DK, v_at < DV
    writes_decays = tl.program_id(1) == 0
    writes_keys = writes_decays & (head % (NUM_VALUES // NUM_KEYS) == 0)

    for begins in range(start, tl.where(is_real, start, end), CHUNK):  # padding
        padding = (begins + t).to(tl.int64)[:, None]
        zeros = tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty)
        tl.store(out + (padding * NUM_VALUES + head) * DV + v_at, zeros, mask=(padding < end) & is_v)

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
    carry = 0.0  # decay since the block's first token, of a block that began before the part
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
        added = _multiply(tl.trans(old_key * of_old[:, None]), old_update, PRECISION)
        state = tl.exp(since_old) * state + added
        carry = tl.where(num_old < SIZE, since_old, 0.0)

    q_at, key_at, value_at = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    stride = num_padded.to(tl.int64) * NUM_VALUES
    low, end = start, tl.where(is_real, end, start)
    while low < end:
        chunk, position = low // CHUNK, first + low - start
        index = position // SIZE
        block = tl.load(table + index).to(tl.int64)
        entry = index + 1 + tl.arange(0, ENTRIES)
        begin = low + entry * SIZE - position  # the token with which this entry's block begins
        high = tl.minimum(end, chunk * CHUNK + CHUNK)
        is_cut = tl.load(table + entry, mask=begin < high, other=-1) >= 0
        high = tl.minimum(high, tl.min(tl.where(is_cut, begin, high), 0))

        token = chunk * CHUNK + t
        is_own = (token >= low) & (token < high)
        wide_token = token.to(tl.int64)
        at = scalars + head.to(tl.int64) * num_padded + wide_token
        since, beta = tl.load(at), tl.load(at + stride)
        of_key, of_query = tl.load(at + 2 * stride), tl.load(at + 3 * stride)
        from_step = inputs + wide_token[:, None] * stride_inputs
        key = tl.load(from_step + key_at + k_at, mask=is_own[:, None] & is_k, other=0.0)
        query = tl.load(from_step + q_at + k_at, mask=is_own[:, None] & is_k, other=0.0)
        value = tl.load(from_step + value_at + v_at, mask=is_own[:, None] & is_v, other=0.0).to(tl.float32)
        matrix = (chunk * NUM_VALUES + head.to(tl.int64)) * (CHUNK * CHUNK) + t[:, None] * CHUNK + t[None, :]
        sees = tl.load(seen + matrix)

        base = tl.sum(tl.where((token == low - 1) & (low > start), since, 0.0), 0)
        since = tl.where(is_own, since - base, 0.0)
        total = tl.sum(tl.where(token == high - 1, since, 0.0), 0)
        shrunk = tl.exp(since)
        if DELTA:
            known = _multiply(key, state, PRECISION) * (shrunk * of_key)[:, None]
            wanted = tl.where(is_own[:, None], value - known, 0.0)
            update = beta[:, None] * wanted + _multiply(tl.load(inverse + matrix), wanted, PRECISION)
            update = tl.where(is_own[:, None], update, 0.0)
        else:
            update = value * beta[:, None]
        output = _multiply(query, state, PRECISION) * (shrunk * of_query)[:, None]
        output += _multiply(sees, update, PRECISION)
        if not DELTA:
            output += tl.load(skip + head) * value
        to = out + (wide_token[:, None] * NUM_VALUES + head) * DV + v_at
        tl.store(to, output.to(out.dtype.element_ty), mask=is_own[:, None] & is_v)

        if block >= 0:
            is_first = position % SIZE == 0
            tl.store(before + block * (NUM_VALUES * DK * DV) + at_state, state, mask=is_state & is_first)
            in_block = position % SIZE + token - low
            is_in = is_own & (in_block < SIZE)
            slot = block * SIZE + in_block
            at_key = keys + (slot[:, None] * NUM_KEYS + key_head) * DK + k_at
            tl.store(at_key, key, mask=is_in[:, None] & is_k & writes_keys)
            at_update = updates + (slot[:, None] * NUM_VALUES + head) * DV + v_at
            tl.store(at_update, update, mask=is_in[:, None] & is_v)
            tl.store(decays + slot * NUM_VALUES + head, since + carry, mask=is_in & writes_decays)
        carry = tl.where((position + high - low) // SIZE == index, carry + total, 0.0)
        weights = tl.where(is_own, tl.exp(total - since) * of_key, 0.0)
        state = tl.exp(total) * state + _multiply(tl.trans(key), update * weights[:, None], PRECISION)
        low = high
