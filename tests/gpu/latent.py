"""Checks of attention over latents, at the sizes of DeepSeek V2-Lite, GLM-4.7-Flash and DeepSeek V3, against
float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.models.expansion import LatentExpansion
from kernels import reference
from kernels.data.plan import latent_tile_queries, make_prefill_tiles, prefill_tile_queries
from tests.gpu.checks import BF16, F32, LIMITS, Checks, relative_error

L, R, PAGE = 512, 64, 16
HEADS = (16, 20, 128)
EXPANDED = ((20, 192, 256), (16, 128, 128))  # heads, channels without RoPE, of values: GLM-4.7-Flash, DeepSeek
DECODES = {"32 x 8k": [8192] * 32, "1 x 8k": [8192], "256 x 1k": [1024] * 256, "ragged": [1, 3000, 0, 17, 900]}
PREFILLS = {
    "2048 new": ([2048], [2048]),
    "512 new after 8k": ([512], [8704]),
    "ragged": ([3, 700, 65], [3, 1000, 4000]),
}


def check_latent(checks: Checks) -> None:
    """`exact` reads each sequence at once; unused slots are NaN."""
    for num_heads in HEADS:
        for dtype in (BF16, F32):
            _check_decode(checks, num_heads, dtype)
            _check_prefill(checks, num_heads, dtype)
    for shape in EXPANDED:
        for dtype in (BF16, F32):
            _check_expanded(checks, *shape, dtype)


def _paged(checks: Checks, lens: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    counts = [-(-n // PAGE) for n in lens]
    order = torch.randperm(sum(counts) + 1, device=checks.device).int()
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32, device=checks.device)
    cache = torch.full((sum(counts) + 1, 1, PAGE, L + R), torch.nan, dtype=dtype, device=checks.device)
    start = 0
    for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
        tables[i, :count] = order[start : start + count]
        values = torch.full((count * PAGE, L + R), torch.nan, dtype=dtype, device=checks.device)
        values[:n] = checks.random(n, L + R, dtype=dtype)
        cache[order[start : start + count].long(), 0] = values.view(count, PAGE, L + R)
        start += count
    return cache, tables, torch.arange(len(lens), dtype=torch.int32, device=checks.device)


def _check_decode(checks: Checks, num_heads: int, dtype: torch.dtype) -> None:
    for name, lens in DECODES.items():
        title = f"latent decode {num_heads} heads, {name}, {dtype}"
        if not checks.wants(title) or (dtype == F32 and name != "ragged"):
            continue
        cache, tables, rows = _paged(checks, lens, dtype)
        query, lengths = checks.random(len(lens), num_heads, L + R, dtype=dtype), torch.tensor(lens).int().to(rows)
        out = query.new_empty(len(lens), num_heads, L)
        plan = kernels.latent_decode_plan(len(lens), num_heads, L, out.device)
        kernels.plan_decode(lengths, rows, plan)
        latents, scale = kernels.PagedLatents(cache, tables, rows, lengths), (L + R) ** -0.5
        call = partial(kernels.latent_attention_decode, query, latents, scale=scale, out=out, plan=plan)
        wide = replace(latents, cache=cache.double())
        want = reference.latent_attention_decode(query.double(), wide, scale=scale, out=out.double())
        num_bytes = (sum(lens) * (L + R) + query.numel() + out.numel()) * query.element_size()
        checks.add(title, relative_error(call(), want), LIMITS[dtype], call, num_bytes)


def _check_prefill(checks: Checks, num_heads: int, dtype: torch.dtype) -> None:
    for name, (new, lens) in PREFILLS.items():
        title = f"latent prefill {num_heads} heads, {name}, {dtype}"
        if not checks.wants(title) or (dtype == F32 and name != "ragged"):
            continue
        cache, tables, rows = _paged(checks, lens, dtype)
        starts = torch.tensor([0, *new]).cumsum(0).int().to(rows)
        query, lengths = checks.random(sum(new), num_heads, L + R, dtype=dtype), torch.tensor(lens).int().to(rows)
        tiles = torch.tensor(make_prefill_tiles(new, lens, latent_tile_queries(num_heads, dtype))).int().to(rows)
        out = query.new_empty(sum(new), num_heads, L)
        latents, scale = kernels.PagedLatents(cache, tables, rows, lengths), (L + R) ** -0.5
        call = partial(kernels.latent_attention_prefill, query, starts, latents, scale=scale, out=out, tiles=tiles)
        got, wide = call(), replace(latents, cache=cache.double())
        want = torch.cat(  # a few heads at a time: scores are large
            [
                reference.latent_attention_prefill(part.double(), starts, wide, scale=scale, out=part[..., :L].double())
                for part in query.split(4, 1)
            ],
            1,
        )
        checks.add(title, relative_error(got, want), LIMITS[dtype], call)


def _check_expanded(checks: Checks, num_heads: int, plain: int, value_dim: int, dtype: torch.dtype) -> None:
    """Prompts with keys and values of each head, against the same keys and values."""
    for name, (new, lens) in PREFILLS.items():
        title = f"latent prefill expanded {num_heads} heads of {plain + R}, {name}, {dtype}"
        if not checks.wants(title) or (dtype == F32 and name != "ragged"):
            continue
        cache, tables, rows = _paged(checks, lens, dtype)
        starts = torch.tensor([0, *new]).cumsum(0).int().to(rows)
        query, lengths = checks.random(sum(new), num_heads, plain + R, dtype=dtype), torch.tensor(lens).int().to(rows)
        up = checks.random(num_heads, plain + value_dim, L, dtype=dtype) * L**-0.5
        key_up, value_up = up[:, :plain], up[:, plain:]
        queries, scale = prefill_tile_queries(num_heads, num_heads, plain + R, dtype), (plain + R) ** -0.5
        expansion = LatentExpansion.of_step(
            new, lens, rows, tables, PAGE, lambda tensor: tensor.to(checks.device), queries
        )
        call = partial(expansion.attend, query, cache, key_up, value_up, starts, lengths, scale)
        parts = [
            _exact(
                query[end - count : end], cache[tables[i].long(), 0].flatten(0, 1)[:context], key_up, value_up, scale
            )
            for i, (count, context, end) in enumerate(zip(new, lens, starts[1:].tolist(), strict=True))
        ]
        checks.add(title, relative_error(call()[..., :value_dim], torch.cat(parts)), LIMITS[dtype], call)


def _exact(query: Tensor, latents: Tensor, key_up: Tensor, value_up: Tensor, scale: float) -> Tensor:
    """query [n, H, N + R], the newest tokens of latents [C, L + R] -> [n, H, V] float64; keys and values are
    rounded.
    """
    keys, values = ((latents[:, :L].double() @ up.double().mT).to(query.dtype).double() for up in (key_up, value_up))
    keys = torch.cat([keys, latents[:, L:].double().expand(len(keys), -1, -1)], 2)
    scores = query.double().transpose(0, 1) @ keys.mT * scale  # [H, n, C]
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(len(latents) - len(query) + 1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ values).transpose(0, 1)
