"""Products of tens to hundreds of tokens with matrices of few bits: the kernel's arithmetic here, the kernel itself on a GPU."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import reference
from kernels.triton import matmul, quantized
from tests.kernels.hopper.test_quantized_few import scale_of, values_of
from tests.oracles.random_weights import FORMS, random_weight
from tests.support.gluon_on_tensors import run_on_tensors

tiles = quantized.tiles  # type: ignore[attr-defined]
if tiles is None:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)


def decode(pairs: Tensor, kind: str, layout: object = None) -> tuple[Tensor, Tensor]:
    """What the kernel's PTX does: see `test_quantized_few.test_bits`."""
    return values_of(pairs.contiguous().view(torch.uint8), kind)


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_tensors(monkeypatch, tiles, "_tiles_quantized_kernel", ("_ask", "_rows", "_weights"))
    monkeypatch.setattr(quantized.dense, "config", lambda *_: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(tiles, "decode_pairs", decode)
    monkeypatch.setattr(tiles, "_pairs_layout", lambda warps: None)
    monkeypatch.setattr(quantized, "_rounds", lambda x, weight: False)
    monkeypatch.setattr(tiles, "scale_of", scale_of)


def check(form: str, num_tokens: int, n: int, k: int, device: str) -> None:
    """On rows of a larger tensor, with a bias, added to a residual, and with SwiGLU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    weight = random_weight(form, n, k, device)
    x, bias, residual = random(num_tokens, 2 * k)[:, :k], random(n), random(num_tokens, n)
    want = x.double() @ reference.dequantize(weight.codes, weight, torch.float64).T
    norm = 1 + random(k) / 10
    normed = reference.rms_norm(x.double(), norm.double(), 1e-6)
    both = normed @ reference.dequantize(weight.codes, weight, torch.float64).T
    for got, exact, limit in (
        (matmul.linear(x, weight, bias), want + bias.double(), 6e-3),
        (matmul.linear_add(residual.clone(), x, weight), want + residual.double(), 6e-3),
        (matmul.norm_gated(x, norm, 1e-6, weight, bias), reference.silu_and_mul(both + bias.double()), 1.2e-2),
    ):
        assert got.shape == exact.shape
        assert (got.double() - exact).norm() < limit * exact.norm()


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("int4 groups of 32", "nvfp4", "mxfp4")])
def test_every_form(form: str, without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    num_launched, launch = 0, tiles.launch

    def counted(*args: Any, **options: Any) -> None:
        nonlocal num_launched
        num_launched += 1
        launch(*args, **options)

    monkeypatch.setattr(tiles, "launch", counted)
    n = 256 if form == "fp8 blocks" else 200
    check(form, 40, n, 768, "cpu")
    assert num_launched == 3


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_of_the_channels(parts: int, without_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as many that the last are empty."""
    monkeypatch.setattr(tiles, "_choose", lambda *shape: tiles.Config(64, 32, 3, 1 if shape[-1] else parts))
    check("int4 asymmetric", 70, 200, 768, "cpu")


def test_what_it_does_not_apply_to(without_layouts: None) -> None:
    x = torch.zeros(40, 512, dtype=torch.bfloat16)
    assert tiles.config(x, random_weight("int4", 128, 512)) is not None
    assert tiles.config(x.half(), random_weight("int4", 128, 512)) is None
    for form in ("int4 desc_act", "nvfp4", "mxfp4", "int4 groups of 32"):  # an order, short groups
        assert tiles.config(x, random_weight(form, 128, 512)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("num_tokens", [17, 64, 100, 300])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(form: str, num_tokens: int) -> None:
    check(form, num_tokens, 1024, 2048, "cuda")
