"""Gates, activations and norms with gates by the CPU's own kernel, beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import gates

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 0.02}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 4, 16), (3, 2, 21), (9, 3, 40), (0, 1, 8)])
def test_each_is_what_the_reference_computes(
    backend: str, dtype: torch.dtype, tokens: int, heads: int, width: int
) -> None:
    torch.manual_seed(width)
    n, tolerance = heads * width, TOLERANCES[dtype]
    x, both = 3 * torch.randn(tokens, n).to(dtype), 4 * torch.randn(tokens, n + 5).to(dtype)
    gate, weights = both[:, 5:], torch.rand(n).to(dtype)
    for name, arguments in (
        *(("activation", (x, kind)) for kind in (*gates.KINDS, "gelu")),
        *(("gated", (x, gate, kind, rounded)) for kind in ("silu", "sigmoid") for rounded in (False, True)),
        ("gated_rms_norm", (x.view(tokens, heads, width), gate, weights[:width], 1e-5)),
        ("gated_rms_norm", (x.view(tokens, heads, width), gate, weights[:width].float(), 1e-5)),
        *(("grouped_rms_norm", (x, gate, weights, 1e-5, heads, first)) for first in (True, False)),
    ):
        own = [each.clone() if isinstance(each, Tensor) and each is x else each for each in arguments]
        wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
        got, expected = getattr(gates, name)(*own), getattr(reference, name)(*wide)
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_what_is_not_finite_stays_so(backend: str) -> None:
    x = torch.tensor([[torch.nan, torch.inf, -100.0, 100.0, 1.0]])
    got = gates.gated(torch.ones(1, 5), x, "silu")
    assert got[0, 0].isnan()
    assert got[0, 1] == torch.inf
    assert got[0, 2:4].tolist() == [0, 100]
