"""One token of each sequence over states in blocks: the delta rule and state-space layers, in Triton.

A program reads some value channels of a head's state once, with what the block's tokens have changed, and writes only
what its own token changes. The first token of a block also writes the state before it.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def offsets(
    head, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr
):  # fmt: skip
    """Return the first indices of a head's query, key and value in a token's inputs."""
    key_head = head // (NUM_VALUES // NUM_KEYS)
    if DELTA:
        return key_head * DK, (NUM_KEYS + key_head) * DK, 2 * NUM_KEYS * DK + head * DV
    return NUM_VALUES * DV + (NUM_KEYS + key_head) * DK, NUM_VALUES * DV + key_head * DK, head * DV


@triton.jit
def read_gates(
    gates, rate, bias, head, mask, least, most, NUM_VALUES: tl.constexpr, DELTA: tl.constexpr
):  # fmt: skip
    """Return β, or for state-space layers the step size, and the logarithm of the decay, of tokens' gates."""
    if DELTA:
        beta = tl.load(gates + head, mask=mask, other=0.0).to(tl.float32)
        beta = (1 / (1 + tl.exp(-beta))).to(gates.dtype.element_ty).to(tl.float32)
        step = tl.load(gates + NUM_VALUES + head, mask=mask, other=0.0).to(tl.float32)
        return beta, -tl.load(rate + head) * softplus(step + tl.load(bias + head))
    step = tl.load(gates + head, mask=mask, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step + tl.load(bias + head)), least), most)
    return step, -tl.load(rate + head) * step


@triton.jit
def _decode_head(
    head, inputs, gates, rate, bias, skip, before, keys, updates, decays, out,
    sequence, start, position, source_index, source, target, is_real, least, most, stride_inputs, stride_gates,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_V value channels of a head of a sequence. The state is loaded before all that waits."""
    key_head = head // (NUM_VALUES // NUM_KEYS)
    is_first = position % SIZE == 0  # of its block
    num_old = position - source_index * SIZE

    t, k_at = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    v_at = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = (k_at < DK) & is_real, (v_at < DV) & is_real
    at_state = head.to(tl.int64) * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
    is_state = is_k[:, None] & is_v[None, :]
    state = tl.load(before + source * (NUM_VALUES * DK * DV) + at_state, mask=is_state & (source_index > 0), other=0.0)
    state = state.to(tl.float32)

    # Tokens of this block before; none, if it is the first.
    is_old, slot = (t < num_old) & is_real & (not is_first), source * SIZE + t
    old_keys = tl.load(
        keys + (slot[:, None] * NUM_KEYS + key_head) * DK + k_at[None, :],
        mask=is_old[:, None] & is_k[None, :],
        other=0.0,
    ).to(tl.float32)
    old_updates = tl.load(
        updates + (slot[:, None] * NUM_VALUES + head) * DV + v_at[None, :],
        mask=is_old[:, None] & is_v[None, :],
        other=0.0,
    )
    old_decays = tl.load(decays + slot * NUM_VALUES + head, mask=is_old, other=0.0)
    newest = source * SIZE + num_old - 1
    since = tl.load(decays + newest * NUM_VALUES + head, mask=is_real & (num_old > 0), other=0.0)

    q_at, key_at, value_at = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)
    step = inputs + start.to(tl.int64) * stride_inputs
    new_key = tl.load(step + key_at + k_at, mask=is_k, other=0.0)
    query = tl.load(step + q_at + k_at, mask=is_k, other=0.0).to(tl.float32)
    value = tl.load(step + value_at + v_at, mask=is_v, other=0.0).to(tl.float32)
    beta, decay = read_gates(
        gates + start.to(tl.int64) * stride_gates, rate, bias, head, is_real, least, most, NUM_VALUES, DELTA
    )
    key = new_key.to(tl.float32)
    if DELTA:
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (DK**-0.5)
        old_keys *= tl.rsqrt(tl.sum(old_keys * old_keys, 1) + 1e-6)[:, None]

    if is_first & (position > 0):  # the block before is full
        state *= tl.exp(since)
        for i in range(SIZE):
            at = source * SIZE + i
            past = tl.load(keys + (at * NUM_KEYS + key_head) * DK + k_at, mask=is_k, other=0.0).to(tl.float32)
            if DELTA:
                past *= tl.rsqrt(tl.sum(past * past, 0) + 1e-6)
            left = tl.exp(since - tl.load(decays + at * NUM_VALUES + head, mask=is_real, other=0.0))
            update = tl.load(updates + (at * NUM_VALUES + head) * DV + v_at, mask=is_v, other=0.0)
            state += (past * left)[:, None] * update[None, :]
    tl.store(before + target * (NUM_VALUES * DK * DV) + at_state, state, mask=is_state & is_first & (target >= 0))

    decay += tl.where(is_first, 0.0, since)
    weights = tl.where(is_old, tl.exp(tl.minimum(decay - old_decays, 0.0)), 0.0)
    shrunk = tl.exp(decay)
    seen = tl.sum(old_keys * query[None, :], 1) * weights
    output = shrunk * tl.sum(state * query[:, None], 0) + tl.sum(old_updates * seen[:, None], 0)
    if DELTA:
        similar = tl.sum(old_keys * key[None, :], 1) * weights
        known = shrunk * tl.sum(state * key[:, None], 0) + tl.sum(old_updates * similar[:, None], 0)
        update = beta * (value - known)
    else:
        update = beta * value
        output += tl.load(skip + head) * value
    output += tl.sum(key * query, 0) * update
    token = tl.where(is_real, start, sequence).to(tl.int64)
    to = out + (token * NUM_VALUES + head) * DV + v_at
    tl.store(to, output.to(out.dtype.element_ty), mask=v_at < DV)

    slot_of_new = target * SIZE + position % SIZE
    is_held = is_real & (target >= 0)
    writes_keys = (tl.program_id(1) == 0) & (head % (NUM_VALUES // NUM_KEYS) == 0)
    tl.store(keys + (slot_of_new * NUM_KEYS + key_head) * DK + k_at, new_key, mask=is_k & (is_held & writes_keys))
    tl.store(updates + (slot_of_new * NUM_VALUES + head) * DV + v_at, update, mask=is_v & is_held)
    tl.store(decays + slot_of_new * NUM_VALUES + head, decay, mask=is_held & (tl.program_id(1) == 0))


@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    inputs, gates, rate, bias, skip, before, keys, updates, decays, out,
    block_tables, rows, query_start, context_lens, num_rows, least, most, stride_inputs, stride_gates, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of HEADS heads of a sequence. With several heads, the state of the next
    ones is loaded while one is computed.
    """
    sequence = tl.program_id(2)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    is_real = (row < num_rows - 1) & (tl.load(query_start + sequence + 1) > start)
    position = tl.where(is_real, tl.load(context_lens + sequence) - 1, 0)
    table = block_tables + row.to(tl.int64) * stride_table
    source_index = tl.maximum(position - 1, 0) // SIZE
    source = tl.load(table + source_index, mask=is_real, other=0).to(tl.int64)
    target = tl.load(table + position // SIZE, mask=is_real, other=-1).to(tl.int64)
    if HEADS == 1:
        _decode_head(
            tl.program_id(0), inputs, gates, rate, bias, skip, before, keys, updates, decays, out,
            sequence, start, position, source_index, source, target, is_real, least, most, stride_inputs, stride_gates,
            NUM_KEYS, NUM_VALUES, DK, DV, SIZE, DELTA, BLOCK_T, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    else:
        for i in tl.range(HEADS, num_stages=STAGES):
            _decode_head(
                tl.program_id(0) * HEADS + i, inputs, gates, rate, bias, skip, before, keys, updates, decays, out,
                sequence, start, position, source_index, source, target, is_real, least, most, stride_inputs,
                stride_gates, NUM_KEYS, NUM_VALUES, DK, DV, SIZE, DELTA, BLOCK_T, BLOCK_K, BLOCK_V,
            )  # fmt: skip
