"""Paged attention in pieces that stay in a core's cache, by PyTorch's fused attention where it computes the case."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.data.attention import AttentionArgs, KnownArgs, PagedContext
from kernels.data.block_sparse import BlockSparse
from kernels.reference.precision import to_wide, wide_dtype

MASK_ELEMENTS = 1 << 22  # the largest attention mask (or score matrix) made at once
GATHER_ELEMENTS = 1 << 18  # the most keys' elements copied out of the cache at once: they should stay in a core's cache

KNOWN = KnownArgs("window", "soft_cap", "alibi_slopes", "sinks", "sparse", "kv_scale", "causal")
FUSED = KnownArgs("window", "kv_scale", "causal")  # what PyTorch's fused attention computes, the window by a mask


def _by_head(query: Tensor, num_kv_heads: int, args: AttentionArgs) -> AttentionArgs:
    """Return the arguments with values by head in the wide dtype: [Hkv, H / Hkv]."""
    slopes, sinks = (
        None if x is None else x.to(wide_dtype(query)).view(num_kv_heads, -1) for x in (args.alibi_slopes, args.sinks)
    )
    return replace(args, alibi_slopes=slopes, sinks=sinks)


def _seen(sparse: BlockSparse, newest: Tensor, keys: Tensor, num_kv_heads: int, num_heads: int) -> Tensor:
    """Return which keys at positions [N] are in blocks that queries at positions [n] see: bool [Hkv, G, n, N]."""
    return sparse.seen(newest, keys, torch.arange(num_heads)).unflatten(0, (num_kv_heads, -1))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: AttentionArgs, sinks: Tensor | None
) -> Tensor:
    """softmax(cap(query keyᵀ scale) + mask) value, where the sinks take part in the sum.

    query [A, B, M, D]; key, value [A, B, N, D]; mask bool (True: attend) or additive, broadcast to [A, B, M, N]; sinks
    broadcast to [A, B, M, 1].
    """
    if not how.soft_cap and sinks is None and (mask is None or mask.dtype in (torch.bool, query.dtype)):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=how.scale)
    scores = (to_wide(query) @ to_wide(key).transpose(-1, -2)).mul_(how.scale)
    if how.soft_cap:
        scores = scores.div_(how.soft_cap).tanh_().mul_(how.soft_cap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
    return (weights @ to_wide(value)).to(query.dtype)


def _gather(
    context: PagedContext, blocks: Tensor, heads: range, kv_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copies of some KV heads of blocks [B, n] of the caches -> keys, values [len(heads), B, n * block_size, D].

    A head's piece of a block must be contiguous, and blocks and heads multiples of that apart. Those with scales are
    made `dtype`, times their scales.
    """
    key_cache, value_cache = context.key_cache, context.value_cache
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    assert kv_scale is not None or not fp8
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    piece = block_size * head_dim
    apart, heads_apart = (stride // piece for stride in key_cache.stride()[:2])
    assert key_cache.stride() == value_cache.stride() == (apart * piece, heads_apart * piece, head_dim, 1)
    head_ids = torch.arange(heads.start, heads.stop, dtype=blocks.dtype).unsqueeze(1)
    wanted = (
        blocks.flatten() * apart + head_ids * heads_apart
    ).flatten()  # the pieces of (block, head) pairs, head-major
    shape = (len(heads), len(blocks), -1, head_dim)

    def gathered(cache: Tensor) -> Tensor:
        count = (num_blocks - 1) * apart + (num_kv_heads - 1) * heads_apart + 1
        pieces = cache.as_strided((count, piece), (piece, 1))
        return pieces.index_select(0, wanted).view(shape)

    if kv_scale is None:
        return gathered(key_cache), gathered(value_cache)
    key, value = (
        (gathered(cache.view(torch.uint8)).view(cache.dtype) if fp8 else gathered(cache)).float()
        .mul_(scale[heads.start : heads.stop].view(-1, 1, 1, 1)).to(dtype)
        for cache, scale in zip((key_cache, value_cache), kv_scale, strict=True)
    )  # fmt: skip
    return key, value


def _decode_one(query: Tensor, context: PagedContext, table: Tensor, context_len: int, how: AttentionArgs) -> Tensor:
    """`paged_attention_decode` for one sequence: query [H, D], table [max_blocks] -> [H, D]."""
    num_kv_heads, block_size, head_dim = context.key_cache.shape[1:]
    oldest = max(context_len - how.window, 0) if how.window else 0
    first_block = oldest // block_size
    blocks = table[first_block : -(-context_len // block_size)].unsqueeze(0)
    seen = slice(oldest - first_block * block_size, context_len - first_block * block_size)
    num_heads = len(query)
    query = query.view(num_kv_heads, 1, -1, head_dim)
    slopes, distance = how.alibi_slopes, torch.arange(oldest - context_len + 1, 1)
    bias = None if slopes is None else slopes[:, None, :, None] * distance
    sinks = None if how.sinks is None else how.sinks[:, None, :, None]
    if how.sparse is not None:
        newest, keys = torch.tensor([context_len - 1]), torch.arange(oldest, context_len)
        in_blocks = _seen(how.sparse, newest, keys, num_kv_heads, num_heads).transpose(1, 2)  # [Hkv, 1, G, N]
        bias = in_blocks if bias is None else bias.masked_fill(~in_blocks, -math.inf)
    step = max(GATHER_ELEMENTS // (blocks.shape[1] * block_size * head_dim), 1)
    out = []
    for start in range(0, num_kv_heads, step):
        heads = range(start, min(start + step, num_kv_heads))
        key, value = _gather(context, blocks, heads, how.kv_scale, query.dtype)
        mask, sink = (None if x is None else x[heads.start : heads.stop] for x in (bias, sinks))
        out.append(_attend(query[heads.start : heads.stop], key[:, :, seen], value[:, :, seen], mask, how, sink))
    return (out[0] if len(out) == 1 else torch.cat(out)).view(-1, head_dim)


def _decode_groups(num_blocks: list[int], most: int) -> list[list[int]]:
    """The sequences in groups that pad to less than twice their size, and to at most `most` blocks if more than one."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(num_blocks)), key=num_blocks.__getitem__, reverse=True):
        if num_blocks[i] == 0:
            break
        if not groups or 2 * num_blocks[i] <= longest or (len(groups[-1]) + 1) * longest > most:
            groups.append([])
            longest = num_blocks[i]
        groups[-1].append(i)
    return groups


def paged_attention_decode(
    query: Tensor, context: PagedContext, args: AttentionArgs, *, plan: object = None, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.paged_attention_decode`."""
    if not KNOWN.cover(args):
        return reference.paged_attention_decode(query, context, args, out=out)
    num_kv_heads, block_size, head_dim = context.key_cache.shape[1:]
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype)
    how = _by_head(query, num_kv_heads, args)
    rows, lens = context.rows, context.lens.tolist()
    first_blocks = [max(n - args.window, 0) // block_size if args.window else 0 for n in lens]
    num_blocks = [-(-n // block_size) - first for n, first in zip(lens, first_blocks, strict=True)]
    for group in _decode_groups(num_blocks, GATHER_ELEMENTS // (num_kv_heads * block_size * head_dim)):
        if len(group) == 1:
            i = group[0]
            out[i] = _decode_one(query[i], context, context.block_tables[int(rows[i])], lens[i], how)
            continue
        members = torch.tensor(group)
        first, count = (torch.tensor([x[i] for i in group]).unsqueeze(1) for x in (first_blocks, num_blocks))
        columns = torch.minimum(torch.arange(num_blocks[group[0]]), count - 1) + first  # padding repeats the last block
        blocks = context.block_tables[rows[members].unsqueeze(1), columns]
        out[members] = _decode_group(query[members], context, blocks, context.lens[members], first * block_size, how)
    if 0 in lens:
        out[context.lens == 0] = 0
    return out


def _decode_group(
    query: Tensor, context: PagedContext, blocks: Tensor, lens: Tensor, origins: Tensor, how: AttentionArgs
) -> Tensor:
    """`paged_attention_decode` for b sequences: query [b, H, D] -> [b, H, D].

    blocks [b, n]: those that a sequence sees, padded; lens [b]; origins [b, 1]: positions of the first slots of blocks.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, window = context.key_cache.shape[1], how.window
    key, value = _gather(context, blocks, range(num_kv_heads), how.kv_scale, query.dtype)  # [Hkv, b, S, D]
    distance = lens.unsqueeze(1) - 1 - origins - torch.arange(key.shape[2])  # [b, S]
    unused = (distance < 0).nonzero(as_tuple=True)
    if len(unused[0]):  # never-written slots must not reach a product, whatever its other factor
        key[:, unused[0], unused[1]] = 0
        value[:, unused[0], unused[1]] = 0
    mask = ((distance >= 0) & (distance < window) if window else distance >= 0)[None, :, None]  # [1, b, 1, S]
    if how.sparse is not None:
        newest, keys = lens.unsqueeze(1) - 1, torch.arange(key.shape[2]) + origins
        each = [_seen(how.sparse, *pair, num_kv_heads, num_heads) for pair in zip(newest, keys, strict=True)]
        mask = mask & torch.cat(each, 2).transpose(1, 2)  # [Hkv, b, G, S]
    if how.alibi_slopes is not None:
        bias = how.alibi_slopes[:, None, :, None] * -distance[None, :, None]  # [Hkv, b, G, S]
        mask = bias.masked_fill_(~mask, -math.inf)
    q = query.view(len(query), num_kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, b, G, D]
    attended = _attend(q, key, value, mask, how, None if how.sinks is None else how.sinks[:, None, :, None])
    return attended.transpose(0, 1).reshape(query.shape)


def _prefill_one(
    query: Tensor, context: PagedContext, table: Tensor, length: int, how: AttentionArgs, out: Tensor
) -> None:
    """`paged_attention_prefill` for one sequence of `length` tokens: query, out [n, H, D], table [max_blocks]."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, block_size = context.key_cache.shape[1:3]
    group, window = num_heads // num_kv_heads, how.window
    computed = length - num_queries  # the context before the first query
    first_block = max(computed + 1 - window, 0) // block_size if window else 0
    origin = first_block * block_size
    blocks = table[first_block : -(-length // block_size)].unsqueeze(0)
    kv = _gather(context, blocks, range(num_kv_heads), how.kv_scale, query.dtype)
    key, value = (x[:, :, : length - origin].expand(-1, group, -1, -1) for x in kv)  # [Hkv, G, N, D]
    q = query.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    windowed, is_fused = 0 < window < length, FUSED.cover(how)
    if computed == 0 and not windowed and is_fused:
        attended = F.scaled_dot_product_attention(q, key, value, is_causal=how.causal, scale=how.scale)
        out[:] = attended.permute(2, 0, 1, 3).reshape(out.shape)
        return
    sinks = None if how.sinks is None else how.sinks[:, :, None, None]
    score_rows = 1 if is_fused else num_heads
    step = min(max(MASK_ELEMENTS // (score_rows * key.shape[2]), 16), 256)
    for low in range(0, num_queries, step):
        high = min(low + step, num_queries)
        newest = torch.arange(computed + low, computed + high).unsqueeze(1)  # the queries' positions
        oldest, end = max(computed + low + 1 - window, 0) if windowed else 0, computed + high
        if not how.causal:
            end = min(end + window - 1, length) if windowed else length
        distance = newest - torch.arange(oldest, end)
        seen = distance >= 0 if how.causal else torch.ones_like(distance, dtype=torch.bool)
        distance = distance.abs()
        if windowed:
            seen = seen & (distance < window)
        if how.sparse is not None:
            keys_at = torch.arange(oldest, end)
            seen = seen & _seen(how.sparse, newest.flatten(), keys_at, num_kv_heads, num_heads)
        mask = None if high - low == 1 and how.sparse is None and how.causal else seen
        if how.alibi_slopes is not None:
            mask = (how.alibi_slopes[:, :, None, None] * -distance).masked_fill_(~seen, -math.inf)
        keys = slice(oldest - origin, end - origin)
        attended = _attend(q[:, :, low:high], key[:, :, keys], value[:, :, keys], mask, how, sinks)
        out[low:high] = attended.permute(2, 0, 1, 3).reshape(high - low, num_heads, head_dim)


def paged_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_prefill`."""
    if not KNOWN.cover(args):
        return reference.paged_attention_prefill(query, query_start, context, args, out=out)
    if out is None:
        out = torch.zeros(query.shape, dtype=query.dtype)
    starts = query_start.tolist()
    how = _by_head(query, context.key_cache.shape[1], args)
    sequences = zip(context.rows.tolist(), starts[:-1], starts[1:], context.lens.tolist(), strict=True)
    for row, start, end, length in sequences:
        if length == 0:
            out[start:end] = 0
        elif start < end:
            _prefill_one(query[start:end], context, context.block_tables[row], length, how, out[start:end])
    return out
