"""Query/key norm, rotary embedding and the KV store in one Triton kernel, straight from the packed projection.

One program takes one token and some heads of one kind: queries, keys or values. Keys and values go to their slots.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.forms import FORMS
from kernels.data.kv_cache import KVSlots, RopeArgs
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.kv_cache import HEADS_PER_PROGRAM, slot_offset, to_e4m3

MANY = 1024  # tokens from which on a program takes more heads


@triton.jit
def _rope_heads(
    source, target, weight, table, scales, stride_table, stride_target, position, eps, first_head,
    wide, stride_wide, is_wide,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads [first_head, first_head + HEADS) of one token, from `source` to `target`.

    A head is read as the first and the second channels of the pairs among its ROTARY first ones, and the rest of them.
    An e4m3 `target` has `scales`. With WIDE, what goes there also goes to `wide`, if `is_wide`.
    """
    HALF: tl.constexpr = ROTARY // 2
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    heads = (first_head + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF_PAD)[None, :]
    mask = (heads < NUM_HEADS) & (i < HALF)
    a = 2 * i if INTERLEAVED else i
    OTHER: tl.constexpr = 1 if INTERLEAVED else HALF
    at = source + heads * HEAD_DIM + a
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + OTHER, mask=mask, other=0.0).to(tl.float32)
    j = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    rest_mask = (heads < NUM_HEADS) & (j < HEAD_DIM)
    if REST > 0:
        rest = tl.load(source + heads * HEAD_DIM + j, mask=rest_mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = source.dtype.element_ty
    if NORM:
        squares = tl.sum(first * first + second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        # QuantizedRows as the norm's output would be if it were stored.
        first_weight = tl.load(weight + a, mask=i < HALF).to(tl.float32)
        second_weight = tl.load(weight + a + OTHER, mask=i < HALF).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
        if REST > 0:
            rest = (rest * scale).to(dtype).to(tl.float32) * tl.load(weight + j, mask=j < HEAD_DIM).to(tl.float32)
    if ROTATE:
        row = table + position * stride_table
        cos = tl.load(row + i, mask=i < HALF)
        sin = tl.load(row + HALF + i, mask=i < HALF)
        first, second = first * cos - second * sin, second * cos + first * sin
    if target.dtype.element_ty == tl.float8e4nv:
        scale = tl.load(scales + heads, mask=heads < NUM_HEADS, other=1.0)
        first, second = to_e4m3(first.to(dtype), scale), to_e4m3(second.to(dtype), scale)
        if REST > 0:
            rest = to_e4m3(rest.to(dtype), scale)
    to = target + heads * stride_target
    tl.store(to + a, first, mask=mask)
    tl.store(to + a + OTHER, second, mask=mask)
    if REST > 0:
        tl.store(to + j, rest, mask=rest_mask)
    if WIDE:
        to = wide + heads * stride_wide
        tl.store(to + a, first.to(wide.dtype.element_ty), mask=mask & is_wide)
        tl.store(to + a + OTHER, second.to(wide.dtype.element_ty), mask=mask & is_wide)
        if REST > 0:
            tl.store(to + j, rest.to(wide.dtype.element_ty), mask=rest_mask & is_wide)


@triton.jit
def _rope_kernel(
    qkv, positions, table, q_norm, k_norm, query_out, key_cache, value_cache, slot_mapping, kv_scale,
    wide_keys, wide_values, wide_slots, eps,
    stride_qkv, stride_table, stride_block, stride_head, stride_offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDE_PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WIDE_PAGE: slots of a page of `wide_keys` and `wide_values`, [P, NUM_KV_HEADS, WIDE_PAGE, HEAD_DIM]; 0: there are
    none.
    """
    if PDL:
        launch_dependents()
        wait_for_inputs()
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEY_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    source = qkv + token * stride_qkv
    if part < QUERY_PARTS:
        _rope_heads(
            source, query_out + token * (NUM_HEADS * HEAD_DIM), q_norm, table, kv_scale, stride_table,
            HEAD_DIM, position, eps, part * HEADS, query_out, 0, False,
            NUM_HEADS, HEAD_DIM, ROTARY, HALF_PAD, REST_PAD, HEADS, Q_NORM, ROTATE, INTERLEAVED, False,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            at = slot_offset(slot, stride_block, stride_offset, BLOCK_SIZE)
            part -= QUERY_PARTS
            if WIDE_PAGE > 0:
                wide_slot = tl.load(wide_slots + token)
                wide_at = slot_offset(wide_slot, NUM_KV_HEADS * WIDE_PAGE * HEAD_DIM, HEAD_DIM, WIDE_PAGE)
            else:
                wide_slot = slot
                wide_at = at
            if part < KEY_PARTS:
                _rope_heads(
                    source + NUM_HEADS * HEAD_DIM, key_cache + at, k_norm, table, kv_scale, stride_table, stride_head,
                    position, eps, part * HEADS, wide_keys + wide_at, WIDE_PAGE * HEAD_DIM, wide_slot >= 0,
                    NUM_KV_HEADS, HEAD_DIM, ROTARY, HALF_PAD, REST_PAD, HEADS, K_NORM, ROTATE, INTERLEAVED,
                    WIDE_PAGE > 0,
                )  # fmt: skip
            else:
                heads = ((part - KEY_PARTS) * HEADS + tl.arange(0, HEADS))[:, None]
                d = tl.arange(0, D_PAD)[None, :]
                mask = (heads < NUM_KV_HEADS) & (d < HEAD_DIM)
                source += (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
                values = tl.load(source + heads * HEAD_DIM + d, mask=mask)
                if value_cache.dtype.element_ty == tl.float8e4nv:
                    scales = kv_scale + NUM_KV_HEADS + heads
                    values = to_e4m3(values, tl.load(scales, mask=heads < NUM_KV_HEADS, other=1.0))
                tl.store(value_cache + at + heads * stride_head + d, values, mask=mask)
                if WIDE_PAGE > 0:
                    to = wide_values + wide_at + heads * (WIDE_PAGE * HEAD_DIM) + d
                    tl.store(to, values.to(wide_values.dtype.element_ty), mask=mask & (wide_slot >= 0))


def rope_and_store(qkv: Tensor, positions: Tensor, args: RopeArgs, into: KVSlots) -> Tensor:
    """See `kernels.reference.rope_and_store`. Rows of qkv must be contiguous, the row stride is free.

    Queries for an e4m3 cache are float16 if qkv is bfloat16: attention multiplies them so.
    """
    num_heads, num_kv_heads, cos_sin, q_norm, k_norm = (
        args.num_heads, args.num_kv_heads, args.cos_sin, args.q_norm, args.k_norm,
    )  # fmt: skip
    key_cache, slots, kv_scale, wide = into.key_cache, into.slots, into.kv_scale, into.wide
    num_tokens, head_dim = len(qkv), qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    rotary_dim = head_dim if cos_sin is None else cos_sin.shape[1]
    assert qkv.stride(1) == key_cache.stride(3) == 1
    assert key_cache.stride() == into.value_cache.stride()
    assert (kv_scale is not None) == (key_cache.dtype == torch.float8_e4m3fn)
    assert wide is None or (kv_scale is not None and wide.pages.is_contiguous() and wide.slots.stride() == (1,))
    dtype = torch.float16 if kv_scale is not None and qkv.dtype == torch.bfloat16 else qkv.dtype
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype, device=qkv.device)
    if num_tokens:
        # A head's sum of squares has another order where a program takes more heads.
        is_many = num_tokens >= MANY and not FORMS.deterministic
        most = 2 * HEADS_PER_PROGRAM if is_many else HEADS_PER_PROGRAM
        heads = min(next_power_of_2(max(num_heads, num_kv_heads)), most)
        table = positions if cos_sin is None else cos_sin  # pointers that are not read take the place of None
        wide_keys, wide_values, wide_slots = (out, out, slots) if wide is None else (*wide.pages, wide.slots)
        _rope_kernel[(num_tokens, cdiv(num_heads, heads) + 2 * cdiv(num_kv_heads, heads))](
            qkv, positions, table, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            out, key_cache, into.value_cache, slots, slots if kv_scale is None else kv_scale,
            wide_keys, wide_values, wide_slots, args.eps,
            qkv.stride(0), table.stride(0), *key_cache.stride()[:3],
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY=rotary_dim,
            HALF_PAD=next_power_of_2(rotary_dim // 2),
            REST_PAD=next_power_of_2(max(head_dim - rotary_dim, 1)),
            D_PAD=next_power_of_2(head_dim), HEADS=heads,
            Q_NORM=q_norm is not None, K_NORM=k_norm is not None, ROTATE=cos_sin is not None,
            INTERLEAVED=args.interleaved, BLOCK_SIZE=key_cache.shape[2],
            WIDE_PAGE=0 if wide is None else wide.pages.shape[3], num_warps=4, **pdl_options(qkv.device),
        )  # fmt: skip
    return out
