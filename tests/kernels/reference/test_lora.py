"""Adapters of a layer against merged matrices in float64, and the tiles of their tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import AdapterTokens, reference
from kernels.cpu import lora as cpu
from kernels.data.layout import ADAPTER, RowState
from tests.oracles.random_adapters import merged, random_slots

SLOTS = [2, -1, 0, 2, 2, -1, 3, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_rows", [(40,), (24, 8, 8)])
@pytest.mark.parametrize("given", [SLOTS, [1, 1, 1], [-1, -1]], ids=["several", "one", "none"])
@pytest.mark.parametrize("lora_add", [reference.lora_add, cpu.lora_add], ids=["reference", "cpu"])
def test_adapters_change_their_tokens_as_merged_matrices_do(
    lora_add: Callable[..., Tensor], given: list[int], group_rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights, slots = random_slots(4, 16, 48, group_rows, dtype=dtype), torch.tensor(given, dtype=torch.int32)
    x, y = torch.randn(len(given), 48).to(dtype), torch.randn(len(given), sum(group_rows)).to(dtype)
    want = merged(y, x, weights, slots)
    got = lora_add(y, x, weights, AdapterTokens(slots, 4))
    assert got is y
    limit = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_a_cpu_in_each_instruction_set(backend: str, dtype: torch.dtype) -> None:
    """Matrices that are no whole vectors; a token's bytes do not depend on the others."""
    torch.manual_seed(0)
    weights, slots = random_slots(4, 16, 45, (24, 9, 100), dtype=dtype), torch.tensor(SLOTS, dtype=torch.int32)
    x, y = torch.randn(len(SLOTS), 45).to(dtype), torch.randn(len(SLOTS), 133).to(dtype)
    want, own = merged(y, x, weights, slots), y[2:3].clone()
    got = cpu.lora_add(y, x, weights, AdapterTokens(slots, 4))
    limit = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit)
    if backend != "no compiler":
        assert torch.equal(cpu.lora_add(own, x[2:3], weights, AdapterTokens(slots[2:3], 4)), got[2:3])


@pytest.mark.parametrize("group_rows", [(40,), (24, 8, 8)])
@pytest.mark.parametrize(("rank", "num_of_each"), [(16, (60, 3, 2, 9)), (80, (60, 3, 2, 9)), (80, (20, 18, 10, 20))])
def test_a_large_step(backend: str, rank: int, num_of_each: tuple[int, ...], group_rows: tuple[int, ...]) -> None:
    """Large ranks of many tokens take another way: a few more tokens of an adapter on average, or a few less."""
    torch.manual_seed(0)
    given = [slot for slot, count in enumerate(num_of_each) for _ in range(count)] + [-1] * 5
    slots = torch.tensor(given, dtype=torch.int32)[torch.randperm(len(given))]
    weights, x, y = random_slots(4, rank, 48, group_rows), torch.randn(len(given), 48), torch.randn(len(given), 40)
    want = merged(y, x, weights, slots)
    got = cpu.lora_add(y, x, weights, AdapterTokens(slots, 4))
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_the_number_of_tokens_of_an_adapter_changes_no_bit(backend: str) -> None:
    if backend == "no compiler":
        pytest.skip("PyTorch's products depend on it")
    torch.manual_seed(0)
    weights, x, y = random_slots(2, 24, 37, (40, 7)), torch.randn(9, 37), torch.randn(9, 47)
    alone = [cpu.lora_add(y[i : i + 1].clone(), x[i : i + 1], weights, tokens_of([i % 2])) for i in range(9)]
    for count in range(1, 10):
        got = cpu.lora_add(y[:count].clone(), x[:count], weights, tokens_of([i % 2 for i in range(count)]))
        assert torch.equal(got, torch.cat(alone[:count]))


def tokens_of(slots: list[int]) -> AdapterTokens:
    return AdapterTokens(torch.tensor(slots, dtype=torch.int32), 2)


@pytest.mark.parametrize("num_tokens", [3, 9])
def test_slots_of_a_packed_step(backend: str, num_tokens: int) -> None:
    state = RowState.allocate(6, 1, 1, torch.device("cpu"))
    state.records[:, ADAPTER] = torch.tensor([3, 0, 1, 2, 0, 0])
    starts = [0, 1, 2, 3] if num_tokens == 3 else [0, 4, 5, 8]  # then a token of no sequence
    packed = torch.tensor([2, 1, 0, -7, *starts], dtype=torch.int32)
    counts = torch.tensor(starts).diff()
    want = torch.tensor([0, -1, 2]).repeat_interleave(counts)
    want = torch.cat([want, torch.full((num_tokens - len(want),), 2)]).int()
    for found in (cpu.adapter_slots, reference.adapter_slots):
        assert torch.equal(found(packed, 4, 3, num_tokens, state), want)


@pytest.mark.parametrize("num_tokens", [1, 9, 70, 1500])
def test_each_token_with_an_adapter_is_in_one_tile_of_its_slot(num_tokens: int) -> None:
    torch.manual_seed(0)
    slots = torch.randint(-1, 5, (num_tokens,), dtype=torch.int32)
    tokens = AdapterTokens(slots, 5)
    found: dict[int, int] = {}
    order, tiles, size = tokens.tiles
    for slot, first, end in tiles.tolist():
        assert 0 <= end - first <= size
        for token in order[first:end].tolist():
            assert token not in found
            found[token] = slot
    assert found == dict(enumerate(slots.tolist()))
    assert len(tiles) == num_tokens // size + min(6, num_tokens)


def test_steps_without_adapters_have_no_tile_of_a_slot() -> None:
    tokens = AdapterTokens(torch.full((20,), -1, dtype=torch.int32), 3)
    assert (tokens.tiles.tiles[:, 0] < 0).all()
    y = torch.randn(20, 8)
    want = y.clone()
    assert torch.equal(reference.lora_add(y, torch.randn(20, 4), random_slots(3, 16, 4, (8,)), tokens), want)
