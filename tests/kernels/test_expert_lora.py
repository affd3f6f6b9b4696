"""Experts with adapters on every backend, against merged matrices in float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import AdapterTokens, Experts
from kernels.data.lora import ExpertLora
from kernels.reference.moe import activate
from tests.oracles.random_adapters import merged, random_expert_slots

HIDDEN, INNER, NUM_SLOTS = 64, 32, 3


def expected(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, lora: ExpertLora, slots: Tensor) -> Tensor:
    """Each token's experts one after the other, of merged matrices."""
    total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    assert isinstance(stack.gate_up, Tensor)
    assert isinstance(stack.down, Tensor)
    for token, choice in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, choice]) - stack.first
        if not 0 <= expert < len(stack):
            continue
        number = lora.numbers[int(slots[token]) * len(stack) + expert] if slots[token] >= 0 else torch.tensor(-1)
        row, own = x[token : token + 1].double(), number.reshape(1)
        y = merged(row @ stack.gate_up[expert].double().T, row, lora.gate_up, own)
        inner = activate(y, stack.activation)
        y = merged(inner @ stack.down[expert].double().T, inner, lora.down, own)
        total[token] += float(weights[token, choice]) * y[0]
    return total


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("num_tokens", [1, 21])
@pytest.mark.parametrize("backend", ["kernels.reference", "kernels.cpu.moe", "kernels.cpu.alone", "kernels.cuda.lora"])
def test_experts_with_adapters_are_those_of_merged_matrices(backend: str, num_tokens: int, activation: Any) -> None:
    if backend == "kernels.cuda.lora":
        pytest.importorskip("triton")
    adapted_experts = importlib.import_module(backend).adapted_experts
    torch.manual_seed(num_tokens)
    groups = (INNER,) if activation == "relu2" else (INNER, INNER)
    first, count = 2, 4  # this rank's experts of 8
    lora = random_expert_slots(NUM_SLOTS, count, 16, HIDDEN, groups)
    gate_up, down = torch.randn(count, sum(groups), HIDDEN) / 8, torch.randn(count, HIDDEN, INNER) / 6
    stack = Experts(gate_up, down, activation=activation, first=first)
    x, weights = torch.randn(num_tokens, HIDDEN), torch.rand(num_tokens, 2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(num_tokens)]).int()
    ids[0] = torch.tensor([3, 5])
    slots = torch.randint(-1, NUM_SLOTS, (num_tokens,), dtype=torch.int32)
    slots[0] = 1
    if num_tokens > 1:
        ids[1] = -1  # padding
    want = expected(x, ids, weights, stack, lora, slots)
    tokens = AdapterTokens(slots, NUM_SLOTS)
    got = adapted_experts(x, ids, weights, stack, lora, tokens)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    residual = torch.randn(num_tokens, HIDDEN)
    want += residual.double()
    got = adapted_experts(x, ids, weights, stack, lora, tokens, residual)
    assert got is residual
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


def test_alone_a_token_has_the_same_bytes() -> None:
    """The deterministic form, for any of the other tokens."""
    alone = importlib.import_module("kernels.cpu.alone")
    torch.manual_seed(0)
    lora = random_expert_slots(NUM_SLOTS, 4, 16, HIDDEN, (INNER, INNER))
    stack = Experts(torch.randn(4, 2 * INNER, HIDDEN), torch.randn(4, HIDDEN, INNER))
    x, weights = torch.randn(19, HIDDEN), torch.rand(19, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(19)]).int()
    slots = torch.randint(-1, NUM_SLOTS, (19,), dtype=torch.int32)
    whole = alone.adapted_experts(x, ids, weights, stack, lora, AdapterTokens(slots, NUM_SLOTS))
    for some in (slice(3, 4), slice(2, 9)):
        tokens = AdapterTokens(slots[some], NUM_SLOTS)
        assert torch.equal(alone.adapted_experts(x[some], ids[some], weights[some], stack, lora, tokens), whole[some])
