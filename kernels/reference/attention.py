"""Attention over the paged KV cache, one sequence at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.data.block_sparse import BlockSparse
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
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sparse: BlockSparse | None = None,
    kv_scale: Tensor | None = None,
    plan: object = None,
    out: Tensor | QuantizedRows | None = None,
) -> Tensor:
    """Compute the attention of one query token per sequence over its paged context -> [B, H, D], in `out` if given.

    In a `QuantizedRows` [B, H D] it is rounded, with a scale for each head, and the codes are returned.

    query [B, H, D]; key_cache, value_cache [num_blocks, Hkv, block_size, D]; block_tables [R, max_blocks] int32, of which
    sequence i uses row rows[i] (rows [B] int32). context_lens [B] int32 include the query's own token, whose K and V are
    already stored; a context length of 0 gives 0. window w > 0: only keys at distance < w. soft_cap c > 0: scores become
    c * tanh(score / c). alibi_slopes [H] float32: adds slope * -distance. sinks [H] float32: an additional score per head
    that takes part in the softmax without a value. sparse: the blocks of keys that are attended to. plan: the GPU kernel's
    work map.
    """
    query_start = torch.arange(len(query) + 1, dtype=torch.int32)
    if isinstance(out, QuantizedRows):
        exact = paged_attention_decode(
            query, key_cache, value_cache, block_tables, rows, context_lens, scale=scale, window=window, soft_cap=soft_cap,
            alibi_slopes=alibi_slopes, sinks=sinks, sparse=sparse, kv_scale=kv_scale,
        )  # fmt: skip
        codes, scales = quantize_rows(exact.flatten(0, 1), out.codes.dtype)
        out.scale[: len(query)] = scales.view(exact.shape[:2])
        return out.codes.unflatten(1, exact.shape[1:])[: len(query)].copy_(codes.view(exact.shape))
    return paged_attention_prefill(
        query, key_cache, value_cache, block_tables, rows, query_start, context_lens, scale=scale, window=window,
        soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, sparse=sparse, kv_scale=kv_scale, out=out,
    )  # fmt: skip


def paged_attention_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sparse: BlockSparse | None = None,
    kv_scale: Tensor | None = None,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of each sequence's newest tokens over its paged context -> [T, H, D], in `out` if given.

    query [T, H, D]. Sequence i has the tokens query[query_start[i]:query_start[i + 1]], the last ones of its
    context_lens[i] tokens, whose K and V are all stored. Rows of `out` outside all sequences are not written. query_start
    [B + 1] int32; other arguments as in `paged_attention_decode`. tiles: the GPU kernel's grid.
    """
    if out is None:
        out = torch.zeros_like(query)
    dtype, group = wide_dtype(query), query.shape[1] // key_cache.shape[1]
    key_scale, value_scale = (None, None) if kv_scale is None else kv_scale
    starts = query_start.tolist()
    for row, start, end, context in zip(rows.tolist(), starts[:-1], starts[1:], context_lens.tolist(), strict=True):
        if context == 0:
            out[start:end] = 0
            continue
        first = context - (end - start)  # the first query's position
        oldest = max(first + 1 - window, 0) if window else 0
        positions = torch.arange(oldest, context)
        distance = torch.arange(first, context).unsqueeze(1) - positions  # [n, N]
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        if sparse is not None:
            heads = torch.arange(query.shape[1])
            seen = seen & sparse.seen(torch.arange(first, context), positions, heads)  # [H, n, N]
        key, value = (
            _read(cache, block_tables[row], positions, x, dtype).repeat_interleave(group, 1).transpose(0, 1)
            for cache, x in ((key_cache, key_scale), (value_cache, value_scale))
        )  # [H, N, D]
        scores = to_wide(query[start:end]).transpose(0, 1) @ key.mT * scale  # [H, n, N]
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.to(dtype).view(-1, 1, 1) * distance
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            sink = sinks.to(dtype).view(-1, 1, 1).expand(-1, end - start, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : len(positions)]
        out[start:end] = (weights @ value).transpose(0, 1).to(out.dtype)
    return out
