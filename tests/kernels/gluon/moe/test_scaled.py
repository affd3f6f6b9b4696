"""Experts of e4m3 codes times tokens of e4m3 codes in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import Experts, QuantizedWeight
from kernels.cuda import moe
from kernels.gluon.moe import scaled as scaled_experts
from tests.oracles.random_weights import random_experts
from tests.oracles.rounded_experts import rounded_experts
from tests.support.gluon_on_tensors import run_on_tensors


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch, exact_float8: None) -> None:
    helpers = (
        "_bring",
        "_ask_weight",
        "_multiply",
        "_multiply_few",
        "_sums_of_groups",
        "_quarters",
        "_store",
        "_store_few",
        "_activated",
    )
    run_on_tensors(monkeypatch, scaled_experts, "_scaled_experts_kernel", helpers)
    monkeypatch.setattr(scaled_experts, "_computed", lambda values: values)


def packed(gate_up: QuantizedWeight, down: QuantizedWeight) -> Any:
    panels = moe.pack_experts(gate_up, down, torch.bfloat16)
    assert all(isinstance(each, QuantizedWeight) and each.panel for each in panels)
    return panels


def check(num_tokens: int, hidden: int, inner: int, activation: Any = "silu", first: int = 0) -> None:
    """Check a rank that holds 6 experts from `first` on, among 8, with padding: added to the residual stream."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 2 * hidden).bfloat16()[:, :hidden]
    ids, weights = torch.rand(num_tokens, 8).argsort(1)[:, :3].int(), torch.rand(num_tokens, 3)
    ids[-1] = -1
    gate_up, down = (random_experts("fp8 blocks", 6, *shape) for shape in ((2 * inner, hidden), (hidden, inner)))
    want = rounded_experts(x, ids, weights, gate_up, down, activation, first=first)
    gate_up, down = packed(gate_up, down)
    residual = torch.randn(num_tokens, hidden).bfloat16()
    added = moe.experts(
        x, ids, weights, Experts(gate_up, down, activation=activation, first=first), add_to=residual.clone()
    )
    assert (added.double() - want - residual).norm() < 8e-3 * want.norm()


def test_tiles_of_32_pairs(without_layouts: Any) -> None:
    """More steps than stages; some experts have more than 32 pairs. What a stage has of the next one's is not used."""
    assert scaled_experts.block_m(42 * 3 / 8) == 32
    check(42, 512, 256, first=1)
    ids = torch.zeros(40, 1, dtype=torch.int32)
    x, weights = torch.randn(40, 256).bfloat16(), torch.rand(40, 1)
    gate_up, down = random_experts("fp8 blocks", 6, 256, 256), random_experts("fp8 blocks", 6, 256, 128)
    want = rounded_experts(x, ids, weights, gate_up, down, "silu", first=0)
    assert (moe.experts(x, ids, weights, Experts(*packed(gate_up, down))).double() - want).norm() < 8e-3 * want.norm()


def test_tiles_of_64_pairs(without_layouts: Any) -> None:
    """More steps than stages, and fewer than 33 pairs of some experts: only half of a tile of x is asked for."""
    assert scaled_experts.block_m(72 * 3 / 8) == 64
    check(72, 512, 256, first=1)


def test_tiles_of_128_pairs(without_layouts: Any) -> None:
    """Experts have 75 pairs on average: the second warpgroup has few, or none where it has 64 or less."""
    assert scaled_experts.block_m(200 * 3 / 8) == 128
    check(200, 256, 128, "gelu_tanh")


def test_what_it_does_not_apply_to(without_layouts: Any) -> None:
    bfloat16, weight = torch.bfloat16, random_experts("fp8 blocks", 2, 256, 256)
    assert scaled_experts.supports(weight, bfloat16)
    assert not scaled_experts.supports(weight, torch.float16)
    assert not scaled_experts.supports(replace(weight, rounds_activations=False), bfloat16)
    assert not scaled_experts.supports(random_experts("fp8", 2, 256, 256), bfloat16)
    narrow = random_experts("fp8 blocks", 2, 128, 256)
    assert not scaled_experts.supports(narrow, bfloat16)
    assert moe.pack_experts(weight, narrow, bfloat16) == (weight, narrow)
