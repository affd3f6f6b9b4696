"""Attention over cached latents in Triton; see `kernels.reference.latent`.

All heads read the same latents, so a tile's rows are (query, head) pairs and one load of a latent serves all of them,
as key and as value. Decoding divides each context among several programs, as many as the batch leaves multiprocessors
for, whatever the lengths; a second kernel joins their sums in fixed order.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.attention import NewLatents, PagedLatents
from kernels.data.plan import latent_tile_queries, latent_tile_rows
from kernels.gpu.device import num_multiprocessors
from kernels.gpu.launch import cdiv, next_power_of_2

MAX_SPLITS = 64
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated(source, table, i, mask, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second channels of the pairs i [..., R / 2] at `source`, rotated, in float32, and where they
    stand.
    """
    HALF: tl.constexpr = R // 2
    a = 2 * i if INTERLEAVED else i
    b = a + (1 if INTERLEAVED else HALF)
    first = tl.load(source + a, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + b, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(table + i, mask=i < HALF, other=0.0)
    sin = tl.load(table + HALF + i, mask=i < HALF, other=0.0)
    return first * cos - second * sin, second * cos + first * sin, a, b


@triton.jit
def _rotate_and_store_kernel(
    query, latent, norm_weight, positions, cos_sin, cache, slots, out, eps,
    stride_query_t, stride_query_h, stride_latent, stride_block, stride_slot, stride_table, stride_out_t, stride_out_h,
    H: tl.constexpr, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, AT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    L_PAD: tl.constexpr, HALF_PAD: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) stores token t's latent; program (t, 1 + i) rotates the i-th HEADS heads of its query.

    Rotated channels go to channels AT and further of `out`, which may be where they come from.
    """
    t = tl.program_id(0).to(tl.int64)
    table = cos_sin + tl.load(positions + t).to(tl.int64) * stride_table
    half = tl.arange(0, HALF_PAD)
    dtype: tl.constexpr = out.dtype.element_ty
    if tl.program_id(1) == 0:
        slot = tl.load(slots + t)
        if slot >= 0:
            source = latent + t * stride_latent
            target = cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
            c = tl.arange(0, L_PAD)
            x = tl.load(source + c, mask=c < L, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x) / L + eps)
            weight = tl.load(norm_weight + c, mask=c < L, other=0.0).to(tl.float32)
            tl.store(target + c, ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype), mask=c < L)
            first, second, a, b = _rotated(source + L, table, half, half < R // 2, R, INTERLEAVED)
            tl.store(target + L + a, first.to(dtype), mask=half < R // 2)
            tl.store(target + L + b, second.to(dtype), mask=half < R // 2)
    else:
        h = ((tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        mask = (h < H) & (half < R // 2)[None, :]
        source = query + t * stride_query_t + h * stride_query_h + N
        target = out + t * stride_out_t + h * stride_out_h + AT
        first, second, a, b = _rotated(source, table, half[None, :], mask, R, INTERLEAVED)
        tl.store(target + a, first.to(dtype), mask=mask)
        tl.store(target + b, second.to(dtype), mask=mask)


def absorb_and_store(query: Tensor, key_up: Tensor, new: NewLatents) -> Tensor:
    """See `kernels.reference.absorb_and_store`."""
    plain, size = key_up.shape[1:]
    out = query.new_empty(*query.shape[:2], new.latent.shape[1])
    rotate_into(query, new, out, plain, size)
    torch.bmm(query[..., :plain].transpose(0, 1), key_up, out=out[..., :size].transpose(0, 1))
    return out


def rotate_and_store(query: Tensor, new: NewLatents) -> None:
    """See `kernels.reference.rotate_and_store`."""
    plain = query.shape[2] - new.cos_sin.shape[1]
    rotate_into(query, new, query, plain, plain)


def rotate_into(query: Tensor, new: NewLatents, out: Tensor, plain: int, at: int) -> None:
    """Store the latents; rotate the query's channels from `plain` on, to those of `out` from `at` on."""
    num_tokens, num_heads, width = query.shape
    latent, cache, cos_sin = new.latent, new.cache, new.cos_sin
    size, rotary, heads = len(new.norm_weight), width - plain, 16
    assert query.stride(2) == out.stride(2) == latent.stride(1) == cache.stride(3) == cos_sin.stride(1) == 1
    _rotate_and_store_kernel[(num_tokens, 1 + cdiv(num_heads, heads))](
        query, latent, new.norm_weight, new.positions, cos_sin, cache, new.slot_mapping, out, new.eps,
        query.stride(0), query.stride(1), latent.stride(0), cache.stride(0), cache.stride(2), cos_sin.stride(0),
        out.stride(0), out.stride(1), H=num_heads, N=plain, L=size, R=rotary, AT=at,
        BLOCK_SIZE=cache.shape[2], L_PAD=next_power_of_2(size), HALF_PAD=next_power_of_2(rotary // 2), HEADS=heads,
        INTERLEAVED=new.interleaved, num_warps=4,
    )  # fmt: skip


@triton.jit
def _latent_attention_kernel(
    query, cache, block_tables, rows, query_start, context_lens, tiles, out, sums, scale,
    stride_query_t, stride_query_h, stride_block, stride_slot, stride_tables, stride_out_t, stride_out_h,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, PREFILL: tl.constexpr,
):  # fmt: skip
    """Program (tile, some HEADS heads, split): up to QUERIES queries of a sequence over a part of its context.

    With several splits `out` is [B, SPLITS, H, L] float32, and `sums` [B, SPLITS, H] gets the logarithm, to base 2, of
    the sum of the weights; -inf: the part is empty, and nothing is written to `out`.
    """
    if PREFILL:
        sequence = tl.load(tiles + 2 * tl.program_id(0))
        first = tl.load(tiles + 2 * tl.program_id(0) + 1)
        start = tl.load(query_start + sequence)
        length = tl.load(query_start + sequence + 1) - start
    else:
        sequence, first, start, length = tl.program_id(0), 0, tl.program_id(0), 1
    context = tl.load(context_lens + sequence)
    r = tl.arange(0, M)
    q = first + r // HEADS
    h = tl.program_id(1) * HEADS + r % HEADS
    valid = (r < QUERIES * HEADS) & (q < length) & (h < H)
    c, d = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    at = query + (start + q).to(tl.int64)[:, None] * stride_query_t + h[:, None] * stride_query_h
    x = tl.load(at + c[None, :], mask=valid[:, None] & (c < L)[None, :], other=0.0)
    x_rotated = tl.load(at + L + d[None, :], mask=valid[:, None] & (d < R)[None, :], other=0.0)
    position = context - length + q
    end = context - length + tl.minimum(first + QUERIES, length)
    split = tl.program_id(2)
    part = tl.cdiv(tl.cdiv(end, KEYS), SPLITS) * KEYS
    begin, end = split * part, tl.minimum(split * part + part, end)
    table = block_tables + tl.load(rows + sequence).to(tl.int64) * stride_tables
    acc = tl.zeros([M, L_PAD], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for n in range(begin, end, KEYS):
        k = n + tl.arange(0, KEYS)
        block = tl.load(table + k // BLOCK_SIZE, mask=k < end, other=0).to(tl.int64)
        slot = cache + block * stride_block + (k % BLOCK_SIZE) * stride_slot
        key = tl.load(slot[:, None] + c[None, :], mask=(k < end)[:, None] & (c < L)[None, :], other=0.0)
        rotated = tl.load(slot[:, None] + L + d[None, :], mask=(k < end)[:, None] & (d < R)[None, :], other=0.0)
        scores = tl.dot(x_rotated, rotated.T, input_precision="ieee")
        scores = tl.dot(x, key.T, scores, input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where((k[None, :] <= position[:, None]) & (k < end)[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # a row's first keys may all be later ones
        decay = tl.exp2(largest - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(key.dtype), key, acc * decay[:, None], input_precision="ieee")
        largest = new
    safe_total = tl.where(total > 0, total, 1.0)
    result = acc / safe_total[:, None]
    if SPLITS == 1:
        target = out + (start + q).to(tl.int64)[:, None] * stride_out_t + h[:, None] * stride_out_h
        tl.store(target + c[None, :], result.to(out.dtype.element_ty), mask=valid[:, None] & (c < L)[None, :])
    else:
        row = (sequence * SPLITS + split).to(tl.int64) * H + h
        tl.store(sums + row, tl.where(total > 0, largest + tl.log2(safe_total), float("-inf")), mask=valid)
        target = out + row[:, None] * L + c[None, :]
        tl.store(target, result, mask=(valid & (total > 0))[:, None] & (c < L)[None, :])


@triton.jit
def _join_kernel(
    parts, sums, out, stride_out_t, stride_out_h,
    H: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Program (b, h): out [b, h] from the parts' weighted means; 0 where all are empty."""
    b, h = tl.program_id(0), tl.program_id(1)
    c, s = tl.arange(0, L_PAD), tl.arange(0, SPLITS_PAD)
    row = b.to(tl.int64) * SPLITS * H + h
    logs = tl.load(sums + row + s * H, mask=s < SPLITS, other=float("-inf"))
    largest = tl.max(logs)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(logs - largest))
    acc = tl.zeros([L_PAD], tl.float32)
    for split in range(SPLITS):
        log = tl.load(sums + row + split * H + tl.zeros([L_PAD], tl.int32))
        part = tl.load(parts + (row + split * H) * L + c, mask=(c < L) & (log > float("-inf")), other=0.0)
        acc += part * tl.exp2(log - largest)
    acc /= tl.where(total > 0, total, 1.0)
    tl.store(out + b.to(tl.int64) * stride_out_t + h * stride_out_h + c, acc.to(out.dtype.element_ty), mask=c < L)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The queries of a launch that has several of a sequence."""

    query_start: Tensor
    tiles: Tensor


def _attend(
    query: Tensor, latents: PagedLatents, prefill: _Prefill | None, scale: float, out: Tensor, sums: Tensor | None,
    grid: tuple[int, int, int],
) -> None:  # fmt: skip
    """Into `out` [T, H, L], or with `sums` the parts of several splits."""
    num_heads, width = query.shape[1:]
    size, cache, rows = out.shape[-1], latents.cache, latents.rows
    heads = min(num_heads, latent_tile_rows(query.dtype))
    queries = latent_tile_queries(num_heads, query.dtype) if prefill else 1
    assert query.stride(2) == cache.stride(3) == out.stride(-1) == latents.block_tables.stride(1) == 1
    wide = query.element_size() == 4
    _latent_attention_kernel[grid](
        query, cache, latents.block_tables, rows, prefill.query_start if prefill else rows, latents.lens,
        prefill.tiles if prefill else rows, out, rows if sums is None else sums, scale, query.stride(0),
        query.stride(1), cache.stride(0), cache.stride(2), latents.block_tables.stride(0), out.stride(0),
        out.stride(-2), H=num_heads, L=size, R=width - size, L_PAD=next_power_of_2(size),
        R_PAD=max(next_power_of_2(width - size), 16), BLOCK_SIZE=cache.shape[2],
        M=max(next_power_of_2(queries * heads), 16), HEADS=heads, QUERIES=queries, KEYS=16 if wide else 32,
        SPLITS=grid[2], PREFILL=prefill is not None, num_warps=8, num_stages=1 if wide else 2,
    )  # fmt: skip


def latent_decode(query: Tensor, latents: PagedLatents, scale: float, out: Tensor) -> None:
    """Compute `latent_attention_decode` into `out`, with each context split among several programs."""
    num_seqs, num_heads, size = out.shape
    groups = cdiv(num_heads, latent_tile_rows(query.dtype))
    splits = max(min(2 * num_multiprocessors(query.device) // (num_seqs * groups), MAX_SPLITS), 1)
    grid = (num_seqs, groups, splits)
    if splits == 1:
        _attend(query, latents, None, scale, out, None, grid)
        return
    parts = query.new_empty(num_seqs, splits, num_heads, size, dtype=torch.float32)
    sums = query.new_empty(num_seqs, splits, num_heads, dtype=torch.float32)
    _attend(query, latents, None, scale, parts, sums, grid)
    _join_kernel[(num_seqs, num_heads)](
        parts, sums, out, out.stride(0), out.stride(1), H=num_heads, L=size, L_PAD=next_power_of_2(size),
        SPLITS=splits, SPLITS_PAD=next_power_of_2(splits), num_warps=4,
    )  # fmt: skip


def latent_prefill(
    query: Tensor, query_start: Tensor, latents: PagedLatents, tiles: Tensor, scale: float, out: Tensor
) -> None:
    """Compute `latent_attention_prefill` into `out`."""
    grid = (len(tiles), cdiv(query.shape[1], latent_tile_rows(query.dtype)), 1)
    _attend(query, latents, _Prefill(query_start, tiles), scale, out, None, grid)
