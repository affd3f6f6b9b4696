"""The sum of a product's parts, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from kernels import NextNorm, QuantizedRows
from kernels.gpu.parts import sum_parts, sum_parts_norm
from kernels.triton.norm import rms_norm
from kernels.triton.scaled import quantize_rows


@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_bias_and_residual_are_added_in_float32(num_parts: int) -> None:
    """Also of parts with more rows than there are tokens."""
    parts = torch.randn(num_parts, 8, 96).bfloat16()
    bias, residual = torch.randn(96).bfloat16(), torch.randn(5, 96).bfloat16()
    want = parts[:, :5].float().sum(0)
    out = torch.full((5, 96), torch.nan).bfloat16()
    assert sum_parts(parts, out) is out
    torch.testing.assert_close(out, want.bfloat16())
    got = sum_parts(parts, residual.clone(), bias=bias, residual=residual)
    torch.testing.assert_close(got, (want + bias.float() + residual.float()).bfloat16())


@pytest.mark.parametrize(("dtype", "group"), [(torch.int8, 0), (torch.float8_e4m3fn, 0), (torch.float8_e4m3fn, 128)])
@pytest.mark.parametrize("by_group", [False, True])
def test_the_norm_of_a_sum(dtype: torch.dtype, group: int, by_group: bool, exact_float8: None) -> None:
    """The same as if it were read again; and the same codes as if it were rounded afterwards."""
    parts, bias, residual = (
        torch.randn(3, 8, 384).bfloat16(),
        torch.randn(384).bfloat16(),
        torch.randn(5, 384).bfloat16(),
    )
    weight = torch.randn(384).bfloat16()
    want = sum_parts(parts, residual.clone(), bias=bias, residual=residual)
    total = residual.clone()
    assert torch.equal(sum_parts_norm(parts, total, NextNorm(weight, 1e-6), bias=bias), rms_norm(want, weight, 1e-6))
    assert torch.equal(total, want)
    into, total = QuantizedRows.empty(residual, dtype, group, by_group), residual.clone()
    assert sum_parts_norm(parts, total, NextNorm(weight, 1e-6, into), bias=bias) is into
    codes, scale = quantize_rows(want, dtype, group=group, by_group=by_group, norm_weight=weight, eps=1e-6)
    assert torch.equal(total, want)
    assert torch.equal(into.codes[:5].float(), codes[:5].float())
    assert torch.equal(into.scale[:5], scale[:5])
