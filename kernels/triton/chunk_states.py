"""Equations within chunks of a prompt's tokens, in Triton: solved before the states between them, see `state_pass`.

A delta rule's updates δ are linear in the state S before the chunk:

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
