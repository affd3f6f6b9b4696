"""Adapters of a layer against merged matrices in float64, and the tiles of their tokens."""

import pytest
import torch

from kernels import AdapterTokens, reference
from tests.oracles.random_adapters import merged, random_slots

SLOTS = [2, -1, 0, 2, 2, -1, 3, 0, 2]


@pytest.mark.parametrize("group_rows", [(40,), (24, 8, 8)])
def test_adapters_change_their_tokens_as_merged_matrices_do(group_rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weights, slots = random_slots(4, 16, 48, group_rows), torch.tensor(SLOTS, dtype=torch.int32)
    x, y = torch.randn(len(SLOTS), 48), torch.randn(len(SLOTS), sum(group_rows))
    want = merged(y, x, weights, slots)
    got = reference.lora_add(y, x, weights, AdapterTokens.of(slots, 4))
    assert got is y
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 9, 70, 1500])
def test_each_token_with_an_adapter_is_in_one_tile_of_its_slot(num_tokens: int) -> None:
    torch.manual_seed(0)
    slots = torch.randint(-1, 5, (num_tokens,), dtype=torch.int32)
    tokens = AdapterTokens.of(slots, 5)
    found: dict[int, int] = {}
    for slot, first, end in tokens.tiles.tolist():
        assert 0 <= end - first <= tokens.tile_tokens
        for token in tokens.order[first:end].tolist():
            assert token not in found
            found[token] = slot
    assert found == {token: slot for token, slot in enumerate(slots.tolist()) if slot >= 0}
    assert len(tokens.tiles) == num_tokens // tokens.tile_tokens + min(5, num_tokens)


def test_steps_without_adapters_have_only_unused_tiles() -> None:
    tokens = AdapterTokens.of(torch.full((20,), -1, dtype=torch.int32), 3)
    assert (tokens.tiles[:, 0] == -1).all()
    y = torch.randn(20, 8)
    want = y.clone()
    assert torch.equal(reference.lora_add(y, torch.randn(20, 4), random_slots(3, 16, 4, (8,)), tokens), want)
