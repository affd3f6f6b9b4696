"""Decode attention over prefixes that sequences have in common, against float64, and its time beside that without."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels.data.plan import SharedPrefix
from tests.gpu.checks import BF16, E4M3, F32, LIMITS, Checks, relative_error
from tests.oracles.attention import Paged, exact_attention

# head_dim, query heads of a KV head, page, dtypes of query and cache, sequences: a plan of each size.
CASES: tuple[tuple[int, int, int, torch.dtype, torch.dtype, int], ...] = (
    (128, 4, 16, BF16, BF16, 40),
    (128, 8, 16, BF16, BF16, 12),
    (64, 8, 32, BF16, BF16, 70),
    (80, 3, 16, BF16, BF16, 20),
    (256, 2, 16, BF16, BF16, 24),
    (128, 4, 16, F32, F32, 33),
    (128, 5, 16, BF16, E4M3, 40),
)
SPEEDS = ((256, 2048, 160), (64, 16_384, 128), (16, 30_000, 500), (256, 1024, 600))  # sequences, common tokens, others


def check_shared_prefix(checks: Checks) -> None:
    for head_dim, group, page, dtype, kv_dtype, count in CASES:
        name = f"common prefixes: head_dim {head_dim} group {group} {dtype} cache {kv_dtype} {count} sequences"
        if checks.device == "cpu" or not checks.wants(name):
            continue
        lens = [1300 + 37 * i % 900 for i in range(count)]
        paged = Paged.make(lens, page, head_dim, kv_dtype, checks.device)
        paged.share(range(0, count, 3), 1152 // page)
        paged.share(range(1, count, 3), 1024 // page)
        query = checks.random(count, group * paged.kv.shape[2], head_dim, dtype=dtype)
        plan = _plan(paged, query)
        args = kernels.AttentionArgs(head_dim**-0.5, kv_scale=paged.kv_scale)
        context = kernels.PagedContext(paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens)
        want = exact_attention(query, paged, [1] * count, head_dim**-0.5)
        for turn in range(3):
            got = kernels.paged_attention_decode(query, context, args, plan=plan)
            checks.add(f"{name}, turn {turn}", relative_error(got, want), LIMITS[dtype])
        assert plan.prefix is not None
        checks.add(f"{name}: starts", float(plan.prefix.starts[:count:3].ne(1152).sum()), 0.0)
    for count, common, others in SPEEDS:
        name = f"time of {count} x {others} tokens after {common} in common"
        if checks.device != "cpu" and checks.wants(name):
            _time(checks, name, count, common, others)


def _plan(paged: Paged, query: Tensor, reads_once: bool = True) -> kernels.DecodePlan:
    (count, num_heads, head_dim), num_kv_heads, device = query.shape, paged.kv.shape[2], query.device
    heads = num_heads, num_kv_heads, head_dim
    plan = kernels.DecodePlan.allocate(count, *heads, device, kv_dtype=paged.kv.dtype)
    if reads_once:
        plan = dataclasses.replace(plan, prefix=SharedPrefix.allocate(count, *heads, device))
        kernels.plan_prefix(paged.context_lens, paged.rows, paged.block_tables, paged.kv.shape[3], plan)
    kernels.plan_decode(paged.context_lens, paged.rows, plan)
    torch.cuda.synchronize()
    return plan


def _time(checks: Checks, name: str, count: int, common: int, others: int) -> None:
    """Heads of Llama 3.1 8B, in graphs."""
    page, device = 16, checks.device
    own, start = others // page + 1, common // page
    tables = torch.zeros(count, start + own, dtype=torch.int32, device=device)
    tables[:, :start] = torch.arange(start, device=device)
    tables[:, start:] = start + torch.arange(count * own, device=device).view(count, own)
    kv = torch.randn(2, start + count * own, 8, page, 128, dtype=BF16, device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    lens = torch.full_like(rows, common + others)
    paged, query = Paged(kv, None, tables, rows, lens), checks.random(count, 32, 128)
    context, args = kernels.PagedContext(kv[0], kv[1], tables, rows, lens), kernels.AttentionArgs(128**-0.5)
    found: dict[bool, Any] = {}
    for reads_once in (False, True):
        plan = _plan(paged, query, reads_once)
        call = partial(kernels.paged_attention_decode, query, context, args, plan=plan, out=torch.empty_like(query))
        found[reads_once] = call().clone()
        num_bytes = 2 * 8 * 128 * 2 * ((common if reads_once else count * common) + count * others)
        checks.add(f"{name}{', read once' if reads_once else ''}", 0.0, 0.0, call, num_bytes, graph=True)
        if reads_once:
            plans = partial(kernels.plan_prefix, lens, rows, tables, page, plan)
            checks.add(f"{name}, its plan", 0.0, 0.0, plans, 0, graph=True)
    checks.add(f"{name}: beside each other", relative_error(found[True], found[False]), LIMITS[BF16])
