"""States that blocks keep, computed apart from the loop over chunks, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.data.state import StateContext, StateSpace
from tests.oracles.recurrent import Heads, whole_delta_rule, whole_mamba2
from tests.oracles.state_steps import CASE_NAMES, CASES, StateSteps

tl: Any = pytest.importorskip("triton.language")
scans: Any = pytest.importorskip("kernels.triton.scans")
LENGTHS = [1, 5, 16, 17, 50, 133]


@pytest.mark.parametrize("is_delta", [True, False], ids=["delta rule", "mamba2"])
@pytest.mark.parametrize(("block_size", "only_decodes", "heads", "dtype"), CASES, ids=CASE_NAMES)
def test_chunks_give_what_tokens_give_one_by_one(
    block_size: int,
    only_decodes: bool,
    heads: Heads,
    dtype: torch.dtype,
    is_delta: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scans, "KEEPS_APART", True)
    monkeypatch.setattr(scans, "MIN_KEY", 0)
    monkeypatch.setitem(scans.TYPES, torch.bfloat16, tl.float32)  # the interpreter multiplies bits of bfloat16
    num_keys, num_values, key_dim, value_dim = heads
    torch.manual_seed(block_size)
    lengths = [3, 17, 20] if only_decodes else LENGTHS
    steps = StateSteps(block_size, lengths, block_size, only_decodes=only_decodes)
    x = torch.randn(sum(lengths), 2 * num_keys * key_dim + num_values * value_dim).to(dtype)
    gates = torch.randn(sum(lengths), num_values * (1 + is_delta)).to(dtype)
    rate, bias, skip = torch.rand(num_values) / 2, torch.randn(num_values), torch.randn(num_values)
    states = steps.states(heads, dtype)
    if is_delta:
        expected = whole_delta_rule(x, gates, rate, bias, lengths, heads)
    else:
        expected = whole_mamba2(x, gates, (rate, bias, skip), (0.1, 1.5), lengths, heads)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        if is_delta:
            return scans.delta_rule(part, own, rate, bias, states, context)  # type: ignore[no-any-return]
        layer = StateSpace(rate, bias, skip, (0.1, 1.5))
        return scans.mamba2(part, own, layer, states, context)  # type: ignore[no-any-return]

    steps.compare(compute, (x, gates), expected, 5e-5 if dtype == torch.float32 else 0.05)


def test_states_of_16_bits_are_rounded_twice_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "KEEPS_APART", True)
    monkeypatch.setattr(scans, "MIN_KEY", 0)
    torch.manual_seed(0)
    lengths, heads = [3, 40, 90], (1, 2, 16, 16)
    steps = StateSteps(1, lengths, 16)
    qkv, gates = torch.randn(sum(lengths), 64), torch.randn(sum(lengths), 4)
    rate, bias = torch.rand(2) / 4, torch.randn(2)
    expected = whole_delta_rule(qkv, gates, rate, bias, lengths, heads)
    states = steps.states(heads, before=torch.float16)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        return scans.delta_rule(part, own, rate, bias, states, context)  # type: ignore[no-any-return]

    assert steps.compare(compute, (qkv, gates), expected, 3e-3) > 1e-6
