"""The sum of a product's parts, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton.parts import sum_parts


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
