"""Products of tokens rounded to e4m3 with e4m3 weights in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.cuda import linear, quantized_linear
from kernels.gluon.linear import scaled as scaled_dense
from kernels.gluon.linear.scaled import Config
from kernels.gluon.moe import scaled as scaled_experts
from tests.oracles.random_weights import random_weight
from tests.support.gluon_on_tensors import run_on_tensors

F64 = torch.float64


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch, exact_float8: None) -> None:
    run_on_tensors(monkeypatch, scaled_experts, "_scaled_experts_kernel", ("_quarters", "_sums_of_groups"))
    helpers = ("_bring", "_ask_weight", "_multiply", "_sums")
    run_on_tensors(monkeypatch, scaled_dense, "_scaled_dense_kernel", helpers, shared=scaled_experts)
    monkeypatch.setattr(scaled_experts, "gl", vars(scaled_dense)["gl"])
    for name in ("_quarters", "_sums_of_groups"):
        monkeypatch.setattr(scaled_dense, name, getattr(scaled_experts, name))
    monkeypatch.setattr(scaled_experts, "_computed", lambda values: values)
    monkeypatch.setattr(quantized_linear, "multiplies_e4m3", lambda device: True)


@pytest.mark.parametrize("form", ["fp8", "fp8 blocks"])
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [(40, Config(64, 4, 2)), (100, Config(64, 9, 5)), (200, Config(128, 5, 4)), (100, Config(64, 4, 3, halves=1))],
)
def test_products(
    form: str, num_tokens: int, config: Config, without_layouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than stages or fewer, the channels in parts, of which the last is short, and tiles of few tokens."""
    monkeypatch.setattr(quantized_linear, "_scaled_config", lambda *_: config)
    torch.manual_seed(0)
    weight = random_weight(form, 512, 1152)
    x, norm, bias = torch.randn(num_tokens, 1152).bfloat16(), torch.randn(1152).bfloat16(), torch.randn(512).bfloat16()
    normed = reference.rms_norm(x, norm, 1e-6)
    wide = reference.dequantize(weight.codes, weight, F64)
    want = _rounded(normed, form) @ wide.T
    assert _error(linear.norm_linear(x, norm, 1e-6, weight), want) < 0.03  # the norm's rounding decides some codes
    want = _rounded(x, form) @ wide.T + bias.double()
    assert _error(linear.linear(x, weight, bias), want) < 8e-3
    residual = torch.randn(num_tokens, 512).bfloat16()
    assert _error(linear.linear_add(residual.clone(), x, weight, bias), want + residual) < 8e-3


@pytest.mark.parametrize("form", ["fp8", "fp8 blocks"])
@pytest.mark.parametrize(("num_tokens", "config"), [(40, Config(64, 9, 2)), (100, Config(128, 9, 4))])
def test_swiglu_is_part_of_the_product(
    form: str, num_tokens: int, config: Config, without_layouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "_scaled_config", lambda *_: config)
    monkeypatch.setattr(quantized_linear, "gate_and_mul", None)
    torch.manual_seed(0)
    weight = random_weight(form, 512, 1152)
    x, norm = torch.randn(num_tokens, 1152).bfloat16(), torch.ones(1152).bfloat16()
    wide = reference.dequantize(weight.codes, weight, F64)
    want = reference.silu_and_mul(_rounded(reference.rms_norm(x, norm, 1e-6), form) @ wide.T)
    assert _error(linear.norm_gated(x, norm, 1e-6, weight), want) < 0.03


def test_what_it_does_not_apply_to(without_layouts: Any) -> None:
    x = torch.zeros(40, 256, dtype=torch.bfloat16)
    assert quantized_linear.scaled_config(x, random_weight("fp8", 256, 256), None, False)
    assert not quantized_linear.scaled_config(x.half(), random_weight("fp8", 256, 256), None, False)
    assert not quantized_linear.scaled_config(x, random_weight("fp8", 128, 256), None, False)
    assert not quantized_linear.scaled_config(x, random_weight("fp8 rows of blocks", 256, 256), None, False)
    assert not quantized_linear.scaled_config(x, random_weight("fp8", 512, 256), x[0], True)
    assert not quantized_linear.scaled_config(x, random_weight("fp8", 512, 256), None, True)  # too few tiles


def test_all_multiprocessors_have_a_program_where_cublas_has_too_few_tiles() -> None:
    """The products of Llama-3.1-8B: rows, channels, and the parts of the channels for each number of tokens."""
    by_row = (6144, 4096, (3, 0, 0)), (4096, 4096, (4, 4, 0)), (4096, 14336, (4, 4, 4))
    of_blocks = (6144, 4096, (1, 1, 0)), (4096, 4096, (2, 2, 1)), (4096, 14336, (4, 4, 4))
    for blocks, shapes in ((False, by_row), (True, of_blocks)):
        for n, k, wanted in shapes:
            for num_tokens, parts in zip((24, 128, 256), wanted, strict=True):
                config = quantized_linear._scaled_config(num_tokens, n, k, blocks, False)
                assert (-(-k // 128 // config.part) if config else 0) == parts
                assert config is None or config.halves == (1 if blocks and k < 8192 else 2)
    gated = [quantized_linear._scaled_config(n, 28672, 4096, True, True) for n in (64, 256)]
    assert gated == [Config(64, 32, 5), Config(128, 32, 4)]


def _rounded(x: torch.Tensor, form: str) -> torch.Tensor:
    """x as its codes say, with a scale for each token, or for 128 channels."""
    group = 128 if form == "fp8 blocks" else x.shape[1]
    codes, scale = reference.quantize_rows(x.float().reshape(-1, group), torch.float8_e4m3fn)
    return (codes.double() * scale.double()).reshape(x.shape)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())
