"""Deterministic forms for CUDA devices, in Triton's interpreter: right, and the same whatever the other tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter

from engine.models.shard import Shard
from kernels import (
    FORMS,
    AttentionArgs,
    Experts,
    NextNorm,
    PagedContext,
    QuantizedWeight,
    Router,
    RouterArgs,
    pack_nibbles,
    reference,
)
from kernels.cuda import deterministic, split_sums
from kernels.cuda.choice import CHOICE
from kernels.data.quantized_weight import Weight
from kernels.triton import fixed_attention, fixed_parts
from kernels.triton.activation import gate_and_mul
from kernels.triton.fixed_linear import fixed_linear
from kernels.triton.norm import add_rms_norm, rms_norm

MOST = 67  # more than a tile
SIZES = (2, 17, 66)


@pytest.fixture(autouse=True)
def deterministic_forms() -> Iterator[None]:
    FORMS.choose(True)
    yield
    FORMS.choose(False)


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply tiles in float64: NumPy's products depend on where in a tile a row is, those of tensor cores do not.
    Their sums are those of 16 channels after the other, however many a tile has.
    """

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.einsum("ij,jk->ik", a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    def dot(builder: Any, a: Any, b: Any, total: Any, *how: Any) -> Any:
        for at in range(0, a.data.shape[-1], 16):
            x = interpreter.TensorHandle(a.data[..., at : at + 16], a.dtype)
            total = whole(builder, x, interpreter.TensorHandle(b.data[..., at : at + 16, :], b.dtype), total, *how)
        return total

    whole = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter.np, "matmul", matmul)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def each_alone(f: Callable[[slice], Tensor]) -> Tensor:
    whole = f(slice(0, MOST))
    for size in SIZES:
        assert torch.equal(f(slice(0, size)), whole[:size]), size
    for i in (0, MOST - 1):
        assert torch.equal(f(slice(i, i + 1)), whole[i : i + 1]), i
    return whole


def int4(n: int, k: int) -> QuantizedWeight:
    codes = pack_nibbles(torch.randint(16, (n, k)))
    return QuantizedWeight("int4", codes, torch.rand(n, k // 32) / 20, 32)


@pytest.mark.parametrize("kind", ["float32", "float16", "int4", "e4m3", "permuted"])
def test_products(kind: str) -> None:
    dtype, n, k = torch.float32 if kind == "float32" else torch.float16, 72, 96
    weight: Weight = torch.randn(n, k).to(dtype)
    if kind == "e4m3":
        weight = QuantizedWeight("e4m3", torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(n, 1), k)
        weight = replace(weight, rounds_activations=True)  # never taken here
    elif kind in ("int4", "permuted"):
        weight = int4(n, k)
        weight = weight if kind == "int4" else replace(weight, order=torch.randperm(k))
    x, residual = torch.randn(MOST, k).to(dtype), torch.randn(MOST, n).to(dtype)
    norm, bias, exact = torch.rand(k).to(dtype), torch.randn(n).to(dtype), weight
    if isinstance(exact, QuantizedWeight):
        exact = reference.dequantize(exact.codes, exact, torch.float64)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.03}

    def close(got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got.double(), want, **tolerance)

    wide, exact = x.double(), exact.double()
    close(each_alone(lambda at: deterministic.linear(x[at], weight, bias)), wide @ exact.T + bias.double())
    close(
        each_alone(lambda at: deterministic.linear_add(residual[at].clone(), x[at], weight)),
        residual.double() + wide @ exact.T,
    )
    each_alone(lambda at: deterministic.norm_gated(x[at], norm, 1e-5, weight, bias))
    into = residual.clone()
    got = deterministic.linear_add_norm(into, x, weight, bias, NextNorm(torch.ones(n).to(dtype), 1e-5))
    assert isinstance(got, Tensor)
    close(got, reference.rms_norm(into.double(), torch.ones(n).double(), 1e-5))


@pytest.mark.parametrize("kind", ["float32", "float16", "uneven", "int4", "e4m3", "cut groups", "permuted"])
def test_sums_that_ranks_share(kind: str) -> None:
    dtype, n, k = torch.float32 if kind == "float32" else torch.float16, 40, 300 if kind == "uneven" else 512
    k = 160 if kind == "cut groups" else k
    weight: Weight = torch.randn(n, k).to(dtype)
    if kind in ("int4", "cut groups"):
        weight = int4(n, k)
    elif kind == "permuted":
        weight = replace(int4(n, k), order=torch.randperm(k))
    elif kind == "e4m3":
        weight = QuantizedWeight("e4m3", torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(n, 1), k)
    x, bias = torch.randn(MOST, k).to(dtype), torch.randn(n).to(dtype)
    whole = split_sums.split_weight(weight, Shard().eighths(k), bias)
    got = each_alone(lambda at: split_sums.split_linear(x[at], whole))
    exact = weight
    if isinstance(exact, QuantizedWeight):
        exact = reference.dequantize(exact.codes, exact, torch.float64)
    want = x.double() @ exact.double().T + bias.double()
    torch.testing.assert_close(got.double(), want, atol=0.05, rtol=0.02)
    if isinstance(weight, QuantizedWeight):
        return
    for size in (2, 4) if kind == "uneven" else (2, 8):
        sums = []
        for rank in range(size):
            part = slice(rank * k // size, (rank + 1) * k // size)
            columns = Shard(rank, size).eighths(k)
            own = split_sums.split_weight(weight[:, part].contiguous(), columns, None if rank else bias)
            sums.append(split_sums.split_linear(x[:, part], own))
        assert torch.equal(reference.add_pieces(torch.stack(sums), torch.float32), got), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "k", "pieces"), [(40, 512, 8), (200, 256, 4), (72, 200, 2), (40, 96, 1)])
def test_programs_that_share_a_tile(
    n: int, k: int, pieces: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who adds up which pieces changes no bit."""
    x, weight, residual = torch.randn(MOST, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(MOST, n).to(dtype)
    bias = torch.randn(n).to(dtype)
    want = fixed_linear(x, weight, bias, residual.clone(), residual, pieces)
    for processors in (1, 2, 4, 9):
        monkeypatch.setattr(fixed_parts, "num_multiprocessors", lambda device: processors)  # noqa: B023
        fixed_parts._counters.cache_clear()

        def parts(at: slice) -> Tensor:
            into = residual[at].clone()
            return fixed_parts.fixed_parts(x[at].clone(), weight, bias, into, into, pieces)

        assert torch.equal(each_alone(parts), want), processors
        assert not fixed_parts._counters(x.device).any()
    fixed_parts._counters.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_epilogues_round_as_kernels_of_their_own(dtype: torch.dtype) -> None:
    """In tiles of any step, beside a GEMM, its activation, and its sum with the residual stream."""
    x, weight, bias = ((torch.randn(*shape) / 4).to(dtype) for shape in ((MOST, 192), (80, 192), (80,)))
    residual = torch.randn(MOST, 40).to(dtype)
    for gate in ("silu", "gelu_tanh"):
        got = each_alone(lambda at: deterministic.linear_gated(x[at].clone(), weight, bias, gate))  # noqa: B023
        assert torch.equal(got, gate_and_mul(deterministic.linear(x, weight, bias), gate))
    whole = split_sums.split_weight(weight[:40].contiguous(), Shard().eighths(192), bias[:40])
    assert split_sums.adds_split_sums(x, whole)
    added = each_alone(lambda at: split_sums.split_linear_add(residual[at].clone(), x[at].clone(), whole))
    assert torch.equal(added, residual + split_sums.split_linear(x, whole).to(dtype))


def test_tiles_of_few_tokens() -> None:
    """They have few outputs, so that many programs read the weight; a small one is prefetched."""
    x = torch.empty(3, 1024).half()
    few = fixed_parts.few_tile(x, 4096, 1, True)
    assert few is not None
    assert few.prefetches
    assert few[:3] == (64, 32, 128)
    assert fixed_parts.few_tile(torch.empty(64, 1024).half(), 4096, 8, True) == few
    assert fixed_parts.few_tile(x, 4096, 1, False) == fixed_parts.Tile(64, 32, 64, 4, 6)
    assert fixed_parts.few_tile(x, 4096, 8, False) is None
    assert fixed_parts.few_tile(x, 99999, 1, False) is None
    assert fixed_parts.few_tile(x.float(), 4096, 1, True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_sums(dtype: torch.dtype) -> None:
    """A norm has the same bytes with the sum before it and by itself, whose row may be of any size."""
    x, residual, weight = torch.randn(5, 3000).to(dtype), torch.randn(5, 3000).to(dtype), torch.rand(3000).to(dtype)
    residual[1], x[1], residual[2], x[2] = 0.0, 0.0, residual[2] * 1e-3, x[2] * 1e-3
    residual[3] *= 200
    with_sum = add_rms_norm(residual, x, weight, 1e-6)
    assert torch.equal(rms_norm(residual, weight, 1e-6), with_sum)
    want = reference.rms_norm(residual.double(), weight.double(), 1e-6)
    torch.testing.assert_close(with_sum.double(), want, atol=1e-6, rtol=4e-6 if dtype == torch.float32 else 2e-3)


def test_matrices_divided_among_programs() -> None:
    x, weight = torch.randn(MOST, 256).half(), torch.randn(72, 256).half()
    got = each_alone(lambda at: deterministic.linear(x[at], weight))
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, atol=0.06, rtol=0.01)
    out = torch.empty_like(got)
    norm = torch.rand(256).half()
    assert deterministic.norm_linear(x, norm, 1e-5, weight, None, out) is out
    assert torch.equal(out, deterministic.norm_linear(x, norm, 1e-5, weight))


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("plain", {"fixed_ranges": False}),
        ("window", {"fixed_ranges": False}),
        *((name, {}) for name in ("plain", "half", "window", "capped", "sinks")),
    ],
)
def test_attention(name: str, forms: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "CHOICE", replace(CHOICE, **forms))
    monkeypatch.setattr(fixed_attention, "RANGE", 64)
    args = {
        "plain": AttentionArgs(0.25),
        "half": AttentionArgs(0.25),
        "window": AttentionArgs(0.25, window=40),
        "capped": AttentionArgs(0.25, soft_cap=20.0),
        "sinks": AttentionArgs(0.25, sinks=torch.rand(8)),
    }[name]
    length, size = 150, 16
    blocks = -(-length // size)
    cache, tables = torch.randn(2, blocks, 2, size, 16), torch.randperm(blocks).view(1, blocks).int()
    query, rows = torch.randn(length, 8, 16), torch.zeros(1, dtype=torch.int32)
    if name == "half":
        cache, query = cache.half(), query.half()
    tolerance = 1e-4 if query.dtype == torch.float32 else 4e-3

    def prefilled(first: int, last: int) -> Tensor:
        context = PagedContext(cache[0], cache[1], tables, rows, torch.tensor([last], dtype=torch.int32))
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        return deterministic.paged_attention_prefill(query[first:last].clone(), starts, context, args)

    whole = prefilled(0, length)
    context = PagedContext(cache[0], cache[1], tables, rows, torch.tensor([length], dtype=torch.int32))
    want = reference.paged_attention_prefill(query, torch.tensor([0, length], dtype=torch.int32), context, args)
    torch.testing.assert_close(whole, want, atol=tolerance, rtol=tolerance)
    for first, last in [(0, 1), (0, 65), (33, 90), (149, 150)]:
        assert torch.equal(prefilled(first, last), whole[first:last]), (first, last)
    lens = torch.tensor([150, 0, 47, 3], dtype=torch.int32)
    context = PagedContext(cache[0], cache[1], tables, torch.zeros(4, dtype=torch.int32), lens)
    newest = torch.stack([query[max(n - 1, 0)] for n in lens.tolist()])
    got = deterministic.paged_attention_decode(newest, context, args)
    assert not got[1].any()
    for i in (0, 2, 3):
        assert torch.equal(got[i], whole[int(lens[i]) - 1]), i
        one = replace(context, rows=rows, lens=lens[i : i + 1])
        assert torch.equal(deterministic.paged_attention_decode(newest[i : i + 1], one, args)[0], got[i]), i


@pytest.mark.parametrize("kind", ["float", "int4"])
def test_experts(kind: str) -> None:
    hidden, inner, count = 64, 32, 4
    x = torch.randn(MOST, hidden).half()
    if kind == "float":
        stack = Experts(*(torch.randn(count, n, k).half() for n, k in ((2 * inner, hidden), (hidden, inner))))
    else:
        stack = Experts(
            *(
                QuantizedWeight.stack([int4(n, k) for _ in range(count)])
                for n, k in ((2 * inner, hidden), (hidden, inner))
            )
        )
    router, norm, rule = (
        torch.randn(count, hidden).half(),
        torch.rand(hidden).half(),
        Router(2, renormalise=True),
    )

    def routed(at: slice) -> Tensor:
        normed, ids, weights = deterministic.norm_route(x[at], norm, 1e-5, RouterArgs(router, rule))
        return deterministic.experts(normed, ids, weights, stack, x[at].clone())

    got = each_alone(routed)
    normed, ids, weights = reference.norm_route(x, norm, 1e-5, RouterArgs(router, rule))
    want = reference.experts(normed, ids, weights, stack, x.clone())
    torch.testing.assert_close(got, want, atol=0.3, rtol=0.05)
    pieces = Shard().eighths(count)
    shared = each_alone(lambda at: split_sums.split_experts(normed[at], ids[at], weights[at], stack, pieces))
    torch.testing.assert_close(shared, (want - x).float(), atol=0.3, rtol=0.05)


def test_log_probabilities() -> None:
    logits, ids = (torch.randn(MOST, 3001) * 4).half(), torch.randint(3001, (MOST,))
    logits[5, [7, 20, 3000]] = 60.0
    assert deterministic.token_logprobs(logits, ids, 4)[2][5, :3].tolist() == [7, 20, 3000]
    logits = torch.stack([row[torch.randperm(3001)] for row in torch.linspace(-9, 9, 3001).expand(MOST, -1)])
    each_alone(lambda at: deterministic.token_logprobs(logits[at], ids[at], 3)[0])
    got, want = deterministic.token_logprobs(logits, ids, 3), reference.token_logprobs(logits, ids, 3)
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
