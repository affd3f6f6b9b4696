"""Attention over latents: one short vector of each token, of which the keys and values of all heads are projections.

A head's key is key_up · latent, so its score with a query is the latent's with queryᵀ · key_up. Attention therefore
compares queries that are projected so ("absorbed") with the cached latents, and gives weighted sums of latents, which
each head then projects to its values. Behind the latent's L channels stand R that carry the position, the same for all
heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.data.plan import DecodePlan
from kernels.reference.norm import rms_norm
from kernels.reference.precision import to_wide
from kernels.reference.rotary import rotate


def absorb_and_store(
    query: Tensor,
    key_up: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """query [T, H, N + R] -> [T, H, L + R], its first N channels absorbed by key_up [H, N, L], the others rotated; and
    the latents [T, L + R], their first L channels normed, the others rotated, go to their slots.

    norm_weight [L]; cache [num_blocks, 1, block_size, L + R]; slot_mapping [T] int64, -1: nowhere; positions [T] int32
    or int64, cos_sin [max_position, R] float32 and `interleaved` as in `rope`.
    """
    plain = key_up.shape[1]
    _store(latent, norm_weight, eps, positions, cos_sin, cache, slot_mapping, interleaved)
    absorbed = (query[..., :plain].transpose(0, 1) @ key_up).transpose(0, 1)
    return torch.cat([absorbed, rotate(query[..., plain:], positions, cos_sin, interleaved)], 2)


def rotate_and_store(
    query: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> None:
    """Rotate the last R channels of query [T, H, N + R] in place, and store latents, as `absorb_and_store`."""
    _store(latent, norm_weight, eps, positions, cos_sin, cache, slot_mapping, interleaved)
    plain = query.shape[2] - cos_sin.shape[1]
    query[..., plain:] = rotate(query[..., plain:], positions, cos_sin, interleaved)


def _store(
    latent: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
) -> None:
    size, block_size = len(norm_weight), cache.shape[2]
    rotated = rotate(latent[:, None, size:], positions, cos_sin, interleaved)[:, 0]
    values = torch.cat([rms_norm(latent[:, :size], norm_weight, eps), rotated], 1)
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    cache[slots // block_size, 0, slots % block_size] = values[written]


def latent_attention_decode(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    out: Tensor,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Attention of one query token per sequence over its paged latents: query [B, H, L + R] -> `out` [B, H, L].

    cache [num_blocks, 1, block_size, L + R]; `plan`: of `latent_decode_plan`, written by `plan_decode` for these
    context_lens and rows; the other arguments are those of `paged_attention_decode`.
    """
    query_start = torch.arange(len(query) + 1, dtype=torch.int32)
    return latent_attention_prefill(query, cache, block_tables, rows, query_start, context_lens, scale=scale, out=out)


def latent_attention_prefill(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    out: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its paged latents: query [T, H, L + R] -> `out` [T, H, L].

    Rows of `out` that belong to no sequence are left alone. The other arguments are those of `paged_attention_prefill`.
    """
    starts, block_size = query_start.tolist(), cache.shape[2]
    for row, start, end, context in zip(rows.tolist(), starts[:-1], starts[1:], context_lens.tolist(), strict=True):
        if context == 0:
            out[start:end] = 0
            continue
        blocks = block_tables[row, : -(-context // block_size)].long()
        keys = to_wide(cache[blocks, 0].flatten(0, 1)[:context])  # [N, L + R]
        scores = to_wide(query[start:end]) @ keys.T * scale  # [n, H, N]
        positions = torch.arange(context, device=keys.device)
        future = positions > positions[context - (end - start) :, None]  # [n, N]
        weights = scores.masked_fill(future[:, None], -math.inf).softmax(-1)
        out[start:end] = (weights @ keys[:, : out.shape[2]]).to(out.dtype)
    return out
