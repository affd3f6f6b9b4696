"""Recurrent layers by the CPU's own kernel: beside PyTorch's form, and in steps of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from kernels.cpu import kda, mamba2, recurrent, scan
from kernels.data.state import DeltaStates, StateContext, StateSpace

SIZE, TOKENS = 4, 11  # of a block; of the sequence
HEADS, KEY_DIM, VALUE_DIM = 4, 24, 20  # not whole vectors

Step: TypeAlias = Callable[[slice, DeltaStates, StateContext], Tensor]


def layer(kind: str, dtype: torch.dtype) -> tuple[Step, tuple[int, ...]]:
    """Return a layer of random inputs, which computes some of its tokens, and the shape of its decays."""
    draw = torch.Generator().manual_seed(len(kind))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    keys = 2 * (HEADS if kind == "kda" else HEADS // 2) * KEY_DIM
    x = random(TOKENS, keys + HEADS * VALUE_DIM + 3).to(dtype)[:, 3:]
    rate, bias = random(HEADS).abs(), random(HEADS)
    one, two = random(TOKENS, HEADS).to(dtype), random(TOKENS, 2 * HEADS).to(dtype)
    forget, skip = random(TOKENS, HEADS * KEY_DIM).to(dtype), random(HEADS)
    wide_bias = random(HEADS * KEY_DIM)
    limits = (0.1, 2.0)
    steps: dict[str, Step] = {
        "delta": lambda at, *rest: recurrent.delta_rule(x[at], two[at], rate, bias, *rest),
        "mamba2": lambda at, *rest: mamba2.mamba2(x[at], one[at], StateSpace(rate, bias, skip, limits), *rest),
        "kda": lambda at, *rest: kda.kda(x[at], one[at], forget[at], rate, wide_bias, *rest),
    }
    return steps[kind], (KEY_DIM,) if kind == "kda" else ()


def run(kind: str, dtype: torch.dtype, stops: list[int], state: torch.dtype = torch.float32) -> list[Tensor]:
    """Compute a sequence in steps that end at `stops`. Returns its outputs and what its blocks hold."""
    step, decays = layer(kind, dtype)
    num_blocks, key_heads = -(-TOKENS // SIZE), HEADS if kind == "kda" else HEADS // 2

    def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_blocks, *shape), torch.nan, dtype=dtype)

    states = DeltaStates(
        unwritten(HEADS, KEY_DIM, VALUE_DIM, dtype=state), unwritten(SIZE, key_heads, KEY_DIM, dtype=dtype),
        unwritten(SIZE, HEADS, VALUE_DIM), unwritten(SIZE, HEADS, *decays),
    )  # fmt: skip
    tables = torch.stack([torch.arange(num_blocks - 1, -1, -1), torch.zeros(num_blocks)]).int()
    outputs = []
    for first, last in zip([0, *stops], [*stops, TOKENS], strict=True):
        numbers = [0], [0, last - first], [last]
        context = StateContext(tables, *(torch.tensor(each).int() for each in numbers), None, SIZE)
        outputs.append(step(slice(first, last), states, context))
    held = [states.before, *(each.flatten(0, 1) for each in (states.keys, states.updates, states.decays))]
    return [torch.cat(outputs), *(each.nan_to_num(7.0) for each in held)]


@pytest.mark.parametrize("kind", ["delta", "mamba2", "kda"])
def test_it_computes_what_pytorch_does(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.02)):
        got = run(kind, dtype, [3, 4])
        with monkeypatch.context() as without:
            without.setattr(scan, "library", lambda: None)
            expected = run(kind, dtype, [3, 4])
        for mine, other in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=tolerance * float(other.abs().max()), rtol=tolerance)


@pytest.mark.parametrize("kind", ["delta", "mamba2", "kda"])
def test_a_token_has_the_same_bytes_in_any_step(backend: str, kind: str) -> None:
    if backend == "no compiler":
        return
    want = run(kind, torch.float32, [])
    for stops in (list(range(1, TOKENS)), [4, 8], [1, 6, 7]):
        for got, expected in zip(run(kind, torch.float32, stops), want, strict=True):
            assert torch.equal(got, expected), stops


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16])
def test_states_of_16_bits(state: torch.dtype) -> None:
    """Those of float16 are PyTorch's."""
    exact, rounded = (run("delta", torch.float32, [5, 6, 9], each)[0] for each in (torch.float32, state))
    assert 0 < float((exact - rounded).abs().max()) < 0.02 * float(exact.abs().max())


def test_padding_gets_zeros(backend: str) -> None:
    step, _ = layer("delta", torch.float32)
    states = DeltaStates(
        torch.zeros(3, HEADS, KEY_DIM, VALUE_DIM), torch.zeros(3, SIZE, HEADS // 2, KEY_DIM),
        torch.zeros(3, SIZE, HEADS, VALUE_DIM), torch.zeros(3, SIZE, HEADS),
    )  # fmt: skip
    numbers: Any = [0, 1], [0, 2, 4], [2, 1]  # the second row is that of padding; one token belongs to none
    tables = torch.tensor([[1, 2, 0], [0, 0, 0]]).int()
    context = StateContext(tables, *(torch.tensor(each).int() for each in numbers), None, SIZE)
    out = step(slice(0, 5), states, context)
    assert out[:2].abs().sum() > 0
    assert not out[2:].any()
