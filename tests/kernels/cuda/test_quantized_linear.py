"""GEMMs with low-bit matrices, in Triton's interpreter, against the reference implementation in float64."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import NextNorm, QuantizedWeight, Weight, pack_e2m1, reference
from kernels.cuda import linear, quantized_linear
from kernels.triton import scaled, weight_only
from kernels.triton.norm import rms_norm
from kernels.triton.pairs import sort_pairs
from tests.oracles.random_weights import FORMS, random_weight

F64 = torch.float64


def exact(weight: QuantizedWeight) -> Tensor:
    return reference.dequantize(weight.codes, weight, F64)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())


def test_the_values_of_codes() -> None:
    """One by one, as the formats say: sign, exponent and mantissa."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    codes = torch.randint(16, (67, 8), generator=torch.Generator().manual_seed(0))
    codes[:16] = torch.arange(16)[:, None]
    eight = QuantizedWeight("e2m1", pack_e2m1(codes), torch.ones(67, 1), 8)
    assert torch.equal(weight_only.dequantize(eight.codes, eight, torch.float32), table[codes])
    assert torch.equal(exact(eight).float(), table[codes])
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("int8", torch.int8)):
        weight = QuantizedWeight(kind, codes.view(dtype), torch.ones(256, 1), 1)  # type: ignore[arg-type]
        got, want = weight_only.dequantize(weight.codes, weight, torch.float32), codes.view(dtype).float()
        finite = want.isfinite()
        assert torch.equal(got[finite], want[finite])
        assert finite.sum() >= 254


@pytest.mark.parametrize("form", FORMS)
def test_dequantize(form: str) -> None:
    weight = random_weight(form, 130, 320 if FORMS[form][1] != 128 else 384)
    assert error(weight_only.dequantize(weight.codes, weight, torch.float32), exact(weight)) < 1e-6
    assert error(weight_only.dequantize(weight.codes, weight, torch.float16), exact(weight)) < 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_tokens", "dtype"), [(5, torch.float32), (33, torch.float16)])
def test_weight_only(form: str, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows that lie in a larger tensor, a number of rows that tiles do not divide, and a last group that is
    short.
    """
    monkeypatch.setattr(quantized_linear, "quantizes", lambda x, weight: False)
    weight = random_weight(form, 130, 448 if FORMS[form][0] == "e4m3" else 384)
    x, bias = torch.randn(num_tokens, 1000).to(dtype)[:, : weight.num_channels], torch.randn(130).to(dtype)
    want = x.double() @ exact(weight).T + bias.double()
    assert error(linear.linear(x, weight, bias), want) < {torch.float32: 1e-5}.get(dtype, 8e-3)


@pytest.mark.parametrize("form", ["fp8", "int4 asymmetric", "int4 desc_act"])
@pytest.mark.parametrize("num_tokens", [3, 70])
@pytest.mark.filterwarnings("ignore:overflow")  # of exp, as on a GPU, which does not warn
def test_what_stands_around_them(form: str, num_tokens: int) -> None:
    """The norm, the residual sum and SwiGLU, for few tokens and for many."""
    weight, k = random_weight(form, 128, 256), 256
    x, norm, residual = torch.randn(num_tokens, k), torch.randn(k), torch.randn(num_tokens, 128)
    wide, wx = exact(weight), x.double()
    normed = reference.rms_norm(wx, norm.double(), 1e-6)
    limit = 0.06 if quantized_linear.quantizes(x, weight) else 1e-5
    assert error(linear.norm_linear(x, norm, 1e-6, weight), normed @ wide.T) < limit
    assert error(linear.norm_gated(x, norm, 1e-6, weight), reference.silu_and_mul(normed @ wide.T)) < limit
    got = linear.norm_gated(x, norm, 1e-6, weight, gate="gelu_tanh")
    assert error(got, reference.gelu_and_mul(normed @ wide.T)) < limit
    assert error(linear.linear_gated(x, weight), reference.silu_and_mul(wx @ wide.T)) < limit
    assert error(linear.linear_gated(x, weight, None, "gelu_tanh"), reference.gelu_and_mul(wx @ wide.T)) < limit
    out = torch.empty(num_tokens, 128)
    assert linear.norm_linear(x, norm, 1e-6, weight, None, out) is out
    assert linear.linear_add(residual, x, weight) is residual


@pytest.mark.parametrize("form", ["float", "fp8", "int4 asymmetric", "int4 desc_act"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 70])
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_norm_apart_is_one_that_a_kernel_computes_alone(
    form: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch, exact_float8: None
) -> None:
    monkeypatch.setattr(quantized_linear, "multiplies_e4m3", lambda device: True)
    weight: Weight = torch.randn(128, 256) if form == "float" else random_weight(form, 128, 256)
    x, norm, alone = torch.randn(num_tokens, 256), torch.randn(256), Mock(wraps=rms_norm)
    for module in (linear, quantized_linear):
        monkeypatch.setattr(module, "rms_norm", alone)
    linear.norm_linear(x, norm, 1e-6, weight)
    assert linear.norms_apart(x, weight) == alone.called
    for gate in ("silu", "gelu_tanh"):
        alone.reset_mock()
        linear.norm_gated(x, norm, 1e-6, weight, None, gate)  # type: ignore[arg-type]
        assert linear.norms_apart(x, weight, gate) == alone.called  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["float", "fp8", "fp8 blocks", "int8", "int4 asymmetric", "int4 desc_act"])
@pytest.mark.parametrize("num_tokens", [2, 70])
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_norm_with_the_sum_before(
    form: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch, exact_float8: None
) -> None:
    """QuantizedRows where the next product rounds it, it gives what that product's own norm gives."""
    monkeypatch.setattr(quantized_linear, "multiplies_e4m3", lambda device: True)
    first: Weight = torch.randn(256, 256) if form == "float" else random_weight(form, 256, 256)
    second: Weight = torch.randn(256, 256) if form == "float" else random_weight(form, 256, 256)
    residual, x, weight, bias = (
        torch.randn(num_tokens, 256),
        torch.randn(num_tokens, 256),
        torch.randn(256),
        torch.randn(256),
    )
    rounded = linear.quantized_input(residual, second)
    assert (rounded is not None) == (num_tokens == 70 and form in ("fp8", "fp8 blocks", "int8"))
    total = residual.clone()
    normed = linear.linear_add_norm(total, x, first, bias, NextNorm(weight, 1e-6, rounded))
    want = linear.linear_add(residual.clone(), x, first, bias)
    torch.testing.assert_close(total, want)
    got = linear.linear(normed, second)
    assert error(got, linear.norm_linear(total, weight, 1e-6, second)) < 1e-5
    if rounded is not None:
        rounded = linear.quantized_input(residual, second, None, "silu")
        normed = linear.linear_add_norm(residual.clone(), x, first, bias, NextNorm(weight, 1e-6, rounded))
        assert error(linear.linear_gated(normed, second), linear.norm_gated(total, weight, 1e-6, second)) < 1e-5


@pytest.mark.parametrize("form", ["fp8", "fp8 blocks", "fp8 rows of blocks", "int8"])
def test_codes_times_codes(form: str, monkeypatch: pytest.MonkeyPatch, exact_float8: None) -> None:
    """With many tokens x is rounded as well: the product is exact but for that."""
    monkeypatch.setattr(quantized_linear, "multiplies_e4m3", lambda device: True)
    weight = random_weight(form, 200, 256)
    x, norm, bias = torch.randn(130, 256), torch.randn(256), torch.randn(200)
    assert quantized_linear.quantizes(x, weight)
    group = 0 if weight.scale.shape[1] == 1 else 128
    normed = reference.rms_norm(x, norm, 1e-6)
    codes, scale = scaled.quantize_rows(normed, weight.codes.dtype, group=group)
    rounded = codes.double() * scale.double().repeat_interleave(group or 256, 1)
    assert error(rounded, normed.double()) < (0.015 if form == "int8" else 0.04)
    want = rounded @ exact(weight).T + bias.double()
    assert error(linear.norm_linear(x, norm, 1e-6, weight, bias), want) < 2e-3  # the norm's rounding decides some codes
    assert error(linear.linear(normed, weight, bias), want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (0, 64), (2, 5000)])
def test_quantize_rows(dtype: torch.dtype, shape: Any, exact_float8: None) -> None:
    x = torch.randn(shape)
    x[:1] = 0
    got, want = scaled.quantize_rows(x, dtype), reference.quantize_rows(x, dtype)
    torch.testing.assert_close(got[1], want[1])
    step = 1 if dtype == torch.int8 else 32  # where a division is rounded otherwise, the next code
    assert ((got[0].float() - want[0].float()).abs() <= step).all()
    assert (got[0].float() != want[0].float()).float().mean().nan_to_num() < 0.01


@pytest.mark.parametrize("num_rows", [1, 7, 8])
def test_quantize_rows_by_group(num_rows: int, exact_float8: None) -> None:
    """Scales as cuBLAS takes them: those of a group side by side, rows in fours."""
    x = torch.randn(num_rows, 384)
    codes, scale = scaled.quantize_rows(x, torch.float8_e4m3fn, group=128, by_group=True)
    assert codes.shape == (-(-num_rows // 4) * 4, 384)
    assert scale.stride() == (1, len(codes))
    plain = scaled.quantize_rows(x, torch.float8_e4m3fn, group=128)
    assert torch.equal(codes[:num_rows].float(), plain[0].float())
    assert torch.equal(scale[:num_rows], plain[1])


def test_the_last_group_of_a_row_may_be_shorter(exact_float8: None) -> None:
    x = torch.randn(5, 320)
    codes, scale = scaled.quantize_rows(x, torch.float8_e4m3fn, group=128)
    for first in (0, 128, 256):
        alone = scaled.quantize_rows(x[:, first : first + 128], torch.float8_e4m3fn)
        assert torch.equal(codes[:, first : first + 128].float(), alone[0].float())
        assert torch.equal(scale[:, first // 128], alone[1][:, 0])


def test_quantize_pairs_in_the_order_of_experts(exact_float8: None) -> None:
    """Each pair of a token and a local expert gets its token's row; experts 2 to 6 of 8 are local, and one token is
    padding.
    """
    torch.manual_seed(0)
    x, ids = torch.randn(21, 512)[:, :384], torch.rand(21, 8).argsort(1)[:, :3].int()
    ids[-1] = -1
    order, _, _, positions, _ = sort_pairs(ids, 5, 2, 64, with_positions=True)
    assert positions is not None
    local = ((ids >= 2) & (ids < 7)).flatten()
    num_local = int(local.sum())
    pairs = order[:num_local].long()
    assert sorted(pairs.tolist()) == local.nonzero().flatten().tolist()
    assert ids.flatten()[pairs].diff().min() >= 0
    assert torch.equal(positions.flatten()[pairs], torch.arange(num_local).int())
    codes, scale = scaled.quantize_pairs(x, torch.float8_e4m3fn, 128, ids, positions, 2, 5)
    want = scaled.quantize_rows(x, torch.float8_e4m3fn, group=128)
    assert torch.equal(codes[:num_local].float(), want[0].float()[pairs // 3])
    assert torch.equal(scale[:num_local], want[1][pairs // 3])


def test_a_gpu_that_cannot_multiply_e4m3_keeps_x_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight("fp8", 64, 64), torch.randn(100, 64)
    monkeypatch.setattr(quantized_linear, "multiplies_e4m3", lambda device: False)
    assert error(linear.linear(x, weight), x.double() @ exact(weight).T) < 1e-5
