"""Low-bit experts of more than a few tokens in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import Experts, reference
from kernels.cuda import moe
from kernels.gluon.moe import weight_only as quantized_experts
from tests.kernels.triton.test_moe import exact, random_stack
from tests.support.steps_on_tensors import steps_on_tensors


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = (
        "_bring", "_ask_codes", "_multiply", "_step", "_ask_scales", "_half", "_rows", "_words", "_tile",
        "place_of",
    )  # fmt: skip
    steps_on_tensors(monkeypatch, quantized_experts, "_quantized_experts_kernel", helpers)
    monkeypatch.setattr(quantized_experts, "_prefetch_scales", lambda *arguments: None)


def check(
    form: str,
    hidden: int,
    inner: int,
    activation: Any = "silu",
    biased: bool = False,
    first: int = 0,
    num_tokens: int = 40,
) -> None:
    """Check a rank that holds 6 experts from `first` on, among 8, with padding: added to the residual stream, or
    without it where there are no biases.
    """
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 2 * hidden).bfloat16()[:, :hidden]
    ids, weights = torch.rand(num_tokens, 8).argsort(1)[:, :3].int(), torch.rand(num_tokens, 3)
    ids[-1] = -1
    gate_up, down = random_stack(form, 6, 2 * inner, hidden), random_stack(form, 6, hidden, inner)
    biases = (torch.randn(6, 2 * inner).bfloat16(), torch.randn(6, hidden).bfloat16()) if biased else (None, None)
    wide = tuple(None if bias is None else bias.double() for bias in biases)
    stack = Experts(gate_up, down, biases[0], biases[1], activation, first)
    in_float64 = Experts(exact(gate_up), exact(down), wide[0], wide[1], activation, first)
    want = reference.experts(x.double(), ids, weights, in_float64)
    assert quantized_experts.supports(x, gate_up)
    assert quantized_experts.supports(x, down)
    residual = torch.randn(num_tokens, hidden).bfloat16() if biased else None
    got = moe.experts(x, ids, weights, stack, add_to=None if residual is None else residual.clone())
    want = want if residual is None else want + residual
    assert (got.double() - want).norm() < 8e-3 * want.norm()


@pytest.mark.parametrize("form", ["fp8", "fp8 blocks", "int8", "int4 asymmetric", "int4 groups of 32", "nvfp4"])
def test_experts_of_few_bits(form: str, without_layouts: Any) -> None:
    check(form, 256, 256 if "int4" in form else 128, "gelu_tanh", biased=True, first=1)


def test_rows_that_end_in_a_step(without_layouts: Any) -> None:
    """gpt-oss has rows of 1440 bytes: 22 steps and a half."""
    check("mxfp4", 192, 320, "clamped_swiglu", biased=True)
    check("int4 groups of 32", 320, 96)


def test_tiles_at_most_half_full(without_layouts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have 15 pairs on average, and tiles are of 32."""
    heights = set()
    tile = quantized_experts._tile

    def recorded(*args: Any) -> None:
        heights.add(args[-4])
        tile(*args)

    monkeypatch.setattr(quantized_experts, "_tile", recorded)
    check("mxfp4", 128, 64)
    assert heights == {16, 32}


def test_up_to_8_tokens(without_layouts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check("mxfp4", 192, 320, "clamped_swiglu", biased=True, num_tokens=7)
    check("fp8 blocks", 256, 128, num_tokens=2)


def test_what_it_does_not_apply_to(without_layouts: None) -> None:
    x = torch.zeros(40, 192, dtype=torch.bfloat16)
    assert quantized_experts.supports(x, random_stack("mxfp4", 2, 64, 192))
    assert not quantized_experts.supports(x.half(), random_stack("mxfp4", 2, 64, 192))
    assert not quantized_experts.supports(x, random_stack("float", 2, 64, 192))
