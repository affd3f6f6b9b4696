"""Deterministic GEMM of many tokens in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import reference
from kernels.cuda import deterministic
from kernels.gluon.linear import fixed, fixed_few
from kernels.gluon.linear.fixed import Config
from tests.support.gluon_on_tensors import run_on_tensors

BF16, N, K = torch.bfloat16, 256, 1024
HELPERS = ("_place", "_ask_weight", "_bring", "_accumulate", "_with_bias", "_store", "_multiply")
OF_PIECES = (Config(64, 1), Config(128, 1), Config(64, 1, True), Config(128, 1, True))
CONFIGS = (*OF_PIECES, Config(64, 2), Config(128, 2), Config(64, 2, True), Config(128, 2, True))


@pytest.fixture(autouse=True)
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_tensors(monkeypatch, fixed, "_fixed_many_kernel", HELPERS)
    monkeypatch.setattr(fixed, "side_by_side", lambda width, channels: None)
    monkeypatch.setattr(fixed, "num_multiprocessors", lambda device: 3)


def summed(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    """x W^T + b in float32: 64 channels after the other, and their sums in a tree."""
    sums = []
    for i in range(pieces):
        total, width = torch.zeros(len(x), len(weight)), K // pieces
        for at in range(i * width, (i + 1) * width, 64):
            total = total + x[:, at : at + 64].float() @ weight[:, at : at + 64].float().T
        sums.append(total + bias.float() if bias is not None and i == 0 else total)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("num_tokens", [1, 200, 700])
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_sums_are_those_of_the_tree(num_tokens: int, pieces: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_tokens, K).to(BF16), torch.randn(N, K).to(BF16), torch.randn(N).to(BF16)
    residual, want = torch.randn(num_tokens, N).to(BF16), summed(x, weight, bias, pieces)
    for config in CONFIGS if pieces == 1 else OF_PIECES:
        out = torch.empty(num_tokens, N)
        fixed.launch(x, weight, bias, out, config, pieces=pieces)
        torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-4)
        for rounds in (False, True):
            into = residual.clone()
            fixed.launch(x, weight, bias, into, config, residual=into, rounds=rounds, pieces=pieces)
            wide = (out.to(BF16).float() if rounds else out) + residual.float()
            assert torch.equal(into, wide.to(BF16))


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("config", [Config(64, 2), Config(128, 2), Config(128, 2, True)])
def test_activation_of_rounded_sums(gate: Any, config: Config) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(150, K).to(BF16), torch.randn(2 * N, K).to(BF16) / 30, torch.randn(2 * N).to(BF16)
    both, out = torch.empty(150, 2 * N, dtype=BF16), torch.empty(150, N, dtype=BF16)
    fixed.launch(x, weight, bias, both, Config(64, 1))
    fixed.launch(x, weight, bias, out, config, gate=gate)
    torch.testing.assert_close(out, reference.gate_and_mul(both, gate), atol=1e-4, rtol=0.02)


def test_rows_beyond_the_last_tile() -> None:
    """The second half of a tile may lie behind the weight."""
    torch.manual_seed(0)
    x, weight = torch.randn(70, K).to(BF16), torch.randn(384, K).to(BF16)
    out = torch.full((70, 512), 9.0)
    fixed.launch(x, weight, None, out[:, :384], Config(64, 2))
    torch.testing.assert_close(out[:, :384], summed(x, weight, None, 1), atol=1e-3, rtol=1e-4)
    assert (out[:, 384:] == 9).all()


def test_choice_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, Config]] = []
    monkeypatch.setattr(fixed, "launch", lambda x, weight, bias, out, config, **_: launched.append((len(x), config)))
    monkeypatch.setattr(
        deterministic, "fixed_parts", lambda x, *_, **options: launched.append((len(x), options["tile"]))
    )

    def chosen(num_tokens: int, n: int, k: int, pieces: int = 1, gate: Any = "") -> Any:
        x, weight = torch.empty(num_tokens, k, dtype=BF16), torch.empty(2 * n if gate else n, k, dtype=BF16)
        deterministic.float_linear(x, weight, None, x.new_empty(num_tokens, n), pieces=pieces, gate=gate)
        return launched.pop()[1]

    assert not isinstance(chosen(64, 4096, 1024), Config)
    monkeypatch.setattr(fixed_few, "is_hopper", lambda device: True)
    rows: list[int] = []
    monkeypatch.setattr(fixed_few, "launch", lambda x, *_, **__: rows.append(len(x)))
    for num_tokens in (1, 8):
        with pytest.raises(IndexError):
            chosen(num_tokens, 4096, 1024)
    assert rows == [1, 8]
    assert not isinstance(chosen(9, 4096, 1024), Config)
    assert chosen(256, 4096, 1024) == Config(64, 1)
    assert chosen(8192, 4096, 1024) == Config(128, 2)
    assert chosen(256, 3072, 1024, gate="silu") == Config(64, 2)
    assert chosen(8192, 1024, 3072, 8) == Config(128, 1)
    assert chosen(256, 1024, 3072, 8) is None  # too few tiles: programs share the pieces
    assert chosen(256, 1000, 1024) is None
    assert not fixed.supports(torch.empty(4, 96, dtype=BF16), torch.empty(128, 96), torch.empty(4, 128), 1)
