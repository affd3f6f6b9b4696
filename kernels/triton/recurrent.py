"""Recurrent layers over states in blocks, in Triton. See `kernels.reference.recurrent` and `StateContext`."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.data.forms import FORMS
from kernels.data.state import StateContext
from kernels.gpu.launch import cdiv, next_power_of_2

BLOCK_C = 128  # channels of a program


@triton.jit
def _inputs_before(
    x, inputs, token, position, first, source, real, channel, lag, num_channels, stride_x, stride_block,
    RING: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Load the inputs of the convolution `lag` before these tokens, 0 before their sequences: [T, C]."""
    at = position - lag
    is_channel = channel < num_channels
    new = (real & (at >= first))[:, None] & is_channel
    old = (real & (at >= 0) & (at < first))[:, None] & is_channel
    from_step = x + (token - lag).to(tl.int64)[:, None] * stride_x + channel
    value = tl.load(from_step, mask=new, other=0.0)
    if GATED:
        values = tl.load(from_step + 2 * num_channels, mask=new, other=0.0)
        value = (value.to(tl.float32) * values.to(tl.float32)).to(inputs.dtype.element_ty)
    slot = tl.maximum(at, 0) % RING
    cached = tl.load(
        inputs + source.to(tl.int64)[:, None] * stride_block + slot[:, None] * num_channels + channel,
        mask=old,
        other=0.0,
    )
    return tl.where(new, value, cached.to(value.dtype))


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _causal_conv_kernel(
    x, weight, bias, inputs, out,
    block_tables, rows, query_start, context_lens, sequence_of, num_tokens, num_rows,
    num_channels, stride_x, stride_block, stride_table,
    LENGTH: tl.constexpr, RING: tl.constexpr, BLOCK_SIZE: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr, COMPUTES: tl.constexpr, STORES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_T tokens and BLOCK_C channels. COMPUTES: write the outputs. STORES: write the states."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    is_token, is_channel = token < num_tokens, channel < num_channels
    sequence = tl.load(sequence_of + token, mask=is_token, other=0)
    row = tl.load(rows + sequence)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    real = is_token & (row < num_rows - 1) & (token >= start) & (token < end)
    first = tl.where(real, tl.load(context_lens + sequence, mask=real, other=0) - (end - start), 0)
    position = first + token - start
    table = block_tables + row.to(tl.int64) * stride_table
    source = tl.load(table + tl.maximum(first - 1, 0) // BLOCK_SIZE, mask=real & (first > 0), other=0)
    if COMPUTES:
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for lag in tl.static_range(LENGTH):
            value = _inputs_before(
                x, inputs, token, position, first, source, real, channel, lag, num_channels, stride_x, stride_block,
                RING, GATED,
            )  # fmt: skip
            tap = tl.load(weight + channel * LENGTH + (LENGTH - 1 - lag), mask=is_channel, other=0.0)
            total += value.to(tl.float32) * tap.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty)
        if SILU:
            wide = total.to(tl.float32)
            total = (wide / (1 + tl.exp(-wide))).to(out.dtype.element_ty)
        if GATED:
            gate = x + token.to(tl.int64)[:, None] * stride_x + num_channels + channel
            after = tl.load(gate, mask=real[:, None] & is_channel, other=0.0)
            total = (after.to(tl.float32) * total.to(tl.float32)).to(out.dtype.element_ty)
        total = tl.where(real[:, None], total, 0.0)
        tl.store(out + token.to(tl.int64)[:, None] * num_channels + channel, total, mask=is_token[:, None] & is_channel)
    if STORES:
        newest = real & ((token == end - 1) | ((position + 1) % BLOCK_SIZE == 0))
        target = tl.load(table + tl.maximum(position, 0) // BLOCK_SIZE, mask=newest, other=-1)
        newest = newest & (target >= 0)
        for lag in tl.static_range(RING):
            at = position - lag
            known = newest & (at >= 0) & (at > first - LENGTH)
            value = _inputs_before(
                x, inputs, token, position, first, source, known, channel, lag, num_channels, stride_x, stride_block,
                RING, GATED,
            )  # fmt: skip
            slot = tl.maximum(at, 0) % RING
            into = inputs + target.to(tl.int64)[:, None] * stride_block + slot[:, None] * num_channels + channel
            tl.store(into, value.to(inputs.dtype.element_ty), mask=known[:, None] & is_channel)


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    """See `kernels.reference.short_conv`."""
    return _causal_conv(x, weight, bias, inputs, context, gated=True)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    """See `kernels.reference.causal_conv`."""
    return _causal_conv(x, weight, bias, inputs, context, gated=False)


def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext, *, gated: bool
) -> Tensor:
    """Compute `short_conv`, or with its activation the convolution of x [T, C] itself."""
    c, (num_tokens, width) = context, x.shape
    num_channels, length = weight.shape
    assert width == num_channels * (3 if gated else 1)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert inputs.is_contiguous()
    assert inputs.dtype == x.dtype
    assert c.sequence_of is not None
    out = x.new_empty(num_tokens, num_channels)
    # Decodes store with what they have loaded. Where a sequence has several programs, all read before one writes.
    one_launch = c.only_decodes and not FORMS.deterministic
    modes = [(True, True)] if one_launch else [(True, False), (False, True)]
    block_t = 16 if FORMS.deterministic else min(next_power_of_2(max(num_tokens, 1)), 16)
    for computes, stores in modes:
        _causal_conv_kernel[(cdiv(num_tokens, block_t), cdiv(num_channels, BLOCK_C))](
            x, weight, bias, inputs, out,
            c.block_tables, c.rows, c.query_start, c.context_lens, c.sequence_of, num_tokens, len(c.block_tables),
            num_channels, x.stride(0), inputs.stride(0), c.block_tables.stride(0),
            LENGTH=length, RING=inputs.shape[1], BLOCK_SIZE=c.block_size, GATED=gated, SILU=not gated,
            HAS_BIAS=bias is not None, COMPUTES=computes, STORES=stores, BLOCK_T=block_t, BLOCK_C=BLOCK_C, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _gated_rms_norm_kernel(
    x, gate, weight, out, num_heads, stride_gate, eps, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr
):  # fmt: skip
    """One program for a head of a token."""
    token, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    d = tl.arange(0, D_PAD)
    mask = d < HEAD_DIM
    at = tl.program_id(0).to(tl.int64) * HEAD_DIM + d
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / HEAD_DIM + eps)
    normed = normed.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    normed = normed.to(out.dtype.element_ty)
    z = tl.load(gate + token * stride_gate + head * HEAD_DIM + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (normed.to(tl.float32) * z / (1 + tl.exp(-z))).to(out.dtype.element_ty), mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.gated_rms_norm`."""
    num_tokens, num_heads, head_dim = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = x.new_empty(num_tokens, num_heads * head_dim)
    if num_tokens:
        _gated_rms_norm_kernel[(num_tokens * num_heads,)](
            x, gate, weight, out, num_heads, gate.stride(0), eps,
            HEAD_DIM=head_dim, D_PAD=next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
    return out
