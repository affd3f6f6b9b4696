"""Pairs in the order of their experts, in Triton's interpreter."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton import pairs


@pytest.mark.parametrize("max_chunks", [0, 512, 1], ids=["few", "many", "in one chunk"])
@pytest.mark.parametrize(
    ("num_tokens", "chosen", "count", "first", "block_m"), [(700, 2, 5, 2, 32), (301, 3, 8, 0, 16), (600, 1, 1, 7, 64)]
)
def test_pairs_in_the_order_of_their_experts(
    num_tokens: int, chosen: int, count: int, first: int, block_m: int, max_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one expert in their own order, in tiles that hold each once. Of 8 experts some have other owners; one
    has no pair, and there are tokens of padding.
    """
    monkeypatch.setattr(pairs, "MANY", 1 if max_chunks else 1 << 30)
    monkeypatch.setattr(pairs, "MAX_CHUNKS", max_chunks)
    torch.manual_seed(0)
    ids = torch.rand(num_tokens, 8).argsort(1)[:, :chosen].int()
    ids[ids == 4] = 3
    ids[-3:] = -1
    order, entries, _, positions, _ = pairs.sort_pairs(ids, count, first, block_m, with_positions=True)
    local = ids.flatten() - first
    want = [pair for expert in range(count) for pair in (local == expert).nonzero().flatten().tolist()]
    assert order.tolist() == want + [0] * (ids.numel() - len(want))
    assert positions is not None
    assert torch.equal(positions.flatten()[want], torch.arange(len(want)).int())
    seen: list[Any] = []
    for expert, begin, stop in entries.tolist():
        if expert >= 0:
            tile = range(begin, min(begin + block_m, stop))
            assert {int(local[order[at]]) for at in tile} == {expert}
            seen += tile
    assert seen == list(range(len(want)))
