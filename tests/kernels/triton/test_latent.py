"""Attention over latents in Triton's interpreter, against the reference implementation in float64."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import NewLatents, PagedLatents, reference
from kernels.cuda import attention
from kernels.data.plan import latent_tile_queries, make_prefill_tiles
from kernels.triton import latent

NAN = float("nan")
L, R, PAGE = 40, 16, 8


def paged(lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A cache whose unused slots are NaN, block tables and their rows."""
    counts = [-(-n // PAGE) for n in lens]
    ids = random.Random(1).sample(range(sum(counts) + 3), sum(counts))
    rows = torch.randperm(len(lens) + 2)[: len(lens)].int()
    tables = torch.full((len(lens) + 2, max(counts) + 1), 2**30, dtype=torch.int32)
    cache = torch.full((sum(counts) + 3, 1, PAGE, L + R), NAN)
    for row, n, count in zip(rows.tolist(), lens, counts, strict=True):
        mine, ids = ids[:count], ids[count:]
        tables[row, :count] = torch.tensor(mine)
        for i, block in enumerate(mine):
            cache[block, 0, : min(PAGE, n - i * PAGE)] = torch.randn(min(PAGE, n - i * PAGE), L + R)
    return cache, tables, rows


@pytest.mark.parametrize("num_heads", [5, 20])
@pytest.mark.parametrize("processors", [1, 9, 24], ids=["one part", "few parts", "more parts than keys"])
def test_decode(monkeypatch: Any, num_heads: int, processors: int) -> None:
    """Parts may be empty, and so may a padding row's context be."""
    torch.manual_seed(0)
    monkeypatch.setattr(latent, "num_multiprocessors", lambda device: processors)
    lens = [1, 100, 0, 41]
    cache, tables, rows = paged(lens)
    query, lengths = torch.randn(len(lens), num_heads, L + R), torch.tensor(lens, dtype=torch.int32)
    out = torch.full((len(lens), num_heads, L), NAN)
    latents = PagedLatents(cache, tables, rows, lengths)
    got = attention.latent_attention_decode(query, latents, scale=0.2, out=out)
    want = reference.latent_attention_decode(
        query.double(), replace(latents, cache=cache.double()), scale=0.2, out=torch.empty(out.shape).double()
    )
    assert got is out
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "has_tiles"), [(3, True), (24, True), (24, False)])
def test_prefill(num_heads: int, has_tiles: bool) -> None:
    """Check contexts that have none, some or many keys before the step; rows of no sequence stay as they are."""
    torch.manual_seed(0)
    lens, new = [13, 70, 41], [13, 9, 1]
    cache, tables, rows = paged(lens)
    starts = torch.tensor([2, 15, 24, 25], dtype=torch.int32)
    query, lengths = torch.randn(26, num_heads, L + R), torch.tensor(lens, dtype=torch.int32)
    tiles = torch.tensor(
        make_prefill_tiles(new, lens, latent_tile_queries(num_heads, torch.float32)), dtype=torch.int32
    )
    outs = torch.full((2, 26, num_heads, L), 7.0).unbind()
    latents = PagedLatents(cache, tables, rows, lengths)
    got = attention.latent_attention_prefill(
        query, starts, latents, scale=0.2, out=outs[0], tiles=tiles if has_tiles else None
    )
    wide = replace(latents, cache=cache.double())
    want = reference.latent_attention_prefill(query.double(), starts, wide, scale=0.2, out=outs[1].double())
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert got[:2].eq(7).all()
    assert got[25:].eq(7).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_absorbed_and_latents_stored(interleaved: bool) -> None:
    torch.manual_seed(0)
    tokens, num_heads, plain = 5, 18, 24
    query, key_up = torch.randn(tokens, num_heads, plain + R), torch.randn(2 * num_heads, plain, L)[::2]
    latents = torch.randn(tokens, 48 + L + R)[:, 48:]
    slots = torch.tensor([3, -1, 17, 8, 39])
    positions, cos_sin = torch.tensor([0, 5, 60, 7, 99], dtype=torch.int32), torch.randn(100, R)
    caches = torch.full((2, 5, 1, PAGE, L + R), 7.0).unbind()
    new = NewLatents(latents, torch.randn(L), 1e-6, positions, cos_sin, caches[0], slots, interleaved)
    got = latent.absorb_and_store(query, key_up, new)
    want = reference.absorb_and_store(query, key_up, replace(new, cache=caches[1]))
    torch.testing.assert_close(got, want, rtol=0, atol=3e-5)
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [latent, reference])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_rotated_in_place_and_latents_stored(interleaved: bool, backend: Any) -> None:
    """The same as by `absorb_and_store`; the plain channels stay as they are."""
    torch.manual_seed(0)
    tokens, num_heads, plain = 5, 18, 24
    query, latents = torch.randn(tokens, num_heads, plain + R), torch.randn(tokens, 48 + L + R)[:, 48:]
    positions, cos_sin = torch.tensor([0, 5, 60, 7, 99], dtype=torch.int32), torch.randn(100, R)
    slots, key_up = torch.tensor([3, -1, 17, 8, 39]), torch.randn(num_heads, plain, L)
    caches = torch.full((2, 5, 1, PAGE, L + R), 7.0).unbind()
    new = NewLatents(latents, torch.randn(L), 1e-6, positions, cos_sin, caches[0], slots, interleaved)
    want = reference.absorb_and_store(query, key_up, new)
    got = query.clone()
    backend.rotate_and_store(got, replace(new, cache=caches[1]))
    assert torch.equal(got[..., :plain], query[..., :plain])
    torch.testing.assert_close(got[..., plain:], want[..., L:], rtol=0, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=1e-5)
