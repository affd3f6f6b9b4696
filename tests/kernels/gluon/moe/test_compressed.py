"""Experts of bfloat16 in 12 bits a weight in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import Experts, reference
from kernels.cuda import moe
from kernels.gluon.common import compressed_bits
from kernels.gluon.moe import compressed as compressed_experts
from kernels.gluon.moe import compressed_small_batch as compressed_few
from kernels.gluon.moe import small_batch as experts_few
from tests.oracles.random_weights import random_experts
from tests.support.gluon_on_tensors import run_on_tensors
from tests.support.steps_on_tensors import steps_on_tensors


def decode(first: Tensor, second: Tensor, exponents: Tensor, warps: int) -> Tensor:
    """Stand-in for the kernel's PTX: see `test_bits`."""
    words = []
    for bits, turned, shift in ((first, 0, -7), (first, 8, -3), (second, 0, 1), (second, 8, 5)):
        bits = bits.long() & 0xFFFFFFFF
        code = exponents.long() & 0xFFFFFFFF
        bits = bits >> turned | bits << (32 - turned)
        code = code << -shift if shift < 0 else code >> shift
        words.append(bits & 0x807F807F | code & 0x07800780)
    halves = [torch.stack([word & 0xFFFF, word >> 16], -1).to(torch.int16).view(torch.bfloat16) for word in words]
    upper, lower = torch.stack(halves[::2], -1), torch.stack(halves[1::2], -1)
    values = torch.stack([upper, lower], -1)  # [pair, half of the channels, half of the rows]
    return values.reshape(warps, 8, 4, 4, 2, 2, 2).permute(0, 6, 1, 3, 5, 2, 4)


def test_bits() -> None:
    """The instructions of `decode`, in order."""
    text = compressed_bits.PTX.value
    parts = [line for line in text.splitlines() if "t, t" in line]
    assert [("shf.r.wrap.b32 r, $8, $8, 8" in part, "$9, $9, 8" in part) for part in parts] == [
        (False, False), (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert [part.split("; ")[2] for part in parts] == [
        "shl.b32 t, $10, 7", "shl.b32 t, $10, 3", "shr.b32 t, $10, 1", "shr.b32 t, $10, 5",
    ]  # fmt: skip
    assert all("and.b32 r, r, 0x807f807f" in part and "and.b32 t, t, 0x07800780" in part for part in parts)


def listed_value(listed: Tensor) -> Tensor:
    return (listed & 0xFFFF).to(torch.int16).view(torch.bfloat16)


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = ("_bring", "_ask", "_decoded", "_small_weights", "_multiply", "_step", "_tile")
    steps_on_tensors(monkeypatch, compressed_experts, "_compressed_experts_kernel", helpers)
    few_helpers = (
        "_load_words", "_add_step", "_listed", "_add_small", "columns", "routed_tokens", "_chunks", "_load_x", "last",
        "middle",
    )  # fmt: skip
    run_on_tensors(monkeypatch, compressed_few, "_compressed_few_kernel", few_helpers)
    run_on_tensors(
        monkeypatch,
        experts_few,
        "_few_experts_kernel",
        ("_of_chunk", "_chunks", "_load_x", "last", "middle"),
    )
    for module in (compressed_experts, compressed_few):
        monkeypatch.setattr(module, "decode_fragments", decode)
        monkeypatch.setattr(
            module, "listed_value", lambda listed: (listed & 0xFFFF).to(torch.int16).view(torch.bfloat16)
        )
        monkeypatch.setattr(module, "listed_channel", lambda listed: listed >> 16 & 0xFFFF)
        monkeypatch.setattr(module, "listed_row", lambda listed: listed >> 32)
        monkeypatch.setattr(module, "UP", 2.0**64)
        monkeypatch.setattr(module, "DOWN", 2.0**-64)
    monkeypatch.setattr(experts_few, "NO_PAIR", 1 << 30)
    monkeypatch.setattr(compressed_experts, "piece_layout", lambda: None)
    monkeypatch.setattr(moe, "is_hopper", lambda device: True)


def check(num_tokens: int, hidden: int, inner: int, activation: Any = "silu", first: int = 0) -> None:
    """Check a rank that holds 6 experts from `first` on, among 8, with padding: added to the residual stream, and one
    token without it.
    """
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 2 * hidden).bfloat16()[:, :hidden]
    ids, weights = torch.rand(num_tokens, 8).argsort(1)[:, :3].int(), torch.rand(num_tokens, 3)
    if num_tokens > 1:
        ids[-1] = -1
    gate_up, down = torch.randn(6, 2 * inner, hidden).bfloat16() / 16, torch.randn(6, hidden, inner).bfloat16() / 16
    gate_up[:, :, 3] *= 2.0**-16
    down[:, 5, :32] *= 2.0**-90
    down[2, 7, :9] = 0
    exact = Experts(gate_up.double(), down.double(), None, None, activation, first)
    want = reference.experts(x.double(), ids, weights, exact)
    packed = moe.compress_experts(gate_up, down)
    assert packed is not None
    stack = Experts(*packed, activation=activation, first=first)
    residual = torch.randn(num_tokens, hidden).bfloat16() if num_tokens > 1 else None
    got = moe.experts(x, ids, weights, stack, add_to=None if residual is None else residual.clone())
    want = want if residual is None else want + residual
    assert (got.double() - want).norm() < 8e-3 * want.norm()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_few_tokens(without_layouts: Any, num_tokens: int) -> None:
    check(num_tokens, 256, 128, first=1)


def test_tiles_of_8_pairs(without_layouts: Any) -> None:
    """More steps than stages."""
    check(6, 640, 128)


@pytest.mark.parametrize("num_tokens", [30, 60])
def test_larger_tiles(without_layouts: Any, num_tokens: int) -> None:
    """Some are at most half full, and are computed as half a tile."""
    check(num_tokens, 256, 128, "gelu_tanh", first=1)


def test_what_is_compressed(without_layouts: Any) -> None:
    """Only bfloat16 of certain sizes, and only if both matrices can be."""
    gate_up, down = torch.randn(2, 512, 128).bfloat16(), torch.randn(2, 128, 256).bfloat16()
    assert moe.compress_experts(gate_up, down) is not None
    assert moe.compress_experts(gate_up.half(), down.half()) is None
    assert moe.compress_experts(random_experts("fp8 blocks", 2, 512, 128), down) is None
    down[0, 0, 0] = float("inf")
    assert moe.compress_experts(gate_up, down) is None
