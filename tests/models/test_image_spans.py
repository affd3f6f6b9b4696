"""Attention of an image's tokens, which see each other, against a dense computation."""

from __future__ import annotations

import pytest
import torch

import kernels
from engine.models.attention import AttentionMetadata, see_both_ways
from engine.models.residual import ImageSpan

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 4


@pytest.mark.parametrize("window", [0, 3, 7, 40])
@pytest.mark.parametrize("is_e4m3", [False, True], ids=["float32", "e4m3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_each_token_sees_the_whole_image(
    window: int, is_e4m3: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.FORMS, "deterministic", deterministic)
    torch.manual_seed(0)
    start, stop, table = 6, 19, torch.tensor([[0] * 8, [9, 2, 7, 0, 5, 11, 1, 1]], dtype=torch.int32)
    cache = torch.full((2, 12, KV_HEADS, BLOCK, SIZE), torch.nan)
    keys, values = torch.randn(2, stop, KV_HEADS, SIZE)
    scale = torch.tensor([[0.5, 2.0], [1.5, 0.25]]) if is_e4m3 else None
    if scale is not None:
        keys, values = ((x / s[:, None]).to(torch.float8_e4m3fn) for x, s in zip((keys, values), scale, strict=True))
        cache = cache.to(torch.float8_e4m3fn)
    for at in range(stop):
        block, slot = int(table[1, at // BLOCK]), at % BLOCK
        cache[0, block, :, slot], cache[1, block, :, slot] = keys[at], values[at]
    if scale is not None:
        keys, values = (x.float() * s[:, None] for x, s in zip((keys, values), scale, strict=True))
    query, out = torch.randn(20, HEADS, SIZE), torch.zeros(20, HEADS, SIZE)
    unread = torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(0, torch.tensor([0, 1], dtype=torch.int32), table, unread, unread, unread)
    first, begin = 4, 8  # the span is a part of the image: the tokens before it were computed in another step
    args = kernels.AttentionArgs(0.3, window=window, kv_scale=scale)
    see_both_ways(query, cache, metadata, args, ImageSpan(1, first, begin, stop), out)

    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query[first : first + stop - begin], keys) * 0.3
    distance = torch.arange(begin, stop)[:, None] - torch.arange(stop)
    scores = scores.masked_fill(distance >= window, -torch.inf) if window else scores
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    torch.testing.assert_close(out[first : first + stop - begin], wanted)
    assert not out[:first].any()
    assert not out[first + stop - begin :].any()
    assert start < begin
