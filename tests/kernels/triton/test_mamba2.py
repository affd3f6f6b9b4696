"""State-space layers in Triton's interpreter, against the reference and against whole sequences in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import gates
from kernels.cpu import mamba2 as cpu
from kernels.data.state import StateContext, StateSpace
from tests.oracles.recurrent import Heads, whole_mamba2
from tests.oracles.state_steps import CASE_NAMES, CASES, StateSteps

tl: Any = pytest.importorskip("triton.language")
scans: Any = pytest.importorskip("kernels.triton.scans")
fixed: Any = pytest.importorskip("kernels.triton.fixed_scan")
grouped_norm: Any = pytest.importorskip("kernels.triton.grouped_norm")
IDS = ["reference", "cpu", "triton", "fixed"]
LENGTHS = [1, 5, 16, 17, 50, 133]


@pytest.fixture(autouse=True)
def small_heads_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors are float32: the interpreter multiplies the bits of bfloat16 as if they were integers."""
    monkeypatch.setitem(scans.TYPES, torch.bfloat16, tl.float32)
    monkeypatch.setattr(scans, "MIN_KEY", 0)
    monkeypatch.setattr(fixed, "BLOCK_V", 32)  # fewer programs: one at a time is interpreted


@pytest.mark.parametrize("module", [reference, cpu, scans, fixed], ids=IDS)
@pytest.mark.parametrize(("block_size", "only_decodes", "heads", "dtype"), CASES, ids=CASE_NAMES)
def test_chunks_give_what_tokens_give_one_by_one(
    module: Any, block_size: int, only_decodes: bool, heads: Heads, dtype: torch.dtype
) -> None:
    num_groups, num_heads, state_dim, head_dim = heads
    torch.manual_seed(block_size)
    lengths = [3, 17, 20] if only_decodes else LENGTHS
    if module is fixed and only_decodes:
        block_size = 4  # it computes a block's tokens again for each new one
    steps = StateSteps(block_size, lengths, block_size, only_decodes=only_decodes)
    xbc = torch.randn(sum(lengths), num_heads * head_dim + 2 * num_groups * state_dim).to(dtype)
    given = torch.randn(sum(lengths), num_heads).to(dtype)
    of_heads = torch.rand(num_heads) / 2, torch.randn(num_heads), torch.randn(num_heads)
    limits = (0.1, 1.5)
    expected = whole_mamba2(xbc, given, of_heads, limits, lengths, heads)
    states = steps.states(heads, dtype)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        return module.mamba2(part, own, StateSpace(*of_heads, limits), states, context)  # type: ignore[no-any-return]

    steps.compare(compute, (xbc, given), expected, 5e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_of_few_key_channels_go_token_after_token(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(scans, "MIN_KEY", 64)
    heads, lengths = (1, 2, 16, 16), [1, 5, 40]
    steps, limits = StateSteps(0, lengths, 16), (0.1, 1.5)
    xbc, given = torch.randn(sum(lengths), 64).to(dtype), torch.randn(sum(lengths), 2).to(dtype)
    of_heads = torch.rand(2) / 2, torch.randn(2), torch.randn(2)
    states, others = steps.states(heads, dtype), steps.states(heads, dtype)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        layer = StateSpace(*of_heads, limits)
        out = scans.mamba2(part, own, layer, states, context)
        if not context.only_decodes:
            assert torch.equal(out, fixed.mamba2(part, own, layer, others, context))
        return out  # type: ignore[no-any-return]

    expected = whole_mamba2(xbc, given, of_heads, limits, lengths, heads)
    steps.compare(compute, (xbc, given), expected, 5e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("module", [gates, grouped_norm], ids=["cpu", "triton"])
@pytest.mark.parametrize("gate_first", [True, False])
def test_grouped_rms_norm(module: Any, gate_first: bool) -> None:
    torch.manual_seed(0)
    x, both, weight = torch.randn(5, 72), torch.randn(5, 100), torch.randn(72)
    args = x, both[:, 28:], weight, 1e-5, 3, gate_first
    wide = [each.double() if isinstance(each, Tensor) else each for each in args]
    expected = reference.grouped_rms_norm(*wide).float()  # type: ignore[arg-type]
    torch.testing.assert_close(module.grouped_rms_norm(*args), expected, atol=1e-5, rtol=1e-5)
