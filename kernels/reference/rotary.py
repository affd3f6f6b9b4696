"""Rotary embedding of queries and keys, and their way into the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.data.kv_cache import KVSlots, RopeArgs
from kernels.reference.kv_cache import store_kv, to_e4m3
from kernels.reference.norm import rms_norm
from kernels.reference.precision import to_wide


def rotate(heads: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """heads [T, N, D] -> [T, N, D]: rotation of the first R = cos_sin.shape[1] channels by each token's position.

    Pairs are channels i and i + R / 2, or, interleaved, 2i and 2i + 1.
    """
    rotary_dim = cos_sin.shape[1]
    table = cos_sin[positions].unsqueeze(1)  # [T, 1, rotary_dim]
    wide = to_wide(heads)
    if wide.dtype != table.dtype:
        table = table.to(wide.dtype)
    cos, sin = table.chunk(2, -1)
    out = torch.empty_like(wide)
    (first, second), rotated = (
        (x[..., :rotary_dim:2], x[..., 1:rotary_dim:2]) if interleaved else x[..., :rotary_dim].chunk(2, -1)
        for x in (wide, out)
    )
    torch.mul(first, cos, out=rotated[0]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[1]).addcmul_(first, sin)
    if rotary_dim < heads.shape[-1]:
        out[..., rotary_dim:] = wide[..., rotary_dim:]
    return out.to(heads.dtype)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, Hkv, D] -> (q, k): RMSNorm of each head where a weight [D] is given, then rotation.

    positions [T] int32 or int64; cos_sin [max_position, rotary_dim] float32, its first half cosines and its second half
    sines, or None for no rotation. Only the first rotary_dim channels of a head rotate, by pairs of channels i and
    i + rotary_dim / 2, or, interleaved, 2i and 2i + 1.
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if cos_sin is not None:
        q, k = rotate(q, positions, cos_sin, interleaved), rotate(k, positions, cos_sin, interleaved)
    return q, k


def rope_and_store(qkv: Tensor, positions: Tensor, args: RopeArgs, into: KVSlots) -> Tensor:
    """qkv [T, (H + 2 * Hkv) * D] -> query [T, H, D], normed and rotated as `rope` does; K and V go to their slots.

    The query has qkv's dtype, or, for an e4m3 cache, that in which a backend multiplies with it. positions [T] int32 or
    int64.
    """
    num_heads, num_kv_heads, cos_sin = args.num_heads, args.num_kv_heads, args.cos_sin
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if args.q_norm is None and args.k_norm is None and cos_sin is not None:  # one rotation serves queries and keys
        rotated = rotate(heads[:, : num_heads + num_kv_heads], positions, cos_sin, args.interleaved)
        query, key = rotated.split((num_heads, num_kv_heads), 1)
    else:
        query, key = rope(query, key, positions, cos_sin, args.q_norm, args.k_norm, args.eps, args.interleaved)
    store_kv(key, value, into.key_cache, into.value_cache, into.slots, into.kv_scale)
    if into.wide is not None:
        assert into.kv_scale is not None
        pages, slots = into.wide.pages, into.wide.slots.masked_fill(into.slots < 0, -1)
        keys, values = (to_e4m3(x, scale).to(pages.dtype) for x, scale in zip((key, value), into.kv_scale, strict=True))
        store_kv(keys, values, pages[0], pages[1], slots)
    return query
