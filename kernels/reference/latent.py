"""Attention over latents: one short vector of each token, whose projections are the keys and values of all heads.

A head's key is key_up · latent, so its score with a query is the latent's with queryᵀ · key_up. Attention therefore
compares queries that are projected so ("absorbed") with the cached latents, and gives weighted sums of latents, which
each head then projects to its values. Behind the latent's L channels stand R that carry the position, the same for all
heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.data.attention import NewLatents, PagedLatents
from kernels.data.plan import DecodePlan
from kernels.reference.norm import rms_norm
from kernels.reference.precision import to_wide
from kernels.reference.rotary import rotate


def absorb_and_store(query: Tensor, key_up: Tensor, new: NewLatents) -> Tensor:
    """query [T, H, N + R] -> [T, H, L + R], its first N channels absorbed by key_up [H, N, L], the others rotated; and
    the latents, their first L channels normed, the others rotated, go to their slots.
    """
    plain = key_up.shape[1]
    _store(new)
    absorbed = (query[..., :plain].transpose(0, 1) @ key_up).transpose(0, 1)
    return torch.cat([absorbed, _rotated(query[..., plain:], new)], 2)


def rotate_and_store(query: Tensor, new: NewLatents) -> None:
    """Rotate the last R channels of query [T, H, N + R] in place, and store latents, as `absorb_and_store`."""
    _store(new)
    plain = query.shape[2] - new.cos_sin.shape[1]
    query[..., plain:] = _rotated(query[..., plain:], new)


def _rotated(x: Tensor, new: NewLatents) -> Tensor:
    return rotate(x, new.positions, new.cos_sin, new.interleaved)


def _store(new: NewLatents) -> None:
    size, block_size = len(new.norm_weight), new.cache.shape[2]
    rotated = _rotated(new.latent[:, None, size:], new)[:, 0]
    values = torch.cat([rms_norm(new.latent[:, :size], new.norm_weight, new.eps), rotated], 1)
    written = new.slot_mapping >= 0
    slots = new.slot_mapping[written]
    new.cache[slots // block_size, 0, slots % block_size] = values[written]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's vectors by its matrix: x [T, H, K], weight [H, M, K] -> [T, H, M]."""
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    torch.bmm(x.transpose(0, 1), weight.mT, out=out.transpose(0, 1))
    return out


def latent_attention_decode(
    query: Tensor, latents: PagedLatents, *, scale: float, out: Tensor, plan: DecodePlan | None = None
) -> Tensor:
    """Attention of one query token per sequence over its paged latents: query [B, H, L + R] -> `out` [B, H, L].

    `plan`: of `latent_decode_plan`, written by `plan_decode` for these lens and rows.
    """
    query_start = torch.arange(len(query) + 1, dtype=torch.int32)
    return latent_attention_prefill(query, query_start, latents, scale=scale, out=out)


def latent_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    latents: PagedLatents,
    *,
    scale: float,
    out: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its paged latents: query [T, H, L + R] -> `out` [T, H, L].

    Rows of `out` that belong to no sequence are left alone. query_start and tiles are those of
    `paged_attention_prefill`.
    """
    starts, cache, block_size = query_start.tolist(), latents.cache, latents.cache.shape[2]
    rows, lens = latents.rows.tolist(), latents.lens.tolist()
    for row, start, end, context in zip(rows, starts[:-1], starts[1:], lens, strict=True):
        if context == 0:
            out[start:end] = 0
            continue
        blocks = latents.block_tables[row, : -(-context // block_size)].long()
        keys = to_wide(cache[blocks, 0].flatten(0, 1)[:context])  # [N, L + R]
        scores = to_wide(query[start:end]) @ keys.T * scale  # [n, H, N]
        positions = torch.arange(context, device=keys.device)
        future = positions > positions[context - (end - start) :, None]  # [n, N]
        weights = scores.masked_fill(future[:, None], -math.inf).softmax(-1)
        out[start:end] = (weights @ keys[:, : out.shape[2]]).to(out.dtype)
    return out
