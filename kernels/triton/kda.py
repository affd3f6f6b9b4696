"""Kimi delta attention over states in blocks, in Triton: token after token. See `kernels.reference.kda`.

A program keeps some value channels of a head's state in registers. It begins with the state before the block and what
the block's tokens have changed, and writes the state before each block that is held.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.data.state import DeltaStates, StateContext
from kernels.gpu.launch import cdiv, next_power_of_2
from kernels.triton.scan_decode import softplus

BLOCK_V = 16  # value channels of a program


@triton.jit(do_not_specialize=["num_rows"])
def _kda_kernel(
    qkv, betas, forget, rate, bias, before, keys, updates, decays, out,
    block_tables, rows, query_start, context_lens, num_rows, stride_qkv, stride_beta, stride_forget, stride_table,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_V value channels of a head of a sequence."""
    head, sequence = tl.program_id(0), tl.program_id(2)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    is_real = (row < num_rows - 1) & (end > start)
    first = tl.load(context_lens + sequence) - (end - start)  # position of the first token
    table = block_tables + row.to(tl.int64) * stride_table
    k_at, v_at = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = k_at < DK, v_at < DV
    writes_keys = is_k & (tl.program_id(1) == 0)
    rate_of_head = tl.load(rate + head)
    bias_of_head = tl.load(bias + head * DK + k_at, mask=is_k, other=0.0)

    for padding in range(start, tl.where(is_real, start, end)):
        zeros = tl.zeros([BLOCK_V], out.dtype.element_ty)
        tl.store(out + ((start.to(tl.int64) + (padding - start)) * HEADS + head) * DV + v_at, zeros, mask=is_v)

    source_index = tl.maximum(first - 1, 0) // SIZE
    num_old = tl.where(is_real, first - source_index * SIZE, 0)
    source = tl.load(table + source_index, mask=num_old > 0, other=0).to(tl.int64)
    at_state = head.to(tl.int64) * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
    is_state = is_k[:, None] & is_v[None, :]
    state = tl.load(
        before + source * (HEADS * DK * DV) + at_state, mask=is_state & (num_old > 0) & (source_index > 0), other=0.0
    ).to(tl.float32)
    since = tl.load(
        decays + ((source * SIZE + num_old - 1) * HEADS + head) * DK + k_at, mask=is_k & (num_old > 0), other=0.0
    )
    state *= tl.exp(since)[:, None]
    for i in range(num_old):
        old = (source * SIZE + i) * HEADS + head
        old_key = tl.load(keys + old * DK + k_at, mask=is_k, other=0.0).to(tl.float32)
        old_key *= tl.rsqrt(tl.sum(old_key * old_key, 0) + 1e-6)
        old_key *= tl.exp(since - tl.load(decays + old * DK + k_at, mask=is_k, other=0.0))
        old_update = tl.load(updates + old * DV + v_at, mask=is_v, other=0.0)
        state += old_key[:, None] * old_update[None, :]

    for token in range(start, tl.where(is_real, end, start)):
        position = first + token - start
        block = tl.load(table + position // SIZE).to(tl.int64)
        is_held, is_first = block >= 0, position % SIZE == 0
        tl.store(before + block * (HEADS * DK * DV) + at_state, state, mask=is_state & (is_held & is_first))
        wide = start.to(tl.int64) + (token - start)
        at = qkv + wide * stride_qkv + head * DK + k_at
        raw = tl.load(at + HEADS * DK, mask=is_k, other=0.0)
        query = tl.load(at, mask=is_k, other=0.0).to(tl.float32)
        value = tl.load(qkv + wide * stride_qkv + 2 * HEADS * DK + head * DV + v_at, mask=is_v, other=0.0)
        decay = tl.load(forget + wide * stride_forget + head * DK + k_at, mask=is_k, other=0.0).to(tl.float32)
        decay = -rate_of_head * softplus(decay + bias_of_head)
        beta = tl.load(betas + wide * stride_beta + head).to(tl.float32)
        beta = (1 / (1 + tl.exp(-beta))).to(betas.dtype.element_ty).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (DK**-0.5)
        key = raw.to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        state *= tl.exp(decay)[:, None]
        update = beta * (value.to(tl.float32) - tl.sum(state * key[:, None], 0))
        state += key[:, None] * update[None, :]
        output = tl.sum(state * query[:, None], 0)
        tl.store(out + (wide * HEADS + head) * DV + v_at, output.to(out.dtype.element_ty), mask=is_v)
        since = tl.where(is_first, 0.0, since) + decay
        slot = (block * SIZE + position % SIZE) * HEADS + head
        tl.store(keys + slot * DK + k_at, raw, mask=writes_keys & is_held)
        tl.store(decays + slot * DK + k_at, since, mask=writes_keys & is_held)
        tl.store(updates + slot * DV + v_at, update, mask=is_v & is_held)


def kda(
    qkv: Tensor, beta: Tensor, forget: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.kda`."""
    c, s = context, states
    (num_heads, key_dim), value_dim = s.keys.shape[2:], s.updates.shape[3]
    for each in (s.before, s.keys, s.updates, s.decays, rate, bias):
        assert each.is_contiguous()
    assert s.keys.dtype == qkv.dtype
    assert qkv.stride(1) == beta.stride(1) == forget.stride(1) == 1
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    block_v = min(max(next_power_of_2(value_dim), 16), BLOCK_V)
    _kda_kernel[(num_heads, cdiv(value_dim, block_v), len(c.rows))](
        qkv, beta, forget, rate, bias, s.before, s.keys, s.updates, s.decays, out,
        c.block_tables, c.rows, c.query_start, c.context_lens, len(c.block_tables),
        qkv.stride(0), beta.stride(0), forget.stride(0), c.block_tables.stride(0),
        HEADS=num_heads, DK=key_dim, DV=value_dim, SIZE=c.block_size, BLOCK_K=max(next_power_of_2(key_dim), 16),
        BLOCK_V=block_v, num_warps=1,
    )  # fmt: skip
    return out
