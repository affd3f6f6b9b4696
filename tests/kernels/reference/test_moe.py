"""Mixtures of experts by definition: one token, one expert at a time, in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import Experts, QuantizedWeight, Router, RouterArgs, reference
from tests.oracles.random_weights import FORMS, random_experts

F64 = torch.float64
ROUTERS = {
    "Qwen3": Router(3, renormalise=True),
    "OLMoE": Router(3),
    "gpt-oss": Router(4, "softmax_chosen"),
    "DeepSeek-V2": Router(3, num_groups=4, num_chosen_groups=2, scale=16.0),
    "DeepSeek-V3": Router(3, "sigmoid", 4, 2, "top2", renormalise=True, scale=2.5),
}


def route_one(logits: list[float], correction: list[float], rule: Router) -> list[tuple[int, float]]:
    """A token's experts and their weights."""
    count, everyone = len(logits), sum(map(math.exp, logits))
    scores = {
        "softmax": [math.exp(z) / everyone for z in logits],
        "softmax_chosen": logits,
        "sigmoid": [1 / (1 + math.exp(-z)) for z in logits],
    }[rule.scoring]
    choice = [score + more for score, more in zip(scores, correction, strict=True)]
    size = count // rule.num_groups
    best_two = [sorted(choice[at : at + size], reverse=True)[:2] for at in range(0, count, size)]
    of_group = [pair[0] if rule.group_score == "max" else sum(pair) for pair in best_two]
    groups = sorted(range(rule.num_groups), key=lambda group: (-of_group[group], group))[: rule.num_chosen_groups]
    among = [expert for expert in range(count) if expert // size in groups]
    ids = sorted(among, key=lambda expert: (-choice[expert], expert))[: rule.num_chosen]
    weights = [scores[expert] for expert in ids]
    if rule.scoring == "softmax_chosen":
        weights = [math.exp(weight) / sum(map(math.exp, weights)) for weight in weights]
    if rule.renormalise:
        weights = [weight / sum(weights) for weight in weights]
    return [(expert, weight * rule.scale) for expert, weight in zip(ids, weights, strict=True)]


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("corrected", [False, True])
def test_route(name: str, corrected: bool) -> None:
    torch.manual_seed(0)
    rule, x, weight, bias = (
        ROUTERS[name],
        *(torch.randn(n, 16, dtype=F64) for n in (50, 12)),
        torch.randn(12, dtype=F64),
    )
    correction = 0.3 * torch.randn(12, dtype=F64) if corrected else torch.zeros(12, dtype=F64)
    ids, weights = reference.route(x, RouterArgs(weight, rule, bias, correction if corrected else None))
    assert (ids.dtype, weights.dtype) == (torch.int32, F64)
    for token, logits in enumerate(x @ weight.T + bias):
        want = route_one(logits.tolist(), correction.tolist(), rule)
        assert ids[token].tolist() == [expert for expert, _ in want]
        assert weights[token].tolist() == pytest.approx([weight for _, weight in want])


def test_of_equal_experts_the_lower_index_is_chosen() -> None:
    weight = torch.ones(64, 8)
    for rule in (Router(5), Router(5, "sigmoid", 8, 2, "top2")):
        ids, weights = reference.route(torch.ones(3, 8), RouterArgs(weight, rule))
        assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
        assert len(weights.unique()) == 1


def test_logits_are_float32_and_padding_routes_nowhere() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    slots = torch.tensor([7, -1, 0, -1])
    ids, weights = reference.route(x, RouterArgs(weight, Router(2)), slots)
    want = (x.double() @ weight.double().T).softmax(-1).topk(2)
    assert ids[slots >= 0].tolist() == want.indices[slots >= 0].tolist()
    torch.testing.assert_close(weights[slots >= 0].double(), want.values[slots >= 0], atol=1e-6, rtol=1e-5)
    assert ids[slots < 0].unique().tolist() == [-1]
    assert weights[slots < 0].unique().tolist() == [0]


def test_norm_route() -> None:
    torch.manual_seed(0)
    x, norm, weight = torch.randn(5, 16), torch.rand(16), torch.randn(8, 16)
    normed, ids, weights = reference.norm_route(x, norm, 1e-6, RouterArgs(weight, Router(2)))
    assert torch.equal(normed, reference.rms_norm(x, norm, 1e-6))
    for got, want in zip((ids, weights), reference.route(normed, RouterArgs(weight, Router(2))), strict=True):
        assert torch.equal(got, want)


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return gate * gate.sigmoid() * up
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("biased", [False, True])
def test_experts(activation: Any, biased: bool) -> None:
    """Check a rank that holds experts 2 to 5, in float64; ids elsewhere and -1 add nothing."""
    torch.manual_seed(0)
    x, weights = torch.randn(20, 16, dtype=F64), torch.rand(20, 3, dtype=F64)
    ids = torch.rand(20, 9).argsort(1)[:, :3].int() - 1
    gate_up, down = 3 * torch.randn(4, 24, 16, dtype=F64), torch.randn(4, 16, 12, dtype=F64)
    biases = (torch.randn(4, 24, dtype=F64), torch.randn(4, 16, dtype=F64)) if biased else (None, None)
    want = torch.zeros(20, 16, dtype=F64)
    for token in range(20):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if 2 <= expert < 6:
                inner = gate_up[expert - 2] @ x[token] + (0 if biases[0] is None else biases[0][expert - 2])
                outer = down[expert - 2] @ activate(*inner.chunk(2), activation)
                want[token] += weight * (outer + (0 if biases[1] is None else biases[1][expert - 2]))
    stack = Experts(gate_up, down, *biases, activation=activation, first=2)
    got = reference.experts(x, ids, weights, stack)
    torch.testing.assert_close(got, want)
    hidden = torch.randn(20, 16, dtype=F64)
    more = reference.experts(x, ids, weights, stack, add_to=hidden.clone())
    torch.testing.assert_close(more, hidden + want)


@pytest.mark.parametrize("form", FORMS)
def test_experts_of_few_bits(form: str) -> None:
    """A stack is its matrices: the same as with each expert's written out as floats."""
    torch.manual_seed(0)
    gate_up, down = random_experts(form, 3, 256, 128), random_experts(form, 3, 128, 128)
    assert (len(gate_up), gate_up.num_channels) == (3, 128)

    def exact(stack: QuantizedWeight) -> Tensor:
        return torch.stack([reference.dequantize(stack[e].codes, stack[e], F64) for e in range(3)])

    x, ids, weights = torch.randn(6, 128, dtype=F64), torch.randint(3, (6, 2)), torch.rand(6, 2, dtype=F64)
    got = reference.experts(x, ids, weights, Experts(gate_up, down))
    torch.testing.assert_close(got, reference.experts(x, ids, weights, Experts(exact(gate_up), exact(down))))
