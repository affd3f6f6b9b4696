"""GELU, scaled sums, multipliers and caps of the CPU's own kernels against the reference implementations."""

import pytest
import torch

from kernels import reference
from kernels.cpu import elementwise

TOLERANCES = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.02, "rtol": 0.02}}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 21), (2, 5, 16), (2, 9000), (0, 8)])
def test_each_is_what_the_reference_computes(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = 3 * torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    pairs = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype) * 4
    for name, arguments in (
        ("gate_and_mul", (pairs, "gelu_tanh")),
        ("add_scaled", (residual, x, 0.22)),
        ("add_scaled", (residual, x)),
        ("rms_norm_add", (residual, x, torch.rand(shape[-1]).to(dtype), 1e-6)),
        ("rms_norm_add", (residual, x, torch.rand(shape[-1]), 1e-6, 0.22)),
        ("add_rms_norm", (residual, x, torch.rand(shape[-1]).to(dtype), 1e-6)),
        ("add_rms_norm", (residual, x, torch.rand(shape[-1]), 1e-6, torch.rand(shape[-1]), 1e-5, 0.22)),
        ("scale", (x, 0.4)),
        ("scale", (x, 1.0, 2.0)),
        ("scale", (x, 1.5, 30.0)),
    ):
        results = []
        for module in (elementwise, reference):
            own = [a.clone() if torch.is_tensor(a) else a for a in arguments]
            results.append(getattr(module, name)(*own))
            assert (results[-1] is own[0]) == (name not in ("gate_and_mul", "add_rms_norm"))
            results[-1] = torch.cat((results[-1], own[0]), -1)
        torch.testing.assert_close(*results, **TOLERANCES[dtype])


def test_large_values_and_what_is_not_finite(backend: str) -> None:
    x = torch.tensor([[-100.0, 100.0, torch.nan, torch.inf, 1.0, 1.0, 1.0, 1.0]])
    got = elementwise.gate_and_mul(x, "gelu_tanh")
    assert got[0, :2].tolist() == [0, 100]
    assert got[0, 2].isnan()
    assert got[0, 3] == torch.inf
    capped = elementwise.scale(torch.tensor([[-1e9, 1e9, torch.nan]]), 1.0, 5.0)
    assert capped[0, :2].tolist() == [-5, 5]
    assert capped[0, 2].isnan()


def test_other_tensors_are_computed_by_pytorch(backend: str) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(elementwise.scale(x.clone(), 2.0, 3.0), reference.scale(x.clone(), 2.0, 3.0))
    turned = torch.randn(6, 4).T
    torch.testing.assert_close(elementwise.gate_and_mul(turned, "gelu_tanh"), reference.gelu_and_mul(turned))
