"""The experts of few tokens in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import Experts, reference
from kernels.cuda import moe
from kernels.data.quantized_weight import in_panels
from kernels.gluon.moe import small_batch as few
from tests.kernels.gluon.linear.test_quantized_small_batch import scale_of, values_of
from tests.kernels.triton.test_moe import exact, random_stack
from tests.support.gluon_on_tensors import run_on_tensors


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = (
        "middle", "last", "_chunks", "_of_chunk", "_load", "_load_step", "_load_x", "_stage_scales", "_enlarge",
        "_add_step", "routed_tokens", "columns",
    )  # fmt: skip
    run_on_tensors(monkeypatch, few, "_few_experts_kernel", helpers)
    monkeypatch.setattr(few, "NO_PAIR", 1 << 30)
    monkeypatch.setattr(few, "decode_bytes", values_of)
    monkeypatch.setattr(few, "decode_small", lambda codes: tuple(v * 2.0**-126 for v in values_of(codes, "e2m1")))
    monkeypatch.setattr(few, "scale_of", scale_of)


def check(form: str, num_tokens: int, activation: Any, biased: bool, first: int, panel: int = 0) -> None:
    """Check a rank that holds 6 experts from `first` on, among 8, with padding: added to the residual stream, and one
    token without it.
    """
    torch.manual_seed(0)
    hidden, inner = {"float": (320, 96), "fp8 blocks": (512, 128)}.get(form, (256, 128))
    x = torch.randn(num_tokens, 2 * hidden).bfloat16()[:, :hidden]
    ids, weights = torch.rand(num_tokens, 8).argsort(1)[:, :3].int(), torch.rand(num_tokens, 3)
    if num_tokens > 1:
        ids[-1] = -1
    gate_up, down = random_stack(form, 6, 2 * inner, hidden), random_stack(form, 6, hidden, inner)
    if form == "float":
        gate_up, down = gate_up.bfloat16(), down.bfloat16()  # type: ignore[union-attr]
    if panel:
        gate_up, down = in_panels(gate_up, panel), in_panels(down, panel)
    biases = (torch.randn(6, 2 * inner).bfloat16(), torch.randn(6, hidden).bfloat16()) if biased else (None, None)
    wide = tuple(None if bias is None else bias.double() for bias in biases)
    stack = Experts(gate_up, down, biases[0], biases[1], activation, first)
    in_float64 = Experts(exact(gate_up), exact(down), wide[0], wide[1], activation, first)
    want = reference.experts(x.double(), ids, weights, in_float64)
    assert moe.small_batch_configs(x, x[:, :inner].contiguous(), stack, 3) is not None
    residual = torch.randn(num_tokens, hidden).bfloat16() if num_tokens > 1 else None
    got = moe.experts(x, ids, weights, stack, add_to=None if residual is None else residual.clone())
    want = want if residual is None else want + residual
    assert (got.double() - want).norm() < 6e-3 * want.norm()


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize(("activation", "biased", "first"), [("silu", False, 0), ("clamped_swiglu", True, 2)])
def test_experts(num_tokens: int, activation: str, biased: bool, first: int, without_layouts: Any) -> None:
    check("float", num_tokens, activation, biased, first)


@pytest.mark.parametrize("form", ["fp8", "fp8 blocks", "int8", "int4", "int4 asymmetric", "mxfp4"])
def test_experts_of_few_bits(form: str, without_layouts: Any) -> None:
    for num_tokens in (1, 3) if form == "mxfp4" else (1, 7):
        check(form, num_tokens, "gelu_tanh", True, 1)


def test_codes_in_panels(without_layouts: Any) -> None:
    check("fp8 blocks", 1, "silu", False, 1, panel=128)


@pytest.mark.parametrize("form", ["int4", "int4 asymmetric", "mxfp4"])
def test_scales_by_way_of_shared_memory(form: str, without_layouts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = few._choose
    monkeypatch.setattr(few, "_choose", lambda *args: choose(*args)._replace(staged=True))  # type: ignore[union-attr]
    for num_tokens in (1, 3):
        check(form, num_tokens, "clamped_swiglu", True, 1)
