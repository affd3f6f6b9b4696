"""Scores by which tokens choose earlier ones in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import NewIndexKeys, PagedLatents, reference
from kernels.triton import index
from tests.kernels.triton.test_latent import L, R, paged


@pytest.mark.parametrize("num_heads", [3, 20])
def test_scores(num_heads: int) -> None:
    """Tokens of a prompt, decodes, padding, and a length at a tile's end; slots that are not seen are NaN."""
    torch.manual_seed(0)
    cache, tables, rows = paged([41, 200, 128])
    lens = torch.tensor([40, 41, 0, 200, 128, 1], dtype=torch.int32)
    keys = PagedLatents(cache, tables, rows[[0, 0, 1, 1, 2, 2]], lens)
    query, weights = torch.randn(6, num_heads, L + R), torch.randn(6, num_heads)
    got = index.index_scores(query, weights, keys, 256)
    wide = replace(keys, cache=cache.double())
    want = reference.index_scores(query.double(), weights.double(), wide, 256)
    assert got.shape == (6, 256)
    assert [int(row.isfinite().sum()) for row in got] == lens.tolist()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_rotated_and_keys_stored(interleaved: bool) -> None:
    torch.manual_seed(0)
    tokens, num_heads, size, rotary = 5, 18, 40, 16
    queries = torch.randn(tokens, num_heads, size).repeat(2, 1, 1, 1).unbind()
    slots = torch.tensor([3, -1, 17, 8, 39])
    positions, cos_sin = torch.tensor([0, 5, 60, 7, 99], dtype=torch.int32), torch.randn(100, rotary)
    caches = torch.full((2, 5, 1, 8, 9 + size), 7.0).unbind()
    key = torch.randn(tokens, size + 3)[:, 3:]
    new = NewIndexKeys(
        key, torch.randn(size), torch.randn(size), 1e-6, positions, cos_sin, caches[0][..., 9:], slots, interleaved
    )
    index.store_index_keys(queries[0], new)
    reference.store_index_keys(queries[1], replace(new, cache=caches[1][..., 9:]))
    torch.testing.assert_close(queries[0], queries[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=1e-5)
    assert caches[0][..., :9].eq(7).all()
    assert caches[0].ne(7).any(-1).sum() == 4
