"""Recurrent layers with one order of sums, in Triton: the delta rule, KDA and state-space layers, token after token.

A program keeps some value channels of a head's state in registers. It begins with the state before the block that its
sequence continues from, and computes this block's tokens again by what was stored of them, with the same instructions.
So a token's bytes depend neither on where steps are cut nor on what else they compute. States of 16 bits are rounded
at each block's beginning, whether the block is held or not.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import math
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from kernels.data.state import DeltaStates, StateContext, StateSpace
from kernels.gpu.launch import cdiv, next_power_of_2
from kernels.triton.scan_decode import offsets, read_gates, softplus

BLOCK_V = 16  # value channels of a program


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_scan_kernel(
    inputs, gates, forget, rate, bias, skip, before, keys, updates, decays, out,
    block_tables, rows, query_start, context_lens, num_rows, least, most,
    stride_inputs, stride_gates, stride_forget, stride_table,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head of a sequence. KIND: "delta", "kda" or "mamba2"."""
    DELTA: tl.constexpr = KIND != "mamba2"
    CHANNELS: tl.constexpr = KIND == "kda"  # each channel of the key has a decay
    head, sequence = tl.program_id(0), tl.program_id(2)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    is_real = (row < num_rows - 1) & (end > start)
    context_len = tl.where(is_real, tl.load(context_lens + sequence), 0)
    first = tl.where(is_real, context_len - (end - start), 0)  # position of the first token
    table = block_tables + row.to(tl.int64) * stride_table
    k_at, v_at = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = k_at < DK, v_at < DV
    writes_decays = tl.program_id(1) == 0
    writes_keys = writes_decays & (head % (NUM_VALUES // NUM_KEYS) == 0)
    q_at, key_at, value_at = offsets(head, NUM_KEYS, NUM_VALUES, DK, DV, DELTA)

    for padding in range(start, tl.where(is_real, start, end)):
        zeros = tl.zeros([BLOCK_V], out.dtype.element_ty)
        tl.store(out + ((start.to(tl.int64) + (padding - start)) * NUM_VALUES + head) * DV + v_at, zeros, mask=is_v)

    source_index = tl.maximum(first - 1, 0) // SIZE
    source = tl.load(table + source_index, mask=first > 0, other=0).to(tl.int64)
    at_state = head.to(tl.int64) * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
    is_state = is_k[:, None] & is_v[None, :]
    state = tl.load(before + source * (NUM_VALUES * DK * DV) + at_state, mask=is_state & (source_index > 0), other=0.0)
    state = state.to(tl.float32)
    since = 0.0  # sum of decays since the block's first token
    if CHANNELS:
        since = tl.zeros([BLOCK_K], tl.float32)
    for position in range(source_index * SIZE, context_len):
        is_first, is_new = position % SIZE == 0, position >= first
        block = tl.load(table + position // SIZE).to(tl.int64)
        slot = block * SIZE + position % SIZE
        is_old, is_held = position < first, is_new & (block >= 0)
        state = tl.where(is_first, state.to(before.dtype.element_ty).to(tl.float32), state)
        since = tl.where(is_first, 0.0, since)
        tl.store(before + block * (NUM_VALUES * DK * DV) + at_state, state, mask=is_state & (is_held & is_first))

        token = start.to(tl.int64) + (position - first)
        step = inputs + token * stride_inputs
        new_key = tl.load(step + key_at + k_at, mask=is_k & is_new, other=0.0)
        query = tl.load(step + q_at + k_at, mask=is_k & is_new, other=0.0).to(tl.float32)
        value = tl.load(step + value_at + v_at, mask=is_v & is_new, other=0.0).to(tl.float32)
        at_key = keys + (slot * NUM_KEYS + key_head) * DK + k_at
        at_update = updates + (slot * NUM_VALUES + head) * DV + v_at
        raw = tl.where(is_new, new_key, tl.load(at_key, mask=is_k & is_old, other=0.0))
        known = tl.load(at_update, mask=is_v & is_old, other=0.0)
        if CHANNELS:
            beta = tl.load(gates + token * stride_gates + head, mask=is_new, other=0.0).to(tl.float32)
            beta = (1 / (1 + tl.exp(-beta))).to(gates.dtype.element_ty).to(tl.float32)
            decay = tl.load(forget + token * stride_forget + head * DK + k_at, mask=is_k & is_new, other=0.0)
            decay = decay.to(tl.float32) + tl.load(bias + head * DK + k_at, mask=is_k, other=0.0)
            decay = -tl.load(rate + head) * softplus(decay)
            at_decay = decays + (slot * NUM_VALUES + head) * DK + k_at
            decay = tl.where(is_new, since + decay, tl.load(at_decay, mask=is_k & is_old, other=0.0))
            tl.store(at_decay, decay, mask=is_k & (is_held & writes_decays))
            state *= tl.exp(decay - since)[:, None]
        else:
            beta, decay = read_gates(
                gates + token * stride_gates, rate, bias, head, is_new, least, most, NUM_VALUES, DELTA
            )
            at_decay = decays + slot * NUM_VALUES + head
            decay = tl.where(is_new, since + decay, tl.load(at_decay, mask=is_old, other=0.0))
            tl.store(at_decay, decay, mask=is_held & writes_decays)
            state *= tl.exp(decay - since)
        since = decay

        key = raw.to(tl.float32)
        update = beta * value
        if DELTA:
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (DK**-0.5)
            update = beta * (value - tl.sum(state * key[:, None], 0))
        update = tl.where(is_new, update, known)
        state += key[:, None] * update[None, :]
        output = tl.sum(state * query[:, None], 0)
        if not DELTA:
            output += tl.load(skip + head) * value
        to = out + (token * NUM_VALUES + head) * DV + v_at
        tl.store(to, output.to(out.dtype.element_ty), mask=is_v & is_new)
        tl.store(at_key, raw, mask=is_k & (is_held & writes_keys))
        tl.store(at_update, update, mask=is_v & is_held)


def _scan(
    kind: Literal["delta", "kda", "mamba2"],
    tokens: tuple[Tensor, Tensor, Tensor],
    of_heads: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float],
    states: DeltaStates,
    context: StateContext,
) -> Tensor:
    """tokens: inputs, gates, and forget gates; of_heads: rate, bias and skip. What a kind lacks is not read."""
    c, s, (inputs, gates, forget) = context, states, tokens
    (num_keys, key_dim), (num_values, value_dim) = s.keys.shape[2:], s.updates.shape[2:]
    for each in (s.before, s.keys, s.updates, s.decays, *of_heads):
        assert each.is_contiguous()
    assert s.keys.dtype == inputs.dtype
    assert inputs.stride(1) == gates.stride(1) == forget.stride(1) == 1
    out = inputs.new_empty(len(inputs), num_values, value_dim)
    _fixed_scan_kernel[(num_values, cdiv(value_dim, BLOCK_V), len(c.rows))](
        inputs, gates, forget, *of_heads, s.before, s.keys, s.updates, s.decays, out,
        c.block_tables, c.rows, c.query_start, c.context_lens, len(c.block_tables), *limits,
        inputs.stride(0), gates.stride(0), forget.stride(0), c.block_tables.stride(0),
        NUM_KEYS=num_keys, NUM_VALUES=num_values, DK=key_dim, DV=value_dim, SIZE=c.block_size, KIND=kind,
        BLOCK_K=max(next_power_of_2(key_dim), 16), BLOCK_V=BLOCK_V, num_warps=1,
    )  # fmt: skip
    return out


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.delta_rule`."""
    return _scan("delta", (qkv, gates, gates), (rate, bias, rate), (0.0, math.inf), states, context)


def kda(
    qkv: Tensor, beta: Tensor, forget: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.kda`."""
    return _scan("kda", (qkv, beta, forget), (rate, bias, rate), (0.0, math.inf), states, context)


def mamba2(xbc: Tensor, steps: Tensor, layer: StateSpace, states: DeltaStates, context: StateContext) -> Tensor:
    """See `kernels.reference.mamba2`."""
    return _scan("mamba2", (xbc, steps, steps), layer[:3], layer.limits, states, context)
