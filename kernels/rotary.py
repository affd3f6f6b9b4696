"""Query/key norm, rotary embedding and the KV store in one Triton kernel, straight from the packed projection.

One program takes one token and some heads of one kind: queries, keys or values. Keys and values go to their slots.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_cache import HEADS_PER_PROGRAM, load_heads, slot_offset, store_heads
from kernels.launch import launch_dependents, pdl_options, wait_for_inputs


@triton.jit
def _normed(x, scale, weight, channels, mask, DTYPE: tl.constexpr):
    """x [N, D] times its norm's scale [N] and weight, rounded to DTYPE as if it were stored after each."""
    w = tl.load(weight + channels, mask=mask, other=0.0).to(tl.float32)
    return ((x * scale[:, None]).to(DTYPE).to(tl.float32) * w[None, :]).to(DTYPE).to(tl.float32)


@triton.jit
def rope_heads(
    source, heads, valid, weight, angles, eps,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The `valid` ones of a token's heads [N] at `source`, normed, rotated and rounded to its dtype: [N, D_PAD], padded
    with 0. `angles` points to the cosines, then the sines, of the token's position; ROTARY 0: no rotation."""
    DTYPE: tl.constexpr = source.dtype.element_ty
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, D_PAD)
    x = load_heads(source, heads, valid, HEAD_DIM, D_PAD).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
        x = _normed(x, scale, weight, d, d < HEAD_DIM, DTYPE)
    if ROTARY > 0:
        rotates = d < ROTARY
        other = tl.where(d < HALF, d + HALF, d - HALF)  # the channel that each channel rotates with
        mask = valid[:, None] & rotates[None, :]
        y = tl.load(source + heads[:, None] * HEAD_DIM + other[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            y = _normed(y, scale, weight, other, rotates, DTYPE)
        angle = tl.where(d < HALF, d, d - HALF)
        cos = tl.load(angles + angle, mask=rotates, other=1.0)
        sin = tl.load(angles + HALF + angle, mask=rotates, other=0.0)
        x = x * cos[None, :] + y * tl.where(d < HALF, -sin, sin)[None, :]
    return x.to(DTYPE)


@triton.jit
def _rope_kernel(
    qkv, positions, table, q_norm, k_norm, query_out, key_cache, value_cache, slot_mapping, kv_scale, eps,
    stride_qkv, stride_table, stride_block, stride_head, stride_offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    D_PAD: tl.constexpr, HEADS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEY_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angles = table + tl.load(positions + token).to(tl.int64) * stride_table
    source = qkv + token * stride_qkv
    if part < QUERY_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        valid = heads < NUM_HEADS
        q = rope_heads(source, heads, valid, q_norm, angles, eps, HEAD_DIM, D_PAD, ROTARY, Q_NORM)
        d = tl.arange(0, D_PAD)
        at = query_out + token * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + d[None, :]
        tl.store(at, q, mask=valid[:, None] & (d < HEAD_DIM)[None, :])
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            at = slot_offset(slot, stride_block, stride_offset, BLOCK_SIZE)
            part -= QUERY_PARTS
            source += NUM_HEADS * HEAD_DIM
            if part < KEY_PARTS:
                heads = part * HEADS + tl.arange(0, HEADS)
                valid = heads < NUM_KV_HEADS
                k = rope_heads(source, heads, valid, k_norm, angles, eps, HEAD_DIM, D_PAD, ROTARY, K_NORM)
                store_heads(k, key_cache + at, kv_scale, heads, valid, stride_head, HEAD_DIM, D_PAD)
            else:
                heads = (part - KEY_PARTS) * HEADS + tl.arange(0, HEADS)
                valid = heads < NUM_KV_HEADS
                v = load_heads(source + NUM_KV_HEADS * HEAD_DIM, heads, valid, HEAD_DIM, D_PAD)
                store_heads(v, value_cache + at, kv_scale + NUM_KV_HEADS, heads, valid, stride_head, HEAD_DIM, D_PAD)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.rope_and_store`. Rows of qkv must be contiguous, the row stride is free."""
    num_tokens, head_dim = len(qkv), qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    assert qkv.stride(1) == key_cache.stride(3) == 1
    assert key_cache.stride() == value_cache.stride()
    assert (kv_scale is not None) == (key_cache.dtype == torch.float8_e4m3fn)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        heads = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), HEADS_PER_PROGRAM)
        table = positions if cos_sin is None else cos_sin  # a pointer that is not read takes the place of None
        _rope_kernel[(num_tokens, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads))](
            qkv, positions, table, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            out, key_cache, value_cache, slot_mapping, slot_mapping if kv_scale is None else kv_scale, eps,
            qkv.stride(0), table.stride(0), *key_cache.stride()[:3],
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY=rotary_dim,
            D_PAD=triton.next_power_of_2(head_dim), HEADS=heads, Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
            BLOCK_SIZE=key_cache.shape[2], num_warps=4, **pdl_options(qkv.device),
        )  # fmt: skip
    return out
