"""Decode attention whose tiles of queries hold a newest token and its drafts, against float64, and its time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.testing import do_bench

import kernels
from tests.gpu.checks import BF16, E4M3, LIMITS, Checks, captured, relative_error
from tests.oracles.attention import NUM_KV_HEADS, Paged, exact_attention

CONTEXTS, TOKENS = (70, 30_000, 17, 1, 4097, 640), (4, 5, 1, 1, 2, 3)  # the newest tokens of each are queries
CASES: tuple[tuple[int, int, torch.dtype, dict[str, Any]], ...] = (
    (128, 4, BF16, {}),
    (128, 8, E4M3, {}),
    (64, 2, BF16, {"window": 128}),
    (128, 5, BF16, {"soft_cap": 30.0}),
)
LENGTH, DRAFTS = 32_768, 3  # of the one that is timed


def check_shared_attention(checks: Checks) -> None:
    for head_dim, group, kv_dtype, kinds in CASES:
        name = f"decode of drafts: head_dim {head_dim} group {group} {str(kv_dtype)[6:]} {kinds or ''}".rstrip()
        if checks.wants(name):
            contexts = [min(n, 300) if checks.device == "cpu" else n for n in CONTEXTS]
            paged = _with_drafts(Paged.make(contexts, 16, head_dim, kv_dtype, checks.device), TOKENS)
            query = torch.randn(len(paged.rows), group * NUM_KV_HEADS, head_dim, dtype=BF16, device=checks.device)
            for min_tiles in (1, 4):
                plan = None if checks.device == "cpu" else _plan(paged, query, kinds, True, min_tiles)
                out = torch.full_like(query, float("nan"))
                _decode(query, paged, kinds, plan, out)
                error = relative_error(out, exact_attention(query, paged, [1] * len(query), head_dim**-0.5, **kinds))
                checks.add(f"{name}, {min_tiles} tiles at least", error, LIMITS[BF16])
    name = "decode of drafts: time"
    if checks.device != "cpu" and checks.wants(name):
        paged = _with_drafts(Paged.make([LENGTH], 16, 128, BF16, checks.device, num_kv_heads=8), [1 + DRAFTS])
        query = torch.randn(1 + DRAFTS, 32, 128, dtype=BF16, device=checks.device)
        times = []
        for joins in (True, False):
            plan = _plan(paged, query, {}, joins, 2)
            times.append(1e3 * do_bench(captured(partial(_decode, query, paged, {}, plan, torch.empty_like(query)))))
        checks.saw(name, True, f"{times[0]:.1f} us for {1 + DRAFTS} tokens of {LENGTH:,}, {times[1]:.1f} us apart")


def _with_drafts(paged: Paged, tokens: Any) -> Paged:
    """Let the newest tokens of each context be sequences of their own."""
    lens = [
        n - before
        for n, count in zip(paged.context_lens.tolist(), tokens, strict=True)
        for before in range(count)[::-1]
    ]
    counts = torch.tensor(tokens, device=paged.rows.device)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=paged.rows.device)
    return replace(paged, rows=paged.rows.repeat_interleave(counts), context_lens=context_lens)


def _plan(paged: Paged, query: torch.Tensor, kinds: dict[str, Any], joins: bool, min_tiles: int) -> kernels.DecodePlan:
    heads, num_kv_heads = query.shape[1], paged.kv.shape[2]
    plan = kernels.DecodePlan.allocate(
        16, heads, num_kv_heads, query.shape[2], query.device, kv_dtype=paged.kv.dtype, window=kinds.get("window", 0),
        queries=kernels.shared_queries(heads, num_kv_heads) if joins else 1,
    )  # fmt: skip
    plan = replace(plan, min_tiles=min_tiles)
    kernels.plan_decode(paged.context_lens, paged.rows, plan)
    torch.cuda.synchronize()
    return plan


def _decode(query: torch.Tensor, paged: Paged, kinds: dict[str, Any], plan: Any, out: torch.Tensor) -> None:
    context = kernels.PagedContext(paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens)
    args = kernels.AttentionArgs(query.shape[2] ** -0.5, kv_scale=paged.kv_scale, **kinds)
    kernels.paged_attention_decode(query, context, args, plan=plan, out=out)
