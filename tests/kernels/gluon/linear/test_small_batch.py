"""Products for up to 16 tokens against the reference implementation: the kernel's arithmetic here, the kernel itself on
a GPU.

Gluon has no interpreter: see `gluon_on_tensors`.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import reference
from kernels.cuda import linear
from kernels.cuda.choice import GLUON
from kernels.gluon.linear import small_batch as few
from tests.support.gluon_on_tensors import run_on_tensors

if not GLUON:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_tensors(monkeypatch, few, "_few_linear_kernel", ("warps", "middle", "last", "_load_step"))


CONFIGS = [
    few.Config(16, 4),
    few.Config(32, 2, chunk=128, ahead=2, chains=2),
    few.Config(16, 2, ahead=3, x_ahead=2, chains=2),
    few.Config(8, 4, ahead=2, x_ahead=2, chains=2, tokens_first=True),
    few.Config(16, 1, ahead=4, x_ahead=3, tokens_first=True),
    few.Config(16, 16, chunk=32, ahead=2, x_ahead=2, chains=2),
    few.Config(16, 16),  # half of the warps have no channels
]


def check(num_tokens: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    """All operations, through the package's own dispatch, on rows of a larger tensor and with a bias."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    x, scale, bias = random(num_tokens, 2 * k)[:, :k], 1 + random(k, scale=0.1), random(2 * n)
    weight, residual = random(2 * n, k, scale=k**-0.5), random(num_tokens, n)
    one, xd, scale_d, weight_d, bias_d = weight[:n], x.double(), scale.double(), weight.double(), bias.double()
    cases = [
        (linear.linear(x, one), reference.linear(xd, weight_d[:n])),
        (linear.norm_linear(x, scale, 1e-6, one), reference.norm_linear(xd, scale_d, 1e-6, weight_d[:n])),
        (
            linear.norm_linear(x, scale, 1e-6, one, bias[:n]),
            reference.norm_linear(xd, scale_d, 1e-6, weight_d[:n], bias_d[:n]),
        ),
        (linear.norm_gated(x, scale, 1e-6, weight), reference.norm_gated(xd, scale_d, 1e-6, weight_d)),
        (
            linear.norm_gated(x, scale, 1e-6, weight, bias),
            reference.norm_gated(xd, scale_d, 1e-6, weight_d, bias_d),
        ),
        (
            linear.norm_gated(x, scale.float(), 1e-6, weight, bias, "gelu_tanh"),
            reference.norm_gated(xd, scale_d, 1e-6, weight_d, bias_d, "gelu_tanh"),
        ),
        (linear.linear_gated(x, weight), reference.linear_gated(xd, weight_d)),
        (
            linear.linear_gated(x, weight, bias, "gelu_tanh"),
            reference.linear_gated(xd, weight_d, bias_d, "gelu_tanh"),
        ),
        (
            linear.linear_add(residual.clone(), x, one, bias[:n]),
            reference.linear_add(residual.double(), xd, weight_d[:n], bias_d[:n]),
        ),
    ]
    for got, want in cases:
        assert got.shape == want.shape
        assert torch.linalg.vector_norm(got.double() - want) < 8e-3 * torch.linalg.vector_norm(want)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_n}x{c.warps}{'t' * c.tokens_first}")
@pytest.mark.parametrize(("num_tokens", "n"), [(1, 64), (3, 72), (8, 64), (11, 100), (16, 32)])
def test_every_configuration(
    num_tokens: int, n: int, config: Any, without_layouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_small_batch_config", lambda *shape: config)
    check(num_tokens, n, 512, torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("n", "k", "swiglu"), [*few.MEASURED, (640, 192, False), (5120, 17408, False), (320, 64, True)]
)
def test_chosen_configurations_divide_the_channels(n: Any, k: Any, swiglu: Any) -> None:
    for config in (linear._small_batch_config(n, k, swiglu, more) for more in (False, True)):
        if config is None:
            continue
        assert k % config.chunk == 0
        assert config.block_n >= (8 if config.tokens_first else 16)


def test_what_it_does_not_apply_to(without_layouts: Any) -> None:
    x = torch.zeros(8, 512, dtype=torch.bfloat16)
    assert linear.small_batch_config(x, 512, False) is not None
    assert linear.small_batch_config(x.float(), 512, False) is None
    assert linear.small_batch_config(x[:, :500], 512, False) is None
    assert linear.small_batch_config(torch.zeros(17, 512, dtype=torch.bfloat16), 512, False) is None
    assert linear.small_batch_config(x, 100_000, False) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 13, 16])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (6144, 4096), (1000, 192)])
def test_on_a_gpu(num_tokens: int, n: int, k: int) -> None:
    check(num_tokens, n, k, torch.bfloat16, "cuda")
