"""Routers and experts in Triton's interpreter, against the reference implementation in float64."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

from kernels import Experts, NextNorm, QuantizedRows, QuantizedWeight, Router, RouterArgs, reference
from kernels.cuda import moe, router
from kernels.triton.router import logits_in_parts, top_k
from kernels.triton.scaled import quantize_rows
from tests.kernels.reference.test_moe import ROUTERS
from tests.oracles.random_weights import random_experts

F64 = torch.float64


@pytest.mark.parametrize(
    ("name", "num_tokens", "corrected"),
    [("Qwen3", 67, False), *((name, 2, corrected) for name in ROUTERS for corrected in (False, True))],
)
def test_route(name: str, num_tokens: int, corrected: bool) -> None:
    """Also of tokens that lie in a larger tensor, 60 experts, and padding."""
    torch.manual_seed(0)
    rule, x = ROUTERS[name], torch.randn(num_tokens, 200)[:, :96]
    weight, bias, norm = torch.randn(60, 96) / 5, torch.randn(60) if corrected else None, torch.rand(96)
    correction = torch.randn(60) / 4 if corrected else None
    slots = torch.arange(num_tokens) - (0 if num_tokens == 1 else 1)
    want = reference.route(x, RouterArgs(weight, rule, bias, correction), slots)
    got = router.route(x, RouterArgs(weight, rule, bias, correction), slots)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], atol=1e-6, rtol=1e-4)
    for result, exact_one in zip(
        router.norm_route(x, norm, 1e-6, RouterArgs(weight, rule, bias, correction)),
        reference.norm_route(x, norm, 1e-6, RouterArgs(weight, rule, bias, correction)),
        strict=True,
    ):
        torch.testing.assert_close(result, exact_one, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 64, 65])
def test_a_norm_apart_is_one_that_a_kernel_computes_alone(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, alone = torch.randn(num_tokens, 32), Mock(wraps=reference.rms_norm)
    monkeypatch.setattr(router, "rms_norm", alone)
    router.norm_route(x, torch.rand(32), 1e-6, RouterArgs(torch.randn(8, 32), ROUTERS["Qwen3"]))
    assert router.route_norms_apart(x) == alone.called


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as integers: let it multiply the numbers."""
    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *more: multiply(self, wide(a), wide(b), *more))


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "num_tokens", "num_parts"),
    [
        (torch.bfloat16, torch.float32, 65, 5),
        (torch.bfloat16, torch.float32, 700, 5),
        (torch.bfloat16, torch.float32, 1100, 3),
        (torch.float16, torch.float32, 65, 6),
        (torch.bfloat16, torch.bfloat16, 33, 3),
        (torch.bfloat16, torch.bfloat16, 1700, 2),
    ],
)
def test_logits_in_parts(dtype: torch.dtype, weight_dtype: torch.dtype, num_tokens: int, num_parts: int) -> None:
    """Errors are those of float32, also with float32 weights, in parts that need not be equal."""
    torch.manual_seed(0)
    x, bias = torch.randn(num_tokens, 530).to(dtype), torch.randn(60)
    weight = (torch.randn(60, 530) / 23).to(weight_dtype)
    got = logits_in_parts(x, weight, bias)
    want = x.double() @ weight.double().T + bias
    assert len(got) == num_parts
    assert (got.double().sum(0) - want).abs().max() < 2e-6
    few = slice(max(num_tokens - 65, 0), None)  # the interpreter runs a program for each, one after the other
    rule, correction = Router(5, "sigmoid", 6, 3, "top2", renormalise=True), torch.randn(60) / 4
    ids, weights = top_k(got[:, few].contiguous(), correction, rule, None)
    want_ids, wanted = reference.route(x[few].double(), RouterArgs(weight.double(), rule, bias.double(), correction))
    same = (ids == want_ids).all(1)
    assert same.double().mean() > 0.999
    torch.testing.assert_close(weights[same].double(), wanted[same].double(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 66])
@pytest.mark.parametrize("rule", [Router(5), Router(5, "sigmoid", 8, 2, "top2"), Router(5, "softmax_chosen")])
def test_of_equal_experts_the_lower_index_is_chosen(num_tokens: int, rule: Router) -> None:
    ids, weights = router.route(torch.ones(num_tokens, 8), RouterArgs(torch.ones(64, 8), rule))
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * num_tokens
    assert len(weights.unique()) == 1


def exact(stack: QuantizedWeight | Tensor) -> Tensor:
    if isinstance(stack, Tensor):
        return stack.double()
    return torch.stack([reference.dequantize(stack[e].codes, stack[e], F64) for e in range(len(stack))])


def random_stack(form: str, count: int, n: int, k: int) -> QuantizedWeight | Tensor:
    return torch.randn(count, n, k) * k**-0.5 if form == "float" else random_experts(form, count, n, k)


def check(
    form: str, num_tokens: int, activation: Any = "silu", biased: bool = False, first: int = 0, alone: bool = True
) -> None:
    """Check a rank that holds 6 experts from `first` on, among 8, with padding: `alone` and added to the residual
    stream.
    """
    torch.manual_seed(0)
    hidden, inner = (256, 128) if form.startswith(("fp8", "int4")) else (160, 96)
    x = torch.randn(num_tokens, 2 * hidden)[:, :hidden]
    ids, weights = torch.rand(num_tokens, 8).argsort(1)[:, :3].int(), torch.rand(num_tokens, 3)
    ids[-1] = -1
    rows = inner if activation == "relu2" else 2 * inner
    gate_up, down = random_stack(form, 6, rows, hidden), random_stack(form, 6, hidden, inner)
    biases = (torch.randn(6, rows), torch.randn(6, hidden)) if biased else (None, None)
    wide = tuple(None if bias is None else bias.double() for bias in biases)
    stack = Experts(gate_up, down, *biases, activation=activation, first=first)
    in_float64 = Experts(exact(gate_up), exact(down), *wide, activation=activation, first=first)
    want = reference.experts(x.double(), ids, weights, in_float64)
    if alone:
        got = moe.experts(x, ids, weights, stack)
        assert got.shape == want.shape
        assert (got - want).norm() < 1e-5 * want.norm()
    residual = torch.randn(num_tokens, hidden)
    got = moe.experts(x, ids, weights, stack, add_to=residual.clone())
    assert (got - residual - want).norm() < 1e-5 * want.norm()
    total, weight = residual.clone(), torch.randn(hidden)
    normed = moe.experts_add_norm(
        total,
        NextNorm(weight, 1e-6),
        x,
        ids,
        weights,
        stack,
    )
    assert torch.equal(total, got)
    torch.testing.assert_close(normed, reference.rms_norm(got, weight, 1e-6))


@pytest.mark.parametrize("num_tokens", [2, 7, 45])
@pytest.mark.parametrize("first", [0, 2])
def test_experts(num_tokens: int, first: int) -> None:
    check("float", num_tokens, first=first)


@pytest.mark.parametrize("num_tokens", [1, 45])
def test_the_norm_of_the_sum_is_rounded(num_tokens: int, exact_float8: None) -> None:
    x, residual, weight = torch.randn(num_tokens, 256), torch.randn(num_tokens, 256), torch.randn(256)
    ids, weights = torch.rand(num_tokens, 6).argsort(1)[:, :3].int(), torch.rand(num_tokens, 3)
    stacks = torch.randn(6, 256, 256), torch.randn(6, 256, 128)
    into = QuantizedRows.empty(x, torch.float8_e4m3fn, 128)
    assert moe.experts_add_norm(residual, NextNorm(weight, 1e-6, into), x, ids, weights, Experts(*stacks)) is into
    codes, scale = quantize_rows(residual, torch.float8_e4m3fn, group=128, norm_weight=weight, eps=1e-6)
    assert torch.equal(into.codes.float(), codes.float())
    assert torch.equal(into.scale, scale)


@pytest.mark.parametrize("num_tokens", [40, 150])
def test_experts_whose_pairs_fill_several_tiles(num_tokens: int) -> None:
    """Almost all tokens choose the same two of many experts, a few a third one; tiles of one height, or of two."""
    torch.manual_seed(0)
    count = 40 if num_tokens == 40 else 6
    ids = torch.tensor([[0, 2]] * (num_tokens - 7) + [[2, 4]] * 7, dtype=torch.int32)
    x, weights = torch.randn(num_tokens, 32), torch.rand(num_tokens, 2)
    gate_up, down = torch.randn(count, 64, 32), torch.randn(count, 32, 32)
    heights = moe.tile_height(ids.numel() / count), ids[:, 1].bincount().max()
    assert heights[1] > heights[0] >= 16
    want = reference.experts(x.double(), ids, weights, Experts(gate_up.double(), down.double()))
    assert (moe.experts(x, ids, weights, Experts(gate_up, down)) - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu", "relu2"])
def test_activations_and_biases(activation: str) -> None:
    check("float", 5, activation, biased=True)


@pytest.mark.parametrize("form", ["fp8 blocks", "int4"])
def test_quantised_experts_without_gates(form: str) -> None:
    check(form, 20, "relu2")


@pytest.mark.parametrize(
    "form", ["fp8", "fp8 blocks", "int8", "int8 groups", "int4", "int4 asymmetric", "nvfp4", "mxfp4"]
)
def test_experts_of_few_bits(form: str) -> None:
    check(form, 3, biased=True, alone=False)
