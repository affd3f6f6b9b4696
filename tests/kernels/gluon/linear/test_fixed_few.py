"""Deterministic GEMM of few tokens in Gluon, on torch tensors: `tests.support.gluon_on_tensors`.

What is inline assembly on a GPU is torch here; that it has the other kernels' bytes, `python -m tests.gpu determinism`
checks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import reference
from kernels.cuda.choice import GLUON
from kernels.gluon.linear import fixed_few
from tests.support.gluon_on_tensors import run_on_tensors

if not GLUON:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)

HELPERS = ("warps", "middle", "last", "_tree", "_finish", "_load_x", "_add_steps")
BF16 = torch.bfloat16


def channels(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.contiguous().view(dtype).unflatten(-1, (-1, 4)).float()


def multiply(sums: Any, x: Tensor, more: Tensor, w: Tensor, is_bf16: bool) -> Any:
    """Return the tensor core's sums from each thread's words [warps, 8, 4]."""
    dtype = BF16 if is_bf16 else torch.float16
    shape = sums[0].shape
    rows = channels(w, dtype).flatten(2)
    found = []
    for words in (x, more):
        product = channels(words.expand(shape), dtype).flatten(2) @ rows.mT  # [warps, tokens, rows]
        found += [product[..., ::2], product[..., 1::2]]
    return tuple(total + product for total, product in zip(sums, found, strict=True))


def normed(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    wide = (channels(x, BF16) * factor).to(BF16).float() * channels(weight, BF16)
    return wide.to(BF16).contiguous().view(torch.int64).squeeze(-1)


def norm_factor(row: Any, eps: float, k: int, *_: int) -> Tensor:
    return torch.rsqrt(row.tensor[0].float().square().mean() + eps)


@pytest.fixture(autouse=True)
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_tensors(monkeypatch, fixed_few, "_fixed_few_kernel", HELPERS)
    for name, body in (("_multiply", multiply), ("_normed", normed), ("_norm_factor", norm_factor)):
        monkeypatch.setattr(fixed_few, name, body)
    monkeypatch.setattr(fixed_few, "is_hopper", lambda device: True)
    monkeypatch.setattr(fixed_few, "num_multiprocessors", lambda device: 3)


def summed(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    """x W^T + b in float32: 16 channels after the other, and their sums in a tree."""
    sums, width = [], x.shape[1] // pieces
    for i in range(pieces):
        total = torch.zeros(len(x), len(weight))
        for at in range(i * width, (i + 1) * width, 16):
            total = total + x[:, at : at + 16].float() @ weight[:, at : at + 16].float().T
        sums.append(total + bias.float() if bias is not None and i == 0 else total)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 8, 9, 16])
@pytest.mark.parametrize(("n", "k", "pieces"), [(64, 256, 1), (40, 1088, 1), (24, 256, 8), (48, 320, 4), (16, 64, 2)])
def test_sums_are_those_of_the_tree(num_tokens: int, n: int, k: int, pieces: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_tokens, 2 * k)[:, :k].to(dtype), torch.randn(n, k).to(dtype), torch.randn(n)
    bias, residual = bias.to(dtype), torch.randn(num_tokens, n).to(dtype)
    out = torch.empty(num_tokens, n)
    assert fixed_few.supports(x, weight, out, pieces) == (dtype == BF16)
    fixed_few.launch(x, weight, bias, out, pieces=pieces)
    torch.testing.assert_close(out, summed(x, weight, bias, pieces), atol=1e-3, rtol=1e-4)
    for rounds in (False, True):
        into = residual.clone()
        fixed_few.launch(x, weight, bias, into, residual=into, rounds=rounds, pieces=pieces)
        assert torch.equal(into, ((out.to(dtype).float() if rounds else out) + residual.float()).to(dtype))


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 3, 12])
def test_activation_of_rounded_sums(gate: Any, num_tokens: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_tokens, 256).to(BF16), torch.randn(96, 256).to(BF16) / 16, torch.randn(96)
    both, out = torch.empty(num_tokens, 96, dtype=BF16), torch.empty(num_tokens, 48, dtype=BF16)
    fixed_few.launch(x, weight, bias.to(BF16), both)
    fixed_few.launch(x, weight, bias.to(BF16), out, gate=gate)
    torch.testing.assert_close(out, reference.gate_and_mul(both, gate), atol=1e-4, rtol=0.02)


def test_norm_of_one_token() -> None:
    torch.manual_seed(0)
    x, norm, weight = torch.randn(1, 1088).to(BF16), torch.rand(1088).to(BF16), torch.randn(64, 1088).to(BF16)
    assert fixed_few.norms(x, norm)
    assert not fixed_few.norms(x, norm.float())
    apart, out = torch.empty(1, 64, dtype=BF16), torch.empty(1, 64, dtype=BF16)
    fixed_few.launch(reference.rms_norm(x, norm, 1e-6), weight, None, apart)
    fixed_few.launch(fixed_few.Normed(x, norm, 1e-6), weight, None, out)
    torch.testing.assert_close(out, apart, atol=1e-3, rtol=0.02)


def test_outputs_are_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiprocessors have as many groups of eight outputs each as whole programs allow."""
    monkeypatch.setattr(fixed_few, "num_multiprocessors", lambda device: 132)
    config = fixed_few.config
    assert config(torch.empty(1, 1024), 4096, False, 1) == (4, 64)
    assert config(torch.empty(1, 1024), 3072, True, 1) == (1, 64)
    assert config(torch.empty(1, 2048), 1024, False, 8) == (1, 16)
    assert config(torch.empty(1, 12288), 4096, False, 8) == (1, 32)
    assert config(torch.empty(1, 4096), 6144, False, 1) == (2, 32)
    assert config(torch.empty(1, 1088), 6144, False, 1)[1] == 17
    assert not fixed_few.supports(torch.empty(17, 64, dtype=BF16), torch.empty(8, 64), torch.empty(17, 8), 1)
    assert not fixed_few.supports(torch.empty(1, 72, dtype=BF16), torch.empty(8, 72), torch.empty(1, 8), 1)
