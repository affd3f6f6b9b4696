"""Scores by which tokens choose earlier ones in Triton; see `kernels.reference.index`."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.attention import NewIndexKeys, PagedLatents
from kernels.gpu.launch import cdiv, next_power_of_2

KEYS = 128  # of a tile


@triton.jit
def _normed(source, weight, bias, i, mask, mean, scale):
    x = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
    return (x - mean) * scale * tl.load(weight + i, mask=mask, other=0.0) + tl.load(bias + i, mask=mask, other=0.0)


@triton.jit
def _store_kernel(
    query, key, norm_weight, norm_bias, positions, cos_sin, cache, slots, eps,
    stride_query_t, stride_query_h, stride_key, stride_block, stride_slot, stride_table,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_SIZE: tl.constexpr, D_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) stores token t's key; program (t, 1 + i) rotates the i-th HEADS heads of its query."""
    t = tl.program_id(0).to(tl.int64)
    table = cos_sin + tl.load(positions + t).to(tl.int64) * stride_table
    half = tl.arange(0, HALF_PAD)
    a = 2 * half if INTERLEAVED else half
    b = a + (1 if INTERLEAVED else R // 2)
    rotates = half < R // 2
    cos = tl.load(table + half, mask=rotates, other=0.0)
    sin = tl.load(table + R // 2 + half, mask=rotates, other=0.0)
    dtype: tl.constexpr = cache.dtype.element_ty
    if tl.program_id(1) == 0:
        slot = tl.load(slots + t)
        if slot >= 0:
            source = key + t * stride_key
            target = cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
            c = tl.arange(0, D_PAD)
            x = tl.load(source + c, mask=c < D, other=0.0).to(tl.float32)
            mean = tl.sum(x) / D
            off = tl.where(c < D, x - mean, 0.0)
            scale = tl.rsqrt(tl.sum(off * off) / D + eps)
            y = _normed(source, norm_weight, norm_bias, c, c < D, mean, scale)
            tl.store(target + c, y.to(dtype), mask=(c >= R) & (c < D))
            first = _normed(source, norm_weight, norm_bias, a, rotates, mean, scale)
            second = _normed(source, norm_weight, norm_bias, b, rotates, mean, scale)
            tl.store(target + a, (first * cos - second * sin).to(dtype), mask=rotates)
            tl.store(target + b, (second * cos + first * sin).to(dtype), mask=rotates)
    else:
        h = ((tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        mask = (h < H) & rotates[None, :]
        at = query + t * stride_query_t + h * stride_query_h
        first = tl.load(at + a[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + b[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(at + a[None, :], (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(at + b[None, :], (second * cos + first * sin).to(dtype), mask=mask)


def store_index_keys(query: Tensor, new: NewIndexKeys) -> None:
    """See `kernels.reference.store_index_keys`."""
    num_tokens, num_heads, size = query.shape
    key, cache, cos_sin, heads = new.key, new.cache, new.cos_sin, 16
    assert query.stride(2) == key.stride(1) == cache.stride(3) == cos_sin.stride(1) == 1
    assert query.dtype == cache.dtype
    _store_kernel[(num_tokens, 1 + cdiv(num_heads, heads))](
        query, key, new.norm_weight, new.norm_bias, new.positions, cos_sin, cache, new.slot_mapping, new.eps,
        query.stride(0), query.stride(1), key.stride(0), cache.stride(0), cache.stride(2), cos_sin.stride(0),
        H=num_heads, D=size, R=cos_sin.shape[1], BLOCK_SIZE=cache.shape[2], D_PAD=next_power_of_2(size),
        HALF_PAD=next_power_of_2(cos_sin.shape[1] // 2), HEADS=heads, INTERLEAVED=new.interleaved, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scores_kernel(
    query, weights, cache, block_tables, rows, lens, out,
    stride_query_t, stride_query_h, stride_weights, stride_block, stride_slot, stride_tables, stride_out,
    H: tl.constexpr, D: tl.constexpr, H_PAD: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Program (tile of KEYS keys, token): their scores, -inf from the token's length on."""
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    seen = tl.load(lens + t)
    target = out + t * stride_out + n
    if tl.program_id(0) * KEYS >= seen:
        tl.store(target, tl.full([KEYS], float("-inf"), tl.float32))
    else:
        h, c = tl.arange(0, H_PAD), tl.arange(0, D_PAD)
        at = query + t * stride_query_t + h[:, None] * stride_query_h + c[None, :]
        x = tl.load(at, mask=(h < H)[:, None] & (c < D)[None, :], other=0.0)
        weight = tl.load(weights + t * stride_weights + h, mask=h < H, other=0.0).to(tl.float32)
        table = block_tables + tl.load(rows + t).to(tl.int64) * stride_tables
        block = tl.load(table + n // BLOCK_SIZE, mask=n < seen, other=0).to(tl.int64)
        slot = cache + block * stride_block + (n % BLOCK_SIZE) * stride_slot
        key = tl.load(slot[:, None] + c[None, :], mask=(n < seen)[:, None] & (c < D)[None, :], other=0.0)
        products = tl.maximum(tl.dot(x, key.T, input_precision="ieee"), 0.0)
        scores = tl.sum(products * weight[:, None], 0)
        tl.store(target, tl.where(n < seen, scores, float("-inf")))


def index_scores(query: Tensor, weights: Tensor, keys: PagedLatents, max_len: int) -> Tensor:
    """See `kernels.reference.index_scores`."""
    num_tokens, num_heads, size = query.shape
    cache, tables = keys.cache, keys.block_tables
    out = query.new_empty(num_tokens, max_len, dtype=torch.float32)
    assert query.stride(2) == weights.stride(1) == cache.stride(3) == tables.stride(1) == 1
    _scores_kernel[(max_len // KEYS, num_tokens)](
        query, weights, cache, tables, keys.rows, keys.lens, out, query.stride(0), query.stride(1), weights.stride(0),
        cache.stride(0), cache.stride(2), tables.stride(0), out.stride(0), H=num_heads, D=size,
        H_PAD=max(next_power_of_2(num_heads), 16), D_PAD=max(next_power_of_2(size), 16), BLOCK_SIZE=cache.shape[2],
        KEYS=KEYS, num_warps=4,
    )  # fmt: skip
    return out
