"""The experts of packed stacks against the reference implementation's of plain ones."""

from typing import Any

import pytest
import torch

import kernels
from kernels import Experts, QuantizedWeight, Router, RouterArgs, Weight, reference
from kernels.cpu import matmul, moe
from kernels.cpu.library import library
from kernels.cpu.packed_weight import NativeWeight
from tests.oracles.random_weights import random_experts


@pytest.fixture(autouse=True)
def needs_the_compiled_products() -> None:
    if library() is None:
        pytest.skip("no compiler")


def check(gate_up: Weight, down: Weight, activation: Any, biased: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Check a rank that holds 6 experts from 1 on, among 8, with padding: as a result and added to the residual
    stream.
    """
    torch.manual_seed(0)
    packed = [matmul.pack_weight(weight) for weight in (gate_up, down)]
    size = gate_up.num_channels if isinstance(gate_up, QuantizedWeight) else gate_up.shape[2]
    x, hidden = torch.randn(9, size).to(dtype), torch.randn(9, size).to(dtype)
    ids, weights = torch.rand(9, 8).argsort(1)[:, :3].int(), torch.rand(9, 3)
    ids[-1] = -1
    biases = (torch.randn(6, 192).to(dtype), torch.randn(6, 128).to(dtype)) if biased else (None, None)
    for add_to in (None, hidden):
        got, want = (
            module.experts(
                x, ids, weights, Experts(*stacks, *biases, activation, 1), None if add_to is None else add_to.clone()
            ).double()
            for module, stacks in ((moe, packed), (reference, (gate_up, down)))
        )  # fmt: skip
        assert (got - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "biased"), [("silu", False), ("silu", True), ("clamped_swiglu", True)])
def test_experts(dtype: torch.dtype, activation: str, biased: bool) -> None:
    gate_up, down = torch.randn(6, 192, 128) * 128**-0.5, torch.randn(6, 128, 96) * 96**-0.5
    check(gate_up.to(dtype), down.to(dtype), activation, biased, dtype, 1e-5 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("form", ["int8", "int8 groups", "int4 groups of 32", "int4 channels"])
def test_experts_of_few_bits(form: str) -> None:
    """Products round x to eight bits."""
    stacks = random_experts(form, 6, 192, 128), random_experts(form, 6, 128, 96)
    if form == "int8 groups":
        stacks = stacks[0], random_experts("int8", 6, 128, 96)
    assert isinstance(stacks[0], QuantizedWeight)
    check(*stacks, "silu", False, torch.float32, 2e-2)


@pytest.mark.parametrize("form", ["floats", "int4 groups of 32", "int8"])
def test_experts_that_are_no_whole_number_of_tiles(form: str) -> None:
    gate_up, down = torch.randn(6, 192, 80) * 80**-0.5, torch.randn(6, 80, 96) * 96**-0.5
    if form == "floats":
        stacks: tuple[Weight, Weight] = gate_up, down
    else:
        stacks = random_experts(form, 6, 192, 96), random_experts(form, 6, 96, 96)
    assert all(isinstance(matmul.pack_weight(stack), NativeWeight) for stack in stacks)
    check(*stacks, "silu", False, torch.float32, 1e-5 if form == "floats" else 2e-2)


def test_stacks_that_cannot_be_packed_stay_as_they_are() -> None:
    wide = torch.randn(2, 32, 16).double()
    assert matmul.pack_weight(wide) is wide


def test_the_matrices_of_a_packed_stack_share_its_memory() -> None:
    for stack in (torch.randn(3, 128, 64), random_experts("int4 groups of 32", 3, 128, 64)):
        packed = matmul.pack_weight(stack)
        assert isinstance(packed, NativeWeight)
        size = packed.nbytes // 3
        assert [matrix.data_ptr() - packed.data_ptr() for matrix in packed.stack] == [0, size, 2 * size]


def test_one_stack_may_be_packed_and_the_other_not() -> None:
    """Groups of 40 channels cannot be packed: down is read as it is."""
    stacks = random_experts("int8", 6, 80, 128), random_experts("int8", 6, 128, 40)
    assert [isinstance(matmul.pack_weight(stack), NativeWeight) for stack in stacks] == [True, False]
    check(*stacks, "silu", False, torch.float32, 2e-2)


@pytest.mark.parametrize("scoring", ["softmax", "softmax_chosen", "sigmoid"])
@pytest.mark.parametrize("num_experts", [8, 60])
def test_a_token_alone_is_routed_as_among_others(scoring: Any, num_experts: int) -> None:
    torch.manual_seed(0)
    x, norm, weight = torch.randn(33, 64), torch.rand(64), matmul.pack_weight(torch.randn(num_experts, 64))
    assert isinstance(weight, NativeWeight)
    rule = Router(4, scoring, renormalise=True)
    together = kernels.norm_route(x, norm, 1e-5, RouterArgs(weight, rule))
    alone = [kernels.norm_route(row, norm, 1e-5, RouterArgs(weight, rule)) for row in x.split(1)]
    for got, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(got, torch.cat(parts))
    plain = torch.randn(num_experts, 64)
    torch.testing.assert_close(
        moe.route(x, RouterArgs(matmul.pack_weight(plain), rule))[1], reference.route(x, RouterArgs(plain, rule))[1]
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_a_token_alone_gets_of_experts_what_it_gets_among_others(activation: Any) -> None:
    torch.manual_seed(0)
    gate_up, down = (matmul.pack_weight(torch.randn(6, n, k)) for n, k in ((192, 128), (128, 96)))
    stack = Experts(gate_up, down, None, None, activation, 0)
    x, ids, weights = torch.randn(21, 128), torch.rand(21, 6).argsort(1)[:, :3].int(), torch.rand(21, 3)
    together = moe.experts(x, ids, weights, stack)
    parts = zip(x.split(1), ids.split(1), weights.split(1), strict=True)
    assert torch.equal(together, torch.cat([moe.experts(*part, stack) for part in parts]))


def test_sigmoids_do_not_depend_on_their_number() -> None:
    x = torch.randn(1001, 1)
    together = kernels.sigmoid(x.clone())
    assert torch.equal(together, torch.cat([kernels.sigmoid(row.clone()) for row in x.split(1)]))
    torch.testing.assert_close(together, x.sigmoid())
