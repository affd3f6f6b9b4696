"""The gated delta rule over states in blocks, in Triton. See `kernels.reference.delta_rule`.

A program computes some value channels of a head of a sequence, one block of tokens after the other: within a block by
matrix multiplications, between blocks by the state, which it keeps in registers. A step of decodes only is computed by
`kernels.triton.scan_decode`.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.state import DeltaStates, StateContext
from kernels.gpu.launch import cdiv, next_power_of_2
from kernels.triton import scans
from kernels.triton.scan_decode import softplus

MAX_BLOCK_V = 32  # value channels of a program


@triton.jit
def _unit(x):
    """Return the rows of x [n, k] with length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _inverse(a, t, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + a, where a [n, n] is strictly lower triangular, n = 8 · 2^LEVELS; t: 0 to n - 1.

    First of its blocks of 8 on the diagonal, by (1 - d)(1 + d²)(1 + d⁴), whose terms stay small. Then two neighbours
    with inverse n and the block e below become one: (1 - n e) n.
    """
    row, column = t[:, None], t[None, :]
    one = tl.where(row == column, 1.0, 0.0)
    d = tl.where(row // 8 == column // 8, a, 0.0)
    square = tl.dot(d, d, input_precision=PRECISION)
    n = tl.dot(one - d, one + square, input_precision=PRECISION)
    n = tl.dot(n, one + tl.dot(square, square, input_precision=PRECISION), input_precision=PRECISION)
    for level in tl.static_range(LEVELS):
        size = 8 << level
        below = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        n -= tl.dot(tl.dot(n, tl.where(below, a, 0.0), input_precision=PRECISION), n, input_precision=PRECISION)
    return n


@triton.jit(do_not_specialize=["num_rows"])
def _delta_rule_kernel(
    qkv, gates, rate, bias, before, keys, updates, decays, out,
    block_tables, rows, query_start, context_lens, num_rows, stride_qkv, stride_gates, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    is_real = row < num_rows - 1
    context_len = tl.load(context_lens + sequence)
    first = context_len - (end - start)  # position of the first token
    table = block_tables + row.to(tl.int64) * stride_table
    t = tl.arange(0, BLOCK_T)
    k_at = tl.arange(0, BLOCK_K)[None, :]
    v_at = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    is_k, is_v = k_at < DK, v_at < DV
    writes_keys = (tl.program_id(2) == 0) & (head % (NUM_VALUES // NUM_KEYS) == 0)
    rate_of_head = tl.load(rate + head)
    bias_of_head = tl.load(bias + head)

    for at in range(start, tl.where(is_real, start, end), BLOCK_T):  # padding
        token = (at + t).to(tl.int64)[:, None]
        zeros = tl.zeros([BLOCK_T, BLOCK_V], out.dtype.element_ty)
        tl.store(out + (token * NUM_VALUES + head) * DV + v_at, zeros, mask=(token < end) & is_v)

    first_index = tl.maximum(first - 1, 0) // SIZE
    last_index = tl.where(is_real & (end > start), (context_len - 1) // SIZE, first_index - 1)
    block = tl.load(table + first_index, mask=is_real, other=0).to(tl.int64)
    at_state = head.to(tl.int64) * (DK * DV) + tl.trans(k_at) * DV + v_at  # [K, V]
    is_state = tl.trans(is_k) & is_v
    is_there = is_real & (end > start) & (first > 0) & (first_index > 0)
    state = tl.load(before + block * (NUM_VALUES * DK * DV) + at_state, mask=is_state & is_there, other=0.0)
    state = state.to(tl.float32)

    for index in range(first_index, last_index + 1):
        block = tl.load(table + index).to(tl.int64)
        is_held = block >= 0
        num_old = tl.minimum(tl.maximum(first - index * SIZE, 0), SIZE)
        begins = is_held & ((index > first_index) | (num_old == 0))
        tl.store(before + block * (NUM_VALUES * DK * DV) + at_state, state, mask=is_state & begins)

        position = index * SIZE + t
        is_old = t < num_old
        is_new = (t < SIZE) & (position >= first) & (position < context_len)
        token = (start + position - first).to(tl.int64)
        slot = block * SIZE + t
        old, new = is_old[:, None], is_new[:, None]
        at_key = keys + (slot[:, None] * NUM_KEYS + key_head) * DK + k_at
        from_step = qkv + token[:, None] * stride_qkv
        new_key = tl.load(from_step + (NUM_KEYS + key_head) * DK + k_at, mask=new & is_k, other=0.0)
        key = tl.load(at_key, mask=old & is_k, other=0.0).to(tl.float32) + new_key.to(tl.float32)
        tl.store(at_key, new_key, mask=new & is_k & (is_held & writes_keys))
        key = _unit(key)
        query = tl.load(from_step + key_head * DK + k_at, mask=new & is_k, other=0.0).to(tl.float32)
        query = _unit(query) * (DK**-0.5)
        value = tl.load(from_step + 2 * NUM_KEYS * DK + head * DV + v_at, mask=new & is_v, other=0.0).to(tl.float32)
        gate = gates + token * stride_gates + head
        beta = tl.load(gate, mask=is_new, other=0.0)
        beta = (1 / (1 + tl.exp(-beta.to(tl.float32)))).to(gates.dtype.element_ty).to(tl.float32)
        step = tl.load(gate + NUM_VALUES, mask=is_new, other=0.0).to(tl.float32) + bias_of_head
        step = softplus(step)
        at_decay = decays + slot * NUM_VALUES + head
        decay = tl.load(at_decay, mask=is_old, other=0.0)
        since_old = tl.sum(tl.where(t == num_old - 1, decay, 0.0), 0)
        decay = tl.where(is_old, decay, since_old - tl.cumsum(tl.where(is_new, rate_of_head * step, 0.0), 0))
        tl.store(at_decay, decay, mask=is_new & is_held & (tl.program_id(2) == 0))
        at_update = updates + (slot[:, None] * NUM_VALUES + head) * DV + v_at
        update = tl.load(at_update, mask=old & is_v, other=0.0)

        shrunk = tl.exp(decay)[:, None]
        is_past = t[:, None] >= t[None, :]
        between = tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], 0.0))
        between = tl.where(is_past, between, 0.0)
        similar = tl.dot(key, tl.trans(key), input_precision=PRECISION) * between * beta[:, None]
        similar = tl.where(new & (t[:, None] > t[None, :]), similar, 0.0)
        wanted = value - shrunk * tl.dot(key, state, input_precision=PRECISION)
        update += tl.where(new, beta[:, None] * wanted, 0.0)
        update -= tl.dot(tl.where(is_old[None, :], similar, 0.0), tl.where(old, update, 0.0), input_precision=PRECISION)
        similar = tl.where(is_new[None, :], similar, 0.0)
        if num_old + 1 < tl.minimum(context_len - index * SIZE, SIZE):  # several new tokens
            update = tl.dot(_inverse(similar, t, LEVELS, EXACT), update, input_precision=EXACT)
        tl.store(at_update, update, mask=new & is_v & is_held)

        seen = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
        output = shrunk * tl.dot(query, state, input_precision=PRECISION)
        output += tl.dot(seen, update, input_precision=PRECISION)
        to = out + (token[:, None] * NUM_VALUES + head) * DV + v_at
        tl.store(to, output.to(out.dtype.element_ty), mask=new & is_v)
        if index < last_index:
            total_decay = tl.sum(tl.where(t == SIZE - 1, decay, 0.0), 0)
            weighted = key * tl.where(t < SIZE, tl.exp(tl.minimum(total_decay - decay, 0.0)), 0.0)[:, None]
            state = tl.exp(total_decay) * state + tl.dot(tl.trans(weighted), update, input_precision=PRECISION)


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.delta_rule`."""
    if context.only_decodes:
        return scans.delta_rule(qkv, gates, rate, bias, states, context)
    c, s = context, states
    num_keys, key_dim = s.keys.shape[2:]
    num_values, value_dim = s.updates.shape[2:]
    for each in (s.before, s.keys, s.updates, s.decays):
        assert each.is_contiguous()
    assert s.keys.dtype == qkv.dtype
    assert qkv.stride(1) == gates.stride(1) == 1
    out, wide = qkv.new_empty(len(qkv), num_values, value_dim), qkv.dtype == torch.float32
    tensors = (
        qkv, gates, rate, bias, s.before, s.keys, s.updates, s.decays, out,
        c.block_tables, c.rows, c.query_start, c.context_lens, len(c.block_tables),
        qkv.stride(0), gates.stride(0), c.block_tables.stride(0),
    )  # fmt: skip
    sizes = {
        "NUM_KEYS": num_keys, "NUM_VALUES": num_values, "DK": key_dim, "DV": value_dim, "SIZE": c.block_size,
        "BLOCK_T": max(next_power_of_2(c.block_size), 16), "BLOCK_K": max(next_power_of_2(key_dim), 16),
    }  # fmt: skip
    block_v = min(max(next_power_of_2(value_dim), 16), MAX_BLOCK_V)
    grid = len(c.rows), num_values, cdiv(value_dim, block_v)
    _delta_rule_kernel[grid](
        *tensors, **sizes, BLOCK_V=block_v, PRECISION="ieee" if wide else "tf32", EXACT="ieee" if wide else "tf32x3",
        LEVELS=sizes["BLOCK_T"].bit_length() - 4, num_warps=4,
    )  # fmt: skip
    return out
