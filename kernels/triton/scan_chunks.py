"""Many tokens of a sequence over states in blocks: the delta rule and state-space layers, in Triton.

Tokens are computed in chunks of the step's tokens. What depends on a chunk's inputs alone is computed for all chunks at
once: `prepare_kernel`, and for the delta rule `solve_kernel`. Then `scan_kernel` goes through a sequence's chunks, with
some value channels of a head's state in registers.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.codes import INTERPRETED
from kernels.triton.delta_rule import _inverse
from kernels.triton.scan_decode import offsets, read_gates


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """a b in float32; "bf16": of operands that are rounded to it."""
    if PRECISION != "bf16":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    elif INTERPRETED:  # it multiplies no bfloat16
        a, b = a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)
        result = tl.dot(a, b, input_precision="ieee")
    else:
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    return result


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_padded"])
def prepare_kernel(
    inputs, gates, rate, bias, rows, query_start, sequence_of, num_rows, num_tokens, num_padded,
    scalars, seen, similar, least, most, stride_inputs, stride_gates,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for a chunk and a head: what each token sees of the others, and how similar their keys are.

    scalars [4, Hv, padded tokens]: the decay since the first token of the sequence in the chunk, β or the step size,
    and the factors of key and query. seen, similar [chunks, Hv, CHUNK, CHUNK].
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
    result = _dot(query, tl.trans(key), PRECISION) * between * of_query[:, None]
    tl.store(seen + to, result.to(seen.dtype.element_ty))
    if DELTA:
        result = _dot(key, tl.trans(key), PRECISION) * between * (beta * of_key)[:, None]
        tl.store(similar + to, tl.where(t[:, None] > t[None, :], result, 0.0))
    at = scalars + head.to(tl.int64) * num_padded + wide_token
    stride = num_padded.to(tl.int64) * NUM_VALUES
    tl.store(at, since)
    tl.store(at + stride, tl.where(is_real, beta, 0.0))
    tl.store(at + 2 * stride, of_key)
    tl.store(at + 3 * stride, of_query)


@triton.jit
def _block(matrix, i, j, CHUNK: tl.constexpr):
    """Load block i, j of a matrix in blocks of 16."""
    t = tl.arange(0, 16)
    return tl.load(matrix + (i * 16 + t[:, None]) * CHUNK + j * 16 + t[None, :])


@triton.jit
def _store_block(matrix, value, beta, i, j, CHUNK: tl.constexpr):
    """Store block i, j, with its columns times β."""
    t = tl.arange(0, 16)
    value *= tl.load(beta + j * 16 + t)[None, :]
    tl.store(matrix + (i * 16 + t[:, None]) * CHUNK + j * 16 + t[None, :], value.to(matrix.dtype.element_ty))


@triton.jit(do_not_specialize=["num_padded"])
def solve_kernel(
    similar, scalars, inverse, num_padded, NUM_VALUES: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Invert 1 + similar [64, 64], lower triangular, of a chunk and a head, by blocks of 16; columns times β."""
    tl.static_assert(CHUNK == 64)
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = (chunk * NUM_VALUES + head) * (CHUNK * CHUNK)
    a, to = similar + at, inverse + at
    beta = scalars + (NUM_VALUES + head) * num_padded + chunk * CHUNK
    t = tl.arange(0, 16)
    n0 = _inverse(_block(a, 0, 0, CHUNK), t, 1, EXACT)
    n1 = _inverse(_block(a, 1, 1, CHUNK), t, 1, EXACT)
    n2 = _inverse(_block(a, 2, 2, CHUNK), t, 1, EXACT)
    n3 = _inverse(_block(a, 3, 3, CHUNK), t, 1, EXACT)
    zero = tl.zeros([16, 16], tl.float32)
    _store_block(to, n0, beta, 0, 0, CHUNK)
    _store_block(to, n1, beta, 1, 1, CHUNK)
    _store_block(to, n2, beta, 2, 2, CHUNK)
    _store_block(to, n3, beta, 3, 3, CHUNK)
    for i in tl.static_range(3):
        for j in tl.static_range(3 - i):
            _store_block(to, zero, beta, i, i + 1 + j, CHUNK)
    a10, a20, a30 = _block(a, 1, 0, CHUNK), _block(a, 2, 0, CHUNK), _block(a, 3, 0, CHUNK)
    a21, a31, a32 = _block(a, 2, 1, CHUNK), _block(a, 3, 1, CHUNK), _block(a, 3, 2, CHUNK)
    n10 = -tl.dot(n1, tl.dot(a10, n0, input_precision=EXACT), input_precision=EXACT)
    n21 = -tl.dot(n2, tl.dot(a21, n1, input_precision=EXACT), input_precision=EXACT)
    n32 = -tl.dot(n3, tl.dot(a32, n2, input_precision=EXACT), input_precision=EXACT)
    _store_block(to, n10, beta, 1, 0, CHUNK)
    _store_block(to, n21, beta, 2, 1, CHUNK)
    _store_block(to, n32, beta, 3, 2, CHUNK)
    n20 = tl.dot(a20, n0, input_precision=EXACT) + tl.dot(a21, n10, input_precision=EXACT)
    n20 = -tl.dot(n2, n20, input_precision=EXACT)
    n31 = tl.dot(a31, n1, input_precision=EXACT) + tl.dot(a32, n21, input_precision=EXACT)
    n31 = -tl.dot(n3, n31, input_precision=EXACT)
    _store_block(to, n20, beta, 2, 0, CHUNK)
    _store_block(to, n31, beta, 3, 1, CHUNK)
    n30 = tl.dot(a30, n0, input_precision=EXACT) + tl.dot(a31, n10, input_precision=EXACT)
    n30 += tl.dot(a32, n20, input_precision=EXACT)
    _store_block(to, -tl.dot(n3, n30, input_precision=EXACT), beta, 3, 0, CHUNK)


@triton.jit(do_not_specialize=["num_rows", "first_sequence", "num_padded"])
def scan_kernel(
    inputs, skip, scalars, seen, inverse, before, keys, updates, decays, out,
    block_tables, rows, query_start, context_lens, num_rows, first_sequence, num_padded, stride_inputs, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr, ENTRIES: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head of a sequence. BLOCKS: most blocks that a chunk touches."""
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
    carry = 0.0  # decay since the block's first token, of a block that began before the chunk
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
        added = tl.dot(tl.trans(old_key * of_old[:, None]), old_update, input_precision=EXACT)
        state = tl.exp(since_old) * state + added
        carry = tl.where(num_old < SIZE, since_old, 0.0)

    q_at, key_at, value_at = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    stride = num_padded.to(tl.int64) * NUM_VALUES
    for chunk in range(start // CHUNK, tl.where(is_real, (end + CHUNK - 1) // CHUNK, 0)):
        token = chunk * CHUNK + t
        is_own = (token >= start) & (token < end)
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
        shrunk = tl.exp(since)
        if DELTA:
            known = _dot(key, state, PRECISION) * (shrunk * of_key)[:, None]
            wanted = tl.where(is_own[:, None], value - known, 0.0)
            update = _dot(tl.load(inverse + matrix), wanted, PRECISION)
        else:
            update = value * beta[:, None]
        output = _dot(query, state, PRECISION) * (shrunk * of_query)[:, None] + _dot(sees, update, PRECISION)
        if not DELTA:
            output += tl.load(skip + head) * value
        to = out + (wide_token[:, None] * NUM_VALUES + head) * DV + v_at
        tl.store(to, output.to(out.dtype.element_ty), mask=is_own[:, None] & is_v)

        last = tl.minimum(end, chunk * CHUNK + CHUNK) - 1 - chunk * CHUNK
        t0 = tl.maximum(start - chunk * CHUNK, 0)
        p0 = first + chunk * CHUNK + t0 - start  # position of the first own token
        position = p0 + t - t0
        total = tl.sum(tl.where(t == last, since, 0.0), 0)
        entry = tl.arange(0, ENTRIES)
        entries = tl.load(table + p0 // SIZE + entry, mask=p0 // SIZE + entry <= (p0 + last - t0) // SIZE, other=-1)
        if tl.max(entries, 0) >= 0:  # blocks whose states are kept
            for j in tl.static_range(BLOCKS):
                block = tl.sum(tl.where(entry == j, entries, 0), 0).to(tl.int64)
                if block >= 0:
                    begin = (p0 // SIZE + j) * SIZE
                    tb = t0 + begin - p0  # its first token
                    base = tl.sum(tl.where((t == tb - 1) & (tb > t0), since, 0.0), 0)
                    if (tb >= t0) & (tb <= last):
                        weights = tl.where(is_own & (t < tb), tl.exp(tl.minimum(base - since, 0.0)) * of_key, 0.0)
                        there = tl.exp(base) * state + _dot(tl.trans(key), update * weights[:, None], PRECISION)
                        tl.store(before + block * (NUM_VALUES * DK * DV) + at_state, there, mask=is_state)
                    is_in = is_own & (position >= begin) & (position < begin + SIZE)
                    slot = block * SIZE + position - begin
                    tl.store(
                        keys + (slot[:, None] * NUM_KEYS + key_head) * DK + k_at,
                        key,
                        mask=is_in[:, None] & is_k & writes_keys,
                    )
                    tl.store(
                        updates + (slot[:, None] * NUM_VALUES + head) * DV + v_at, update, mask=is_in[:, None] & is_v
                    )
                    of_block = since - base + tl.where(tb < t0, carry, 0.0)
                    tl.store(decays + slot * NUM_VALUES + head, of_block, mask=is_in & writes_decays)
        next_begin = (p0 + last - t0 + 1) // SIZE * SIZE
        tb = t0 + next_begin - p0
        left = total - tl.sum(tl.where((t == tb - 1) & (tb > t0), since, 0.0), 0)
        carry = tl.where(tb > last, 0.0, left + tl.where(tb < t0, carry, 0.0))
        weights = tl.where(is_own, tl.exp(tl.minimum(total - since, 0.0)) * of_key, 0.0)
        state = tl.exp(total) * state + _dot(tl.trans(key), update * weights[:, None], PRECISION)
