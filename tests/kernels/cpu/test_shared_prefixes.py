"""Sequences that begin with the same blocks read these once, and get what each gets alone, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu import native_attention
from kernels.cpu.library import library
from kernels.data.attention import AttentionArgs, PagedContext

BLOCK, HEADS, KV_HEADS, DIM = 16, 8, 2, 64
# For each sequence: its trunk, how many tokens of it, and its length.
TREE = [("a", 1024, 1025), ("b", 640, 700), ("a", 1024, 1300), ("a", 600, 660), ("c", 0, 5), ("a", 1024, 1100),
        ("b", 640, 2000), ("a", 300, 900), ("d", 512, 514), ("d", 512, 513), ("a", 1024, 1024)]  # fmt: skip


@pytest.fixture(autouse=True)
def needs_library() -> None:
    if library() is None:
        pytest.skip("no compiler")


def make(dtype: torch.dtype, tree: list[tuple[str, int, int]] = TREE) -> tuple[Tensor, PagedContext]:
    """Queries [S, H, D] and a cache in which only blocks of sequences are written."""
    generator = torch.Generator().manual_seed(0)
    next_block, trunks = 3, dict[str, list[int]]()
    tables = torch.full((len(tree) + 2, 140), 10**6, dtype=torch.int32)
    rows = torch.randperm(len(tree) + 2, generator=generator)[: len(tree)].int()
    for row, (trunk, shared, length) in zip(rows.tolist(), tree, strict=True):
        own = trunks.setdefault(trunk, [])
        while len(own) < shared // BLOCK:
            own.append(next_block)
            next_block += 1
        blocks = own[: shared // BLOCK]
        more = -(-length // BLOCK) - len(blocks)
        blocks = blocks + list(range(next_block, next_block + more))
        next_block += max(more, 0)
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    caches = [torch.randn(next_block, KV_HEADS, BLOCK, DIM, generator=generator).to(dtype) for _ in range(2)]
    lens = torch.tensor([length for *_, length in tree], dtype=torch.int32)
    query = torch.randn(len(tree), HEADS, DIM, generator=generator).to(dtype)
    return query, PagedContext(caches[0], caches[1], tables, rows, lens)


def alone(query: Tensor, context: PagedContext, args: AttentionArgs) -> Tensor:
    parts = []
    for i in range(len(query)):
        part = replace(context, rows=context.rows[i : i + 1].clone(), lens=context.lens[i : i + 1].clone())
        parts.append(native_attention.paged_attention_decode(query[i : i + 1], part, args))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "sinks and soft cap", "slopes"])
def test_each_gets_what_it_gets_alone(dtype: torch.dtype, kind: str) -> None:
    query, context = make(dtype)
    args = AttentionArgs(scale=DIM**-0.5)
    if kind == "slopes":
        args = replace(args, alibi_slopes=torch.linspace(0.01, 0.1, HEADS))
    elif kind != "plain":
        args = replace(args, sinks=torch.linspace(-1, 1, HEADS), soft_cap=20.0)
    assert native_attention.num_shared_keys(query, context, args, 16) > 2500
    assert torch.equal(native_attention.paged_attention_decode(query, context, args), alone(query, context, args))


def test_with_prompts_in_the_same_step() -> None:
    query, context = make(torch.float32)
    args = AttentionArgs(scale=DIM**-0.5)
    longer = torch.randn(len(query) + 4, HEADS, DIM)
    start = torch.arange(len(query) + 1, dtype=torch.int32)
    start[3:] += 4  # the third has five queries
    found = native_attention.paged_attention_prefill(longer, start, context, args)
    for i in (0, 1, 5, 10):
        token = int(start[i])
        part = replace(context, rows=context.rows[i : i + 1].clone(), lens=context.lens[i : i + 1].clone())
        expected = native_attention.paged_attention_decode(longer[token : token + 1], part, args)
        assert torch.equal(found[token : token + 1], expected)


def test_which_keys_are_shared() -> None:
    args = AttentionArgs(scale=DIM**-0.5)

    def shared(tree: list[tuple[str, int, int]], most: int = 16, args: AttentionArgs = args) -> int:
        return native_attention.num_shared_keys(*make(torch.float32, tree), args, most)

    assert shared([("a", 640, 700)] * 3) == 2 * 640
    assert shared([("a", 640, 700)] * 3, most=2) == 640
    assert shared([("a", 640, 700)] * 3, most=1) == 0
    assert shared([("a", 496, 700)] * 3) == 0, "too few"
    assert shared([("a", 640, 700), ("b", 640, 700)]) == 0
    assert shared([("a", 640, 641), ("a", 640, 640)]) == 576, "whole tiles before both queries"
    assert shared([("a", 640, 700)] * 3, args=replace(args, window=4096)) == 0
    assert shared([("a", 640, 700)]) == 0
