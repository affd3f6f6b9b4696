"""Attention over the paged KV cache, one sequence at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.data.attention import AttentionArgs, PagedContext
from kernels.data.quantized_rows import QuantizedRows
from kernels.reference.precision import to_wide, wide_dtype
from kernels.reference.quantized import quantize_rows


def _read(cache: Tensor, table: Tensor, positions: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return keys or values [N, Hkv, D] in `dtype` at positions [N] of the sequence with this block table."""
    fp8, block_size = cache.dtype == torch.float8_e4m3fn, cache.shape[2]
    assert scale is not None or not fp8
    slots = (table[positions // block_size].long(), slice(None), positions % block_size)
    if scale is None:
        return cache[slots].to(dtype)
    codes = cache.view(torch.uint8)[slots].view(cache.dtype) if fp8 else cache[slots]
    return (codes.float() * scale.unsqueeze(1)).to(dtype)


def paged_attention_decode(
    query: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    plan: object = None,
    out: Tensor | QuantizedRows | None = None,
) -> Tensor:
    """Compute the attention of one query token per sequence over its paged context -> [B, H, D], in `out` if given.

    query [B, H, D]. A context length of 0 gives 0. In a `QuantizedRows` [B, H D] it is quantised, with a scale for each
    head, and the codes are returned. plan: the GPU kernel's work map.
    """
    query_start = torch.arange(len(query) + 1, dtype=torch.int32)
    if isinstance(out, QuantizedRows):
        exact = paged_attention_decode(query, context, args)
        codes, scales = quantize_rows(exact.flatten(0, 1), out.codes.dtype)
        out.scale[: len(query)] = scales.view(exact.shape[:2])
        return out.codes.unflatten(1, exact.shape[1:])[: len(query)].copy_(codes.view(exact.shape))
    return paged_attention_prefill(query, query_start, context, args, out=out)


def paged_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute attention of each sequence's newest tokens over its paged context -> [T, H, D], in `out` if given.

    query [T, H, D]; query_start [B + 1] int32. Sequence i has the tokens query[query_start[i]:query_start[i + 1]], the
    last ones of its context, whose K and V are all stored. Rows of `out` outside all sequences are not written. tiles:
    the GPU kernel's grid.
    """
    if out is None:
        out = torch.zeros_like(query)
    starts = query_start.tolist()
    sequences = zip(context.rows.tolist(), starts[:-1], starts[1:], context.lens.tolist(), strict=True)
    for row, start, end, length in sequences:
        if length == 0:
            out[start:end] = 0
        else:
            out[start:end] = _attend(query[start:end], context, context.block_tables[row], length, args).to(out.dtype)
    return out


def _attend(query: Tensor, context: PagedContext, table: Tensor, length: int, args: AttentionArgs) -> Tensor:
    """Compute the attention of the last tokens [n, H, D] of a sequence of `length` tokens -> [n, H, D]."""
    dtype, num_heads = wide_dtype(query), query.shape[1]
    group = num_heads // context.key_cache.shape[1]
    first = length - len(query)  # the first query's position
    oldest = max(first + 1 - args.window, 0) if args.window else 0
    positions = torch.arange(oldest, length)
    distance = torch.arange(first, length).unsqueeze(1) - positions  # [n, N]
    seen = distance >= 0 if args.causal else torch.ones_like(distance, dtype=torch.bool)
    bias = None
    if args.distance_bias is not None:
        reach = args.distance_bias.shape[1] // 2
        bias = args.distance_bias.to(dtype)[:, (-distance).clamp(-reach, reach) + reach]  # [H, n, N]
    distance = distance.abs()
    if args.window:
        seen = seen & (distance < args.window)
    if args.sparse is not None:
        seen = seen & args.sparse.seen(torch.arange(first, length), positions, torch.arange(num_heads))  # [H, n, N]
    scales = (None, None) if args.kv_scale is None else args.kv_scale
    key, value = (
        _read(cache, table, positions, x, dtype).repeat_interleave(group, 1).transpose(0, 1)
        for cache, x in zip((context.key_cache, context.value_cache), scales, strict=True)
    )  # [H, N, D]
    scores = to_wide(query).transpose(0, 1) @ key.mT * args.scale  # [H, n, N]
    if args.soft_cap:
        scores = args.soft_cap * (scores / args.soft_cap).tanh()
    if args.alibi_slopes is not None:
        scores = scores - args.alibi_slopes.to(dtype).view(-1, 1, 1) * distance
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    if args.sinks is not None:
        sink = args.sinks.to(dtype).view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(positions)]
    return (weights @ value).transpose(0, 1)
