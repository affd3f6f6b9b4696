"""Products of packed weights against the reference implementation's of plain ones."""

import pytest
import torch

from kernels import reference
from kernels.cpu import matmul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_products_of_packed_weights(dtype: torch.dtype, num_tokens: int) -> None:
    x, residual = torch.randn(num_tokens, 48).to(dtype), torch.randn(num_tokens, 64).to(dtype)
    weight, bias, norm = torch.randn(64, 48).to(dtype), torch.randn(64).to(dtype), torch.randn(48).to(dtype)
    packed = matmul.pack_weight(weight)
    assert packed.shape == weight.shape
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for b in (None, bias):
        for name, arguments in (
            ("linear", (x,)),
            ("linear_add", (residual, x)),
            ("norm_linear", (x, norm, 1e-5)),
            ("norm_swiglu", (x, norm, 1e-5)),
        ):
            got, want = (
                getattr(module, name)(*(a.clone() if torch.is_tensor(a) else a for a in arguments), w, b)
                for module, w in ((matmul, packed), (reference, weight))
            )
            torch.testing.assert_close(got, want, **tolerance)
    into = residual.clone()
    assert matmul.linear_add(into, x, packed) is into


def test_wide_weights_stay_as_they_are() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    assert matmul.pack_weight(weight) is weight
