"""Decode attention over prefixes that sequences have in common, against float64: in the interpreter."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import AttentionArgs, PagedContext, reference
from kernels.cuda import attention
from kernels.data.plan import DecodePlan, SharedPrefix
from kernels.triton import attention_decode, shared_prefix
from tests.oracles.attention import Paged, exact_attention

CPU = torch.device("cpu")
MIN_SHARED = 32
LENS = (200, 70, 33, 0, 199, 150, 31, 200, 99, 68, 70, 90)
GROUPS = ((0, 4, 5, 7), (1, 8, 9, 10, 11))


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kernels.triton.shared_prefix", "kernels.reference.step"):
        monkeypatch.setattr(f"{module}.MIN_SHARED", MIN_SHARED)


def contexts(page: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Paged:
    """Two groups: one with 144 tokens in common, one with 64; the others have none."""
    paged = Paged.make(LENS, page, head_dim, dtype, "cpu")
    for members, tokens in zip(GROUPS, (144, 64), strict=True):
        paged.share(members, tokens // page)
    return paged


def plan_of(paged: Paged, num_heads: int, head_dim: int, programs: int, tile: int = 16) -> DecodePlan:
    num_kv_heads, seqs = paged.kv.shape[2], max(len(paged.rows), 17)
    plan = DecodePlan.allocate(seqs, num_heads, num_kv_heads, head_dim, CPU, programs, kv_dtype=paged.kv.dtype)
    prefix = SharedPrefix.allocate(seqs, num_heads, num_kv_heads, head_dim, CPU, programs)
    for memory in (prefix.out, prefix.stats, prefix.partial_out, prefix.partial_stats):
        memory.fill_(math.nan)
    plan.partial_out.fill_(math.nan)
    plan.partial_stats.fill_(math.nan)
    return dataclasses.replace(plan, prefix=prefix, tile=tile, streams=False)


def write(paged: Paged, plan: DecodePlan) -> DecodePlan:
    shared_prefix.plan_prefix(paged.context_lens, paged.rows, paged.block_tables, paged.kv.shape[3], plan)
    attention_decode.plan_decode(paged.context_lens, paged.rows, plan)
    return plan


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(("group", "head_dim", "page"), [(1, 32, 16), (4, 64, 8), (3, 40, 16)])
@pytest.mark.parametrize("kind", ["plain", "capped, with sinks"])
def test_against_float64(group: int, head_dim: int, page: int, programs: int, kind: str) -> None:
    torch.manual_seed(0)
    paged, heads = contexts(page, head_dim), 2 * group
    options: dict[str, Any] = {} if kind == "plain" else {"soft_cap": 3.0, "sinks": torch.rand(heads)}
    query = torch.randn(len(LENS), heads, head_dim)
    plan = write(paged, plan_of(paged, heads, head_dim, programs))
    context = PagedContext(paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens)
    got = attention.paged_attention_decode(query, context, AttentionArgs(0.1, **options), plan=plan)
    want = exact_attention(query, paged, [1] * len(LENS), 0.1, **options)
    assert (got.double() - want).norm() < 1e-6 * want.norm()
    assert not got[3].any()
    assert not plan.arrivals.any()
    assert plan.prefix is not None
    assert not plan.prefix.arrivals.any()
    assert plan.prefix.starts[list(GROUPS[0])].tolist() == [144] * 4
    assert plan.prefix.starts[list(GROUPS[1])].tolist() == [64] * 5


def test_the_plan_is_that_of_the_reference() -> None:
    """Random prefixes of random groups, some too small or too short to count."""
    draw = random.Random(0)
    for _ in range(12):
        lens = [draw.randint(0, 130) for _ in range(draw.randint(1, 40))]
        paged = Paged.make(lens, 8, 16, torch.float32, "cpu")
        for _ in range(draw.randint(0, 4)):
            blocks = draw.randint(1, 8)
            able = [i for i, n in enumerate(lens) if n > 8 * blocks]
            if able:
                paged.share(draw.sample(able, draw.randint(1, len(able))), blocks)
        plans = [plan_of(paged, 4, 16, 3, tile=8) for _ in range(2)]
        write(paged, plans[0])
        reference.plan_prefix(paged.context_lens, paged.rows, paged.block_tables, 8, plans[1])
        reference.plan_decode(paged.context_lens, paged.rows, plans[1])
        (got, want) = (plan.prefix for plan in plans)
        assert got is not None
        assert want is not None
        assert got.starts[: len(lens)].equal(want.starts[: len(lens)])
        assert got.members.tolist() == want.members.tolist()
        assert plans[0].work[:, :7].equal(plans[1].work[:, :7])


def test_a_full_batch_finds_room() -> None:
    """Room is enough for as many groups as can be, each with a tile that is not full."""
    lens = [100] * 40
    paged = Paged.make(lens, 16, 16, torch.float32, "cpu")
    for first in range(0, 40, 4):
        paged.share(range(first, first + 4), 3)
    query = torch.randn(40, 4, 16)
    plan = write(paged, plan_of(paged, 4, 16, 7))
    context = PagedContext(paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens)
    got = attention.paged_attention_decode(query, context, AttentionArgs(0.1), plan=plan)
    want = exact_attention(query, paged, [1] * 40, 0.1)
    assert (got.double() - want).norm() < 1e-6 * want.norm()
    assert plan.prefix is not None
    assert plan.prefix.starts[:40].tolist() == [48] * 40
