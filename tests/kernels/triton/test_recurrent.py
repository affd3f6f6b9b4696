"""Recurrent layers in Triton's interpreter, against the reference and against whole sequences in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu import kda as cpu_kda
from kernels.cpu import recurrent as cpu
from kernels.data.state import DeltaStates, StateContext
from tests.oracles.recurrent import Heads, whole_conv, whole_delta_rule, whole_kda
from tests.oracles.state_steps import CASE_NAMES, CASES, StateSteps

tl: Any = pytest.importorskip("triton.language")
recurrent: Any = pytest.importorskip("kernels.triton.recurrent")
kda: Any = pytest.importorskip("kernels.triton.kda")
scans: Any = pytest.importorskip("kernels.triton.scans")
fixed: Any = pytest.importorskip("kernels.triton.fixed_scan")
LENGTHS = [1, 5, 16, 17, 50, 133]
IDS = ["reference", "cpu", "triton", "fixed"]


@pytest.fixture(autouse=True)
def small_heads_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors are float32: the interpreter multiplies the bits of bfloat16 as if they were integers."""
    monkeypatch.setitem(scans.TYPES, torch.bfloat16, tl.float32)
    monkeypatch.setattr(scans, "MIN_KEY", 0)
    monkeypatch.setattr(fixed, "BLOCK_V", 32)  # fewer programs: one at a time is interpreted


@pytest.mark.parametrize("module", [reference, cpu, recurrent], ids=["reference", "cpu", "triton"])
@pytest.mark.parametrize(
    ("length", "block_size", "has_bias", "only_decodes"),
    [(3, 16, False, False), (3, 16, True, True), (4, 4, True, False), (7, 32, False, False), (2, 2, False, False)],
)
def test_short_conv_in_chunks_is_that_of_whole_sequences(
    module: Any, length: int, block_size: int, has_bias: bool, only_decodes: bool
) -> None:
    torch.manual_seed(length)
    channels, ring = 24, 1 << (length - 1).bit_length()
    lengths = [3, 17, 20] if only_decodes else LENGTHS
    steps = StateSteps(length, lengths, block_size, only_decodes=only_decodes)
    x, weight = torch.randn(sum(lengths), 3 * channels), torch.randn(channels, length)
    bias = torch.randn(channels) if has_bias else None
    expected = whole_conv(x, weight, bias, lengths)
    inputs = torch.full((steps.num_blocks, ring, channels), torch.nan)
    for indices, context in steps.steps():
        part = torch.where((indices >= 0)[:, None], x[indices.clamp(min=0)], 0.5)
        out = module.short_conv(part, weight, bias, inputs, context)
        assert out.isfinite().all()
        real = indices >= 0
        torch.testing.assert_close(out[real].double(), expected[indices[real]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("module", [reference, cpu, recurrent], ids=["reference", "cpu", "triton"])
def test_causal_conv_in_chunks_is_that_of_whole_sequences(module: Any) -> None:
    torch.manual_seed(0)
    steps = StateSteps(0, LENGTHS, 16)
    x, weight = torch.randn(sum(LENGTHS), 40), torch.randn(24, 4)
    inputs = torch.full((steps.num_blocks, 4, 24), torch.nan)
    padded = torch.cat([F.pad(part, (0, 0, 3, 0)) for part in x[:, :24].double().split(LENGTHS)])
    convolved = F.conv1d(padded.T, weight.double()[:, None], groups=24).T
    starts = [sum(LENGTHS[:i]) + 3 * i for i in range(len(LENGTHS))]
    expected = F.silu(torch.cat([convolved[start : start + n] for start, n in zip(starts, LENGTHS, strict=True)]))
    for indices, context in steps.steps():
        real = indices >= 0
        part = torch.where(real[:, None], x[indices.clamp(min=0)], 0.5)[:, :24]  # a view of wider rows
        out = module.causal_conv(part, weight, None, inputs, context)
        assert out.isfinite().all()
        torch.testing.assert_close(out[real].double(), expected[indices[real]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
def test_convolutions_of_bfloat16_on_a_cpu_are_those_of_pytorch(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    channels = 300  # more than a piece of work
    x, weight = torch.randn(sum(LENGTHS), 3 * channels).bfloat16(), torch.randn(channels, 4).bfloat16()
    bias, found = torch.randn(channels).bfloat16(), []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(cpu, "library", lambda: None)
        steps, inputs = StateSteps(0, LENGTHS, 16), torch.full((25, 4, channels), torch.nan, dtype=torch.bfloat16)
        for indices, context in steps.steps():
            part = x[indices.clamp(min=0)]
            if gated:
                out = cpu.short_conv(part, weight, bias, inputs, context)
            else:
                out = cpu.causal_conv(part[:, :channels], weight, bias, inputs, context)
            found.append(out[indices >= 0])
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("module", [reference, cpu, scans, fixed], ids=IDS)
@pytest.mark.parametrize(("block_size", "only_decodes", "heads", "dtype"), CASES, ids=CASE_NAMES)
def test_delta_rule_in_chunks_is_that_token_by_token(
    module: Any, block_size: int, only_decodes: bool, heads: Heads, dtype: torch.dtype
) -> None:
    num_keys, num_values, key_dim, value_dim = heads
    torch.manual_seed(block_size)
    lengths = [3, 17, 20] if only_decodes else LENGTHS
    if module is fixed:  # it computes a block's tokens again for each new one
        block_size = 4 if only_decodes else block_size
        lengths = lengths if only_decodes else [1, 17, max(50, block_size + 5)]
    steps = StateSteps(block_size, lengths, block_size, only_decodes=only_decodes)
    width = 2 * num_keys * key_dim + num_values * value_dim
    qkv = torch.randn(sum(lengths), width).to(dtype)
    gates = torch.randn(sum(lengths), 2 * num_values).to(dtype)
    rate, bias = torch.rand(num_values) * 2, torch.randn(num_values)
    expected = whole_delta_rule(qkv, gates, rate, bias, lengths, heads)
    states = steps.states(heads, dtype)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        return module.delta_rule(part, own, rate, bias, states, context)  # type: ignore[no-any-return]

    steps.compare(compute, (qkv, gates), expected, 1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("heads", [(1, 2, 16, 16), (2, 8, 20, 24)])
def test_several_heads_of_a_program_that_decodes(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the borders of blocks; 2 heads are fewer than 4."""
    torch.manual_seed(0)
    monkeypatch.setattr(scans, "DECODE_HEADS", 4)
    lengths, (num_keys, num_values, key_dim, value_dim) = [3, 17, 20], heads
    steps = StateSteps(4, lengths, 4, only_decodes=True)
    qkv = torch.randn(sum(lengths), 2 * num_keys * key_dim + num_values * value_dim)
    gates, rate, bias = torch.randn(sum(lengths), 2 * num_values), torch.rand(num_values) * 2, torch.randn(num_values)
    states = steps.states(heads, torch.float32)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        return scans.delta_rule(part, own, rate, bias, states, context)  # type: ignore[no-any-return]

    steps.compare(compute, (qkv, gates), whole_delta_rule(qkv, gates, rate, bias, lengths, heads), 1e-5)


@pytest.mark.parametrize("module", [reference, cpu, scans, fixed], ids=IDS)
@pytest.mark.parametrize("only_decodes", [False, True])
def test_states_of_16_bits_are_rounded_and_no_more(module: Any, only_decodes: bool) -> None:
    torch.manual_seed(0)
    lengths, heads = [3, 17, 40] if only_decodes else [3, 40, 90], (1, 2, 16, 16)
    steps = StateSteps(1, lengths, 16, only_decodes=only_decodes)
    qkv, gates = torch.randn(sum(lengths), 64), torch.randn(sum(lengths), 4)
    rate, bias = torch.rand(2) / 4, torch.randn(2)
    expected = whole_delta_rule(qkv, gates, rate, bias, lengths, heads)
    states = steps.states(heads, before=torch.float16)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        return module.delta_rule(part, own, rate, bias, states, context)  # type: ignore[no-any-return]

    assert steps.compare(compute, (qkv, gates), expected, 3e-3) > 1e-6


def test_delta_rule_of_one_key_that_comes_again_and_again() -> None:
    """Each update corrects the one before it: the block's equations are as ill as they get."""
    torch.manual_seed(0)
    lengths, heads = [64], (1, 1, 16, 16)
    steps = StateSteps(0, lengths, 16)
    qkv = torch.randn(64, 48)
    qkv[:, 16:32] = qkv[0, 16:32]
    gates = torch.tensor([[9.0, -9.0]]).expand(64, 2).contiguous()  # β ≈ 1, hardly any decay
    rate, bias = torch.ones(1), torch.zeros(1)
    expected = whole_delta_rule(qkv, gates, rate, bias, lengths, heads)
    for function in (reference.delta_rule, cpu.delta_rule, scans.delta_rule, fixed.delta_rule):
        states = DeltaStates(*(torch.zeros(9, *s) for s in ((1, 16, 16), (16, 1, 16), (16, 1, 16), (16, 1))))
        [(indices, context)] = steps.whole()
        out = function(qkv[indices], gates[indices], rate, bias, states, context)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("again", [False, True], ids=["unlike keys", "one key"])
def test_equations_by_float16_give_what_tokens_give_one_by_one(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key that comes again makes all entries of a chunk's equations as large as they get."""
    monkeypatch.setattr(scans, "EQUATIONS", "float16")
    torch.manual_seed(0)
    lengths, heads = [40, 133], (1, 2, 16, 16)
    steps = StateSteps(2, lengths, 16)
    qkv = torch.randn(sum(lengths), 64)
    gates = torch.tensor([9.0, 9.0, -9.0, -9.0]).expand(sum(lengths), 4)  # β ≈ 1, hardly any decay
    if again:
        qkv[:, 16:32] = qkv[0, 16:32]
    qkv, gates = qkv.bfloat16(), gates.bfloat16()
    rate, bias = torch.ones(2), torch.zeros(2)
    expected = whole_delta_rule(qkv, gates, rate, bias, lengths, heads)
    states = steps.states(heads, torch.bfloat16)

    def compute(part: Tensor, own: Tensor, context: StateContext) -> Tensor:
        return scans.delta_rule(part, own, rate, bias, states, context)  # type: ignore[no-any-return]

    steps.compare(compute, (qkv, gates), expected, 0.03)


@pytest.mark.parametrize("module", [reference, cpu_kda, kda], ids=["reference", "cpu", "triton"])
@pytest.mark.parametrize(("block_size", "only_decodes"), [(16, False), (4, True), (32, False)])
def test_kimi_delta_attention_in_chunks_is_that_token_by_token(
    module: Any, block_size: int, only_decodes: bool
) -> None:
    torch.manual_seed(block_size)
    heads = num_heads, _, size, _ = 2, 2, 24, 24
    lengths = [3, 17, 20] if only_decodes else LENGTHS
    steps = StateSteps(block_size, lengths, block_size, only_decodes=only_decodes)
    qkv, beta = torch.randn(sum(lengths), 3 * num_heads * size), torch.randn(sum(lengths), num_heads)
    forget, rate = torch.randn(sum(lengths), num_heads * size), torch.rand(num_heads) / 2
    bias = torch.randn(num_heads * size)
    expected = whole_kda(qkv, beta, forget, (rate, bias), lengths, heads)
    states = steps.states(heads, of_channels=True)

    def compute(part: Tensor, own: Tensor, forgets: Tensor, context: StateContext) -> Tensor:
        return module.kda(part, own, forgets, rate, bias, states, context)  # type: ignore[no-any-return]

    steps.compare(compute, (qkv, beta, forget), expected, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, both = torch.randn(5, 3, 24).to(dtype), torch.randn(5, 100).to(dtype)
    weight, gate = torch.randn(24).to(dtype), both[:, 28:]
    expected = reference.gated_rms_norm(x, gate, weight, 1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        recurrent.gated_rms_norm(x, gate, weight, 1e-6), expected, atol=tolerance, rtol=tolerance
    )


def test_steps_whose_sequences_have_no_tokens_change_no_state() -> None:
    """Graphs are captured with such a step, all zeros."""
    zeros = torch.zeros(9, dtype=torch.int32)
    context = StateContext.of_step(zeros[:8].view(4, 2), zeros[:4], zeros[:5], zeros[:4], 40, 16)
    assert context.sequence_of is not None
    assert context.sequence_of.max() < 4
    x, inputs = torch.randn(40, 72), torch.full((2, 4, 24), 7.0)
    recurrent.short_conv(x, torch.randn(24, 3), None, inputs, context)
    recurrent.causal_conv(x[:, :24], torch.randn(24, 4), None, inputs, context)
    states = DeltaStates(
        torch.full((2, 2, 8, 8), 7.0),
        torch.full((2, 16, 1, 8), 7.0),
        torch.full((2, 16, 2, 8), 7.0),
        inputs.new_full((2, 16, 2), 7.0),
    )
    for module in (scans, fixed):
        module.delta_rule(x[:, :32], x[:, :4], torch.ones(2), torch.zeros(2), states, context)
    for each in (inputs, states.before, states.keys, states.updates, states.decays):
        assert (each == 7).all()


@pytest.mark.parametrize("only_decodes", [False, True])
def test_sequences_without_tokens_read_and_write_nothing(only_decodes: bool) -> None:
    """The steps from which graphs are captured have the size of real ones, and rows that compute nothing."""
    zeros = torch.zeros(4, dtype=torch.int32)
    table = torch.full((2, 3), 99, dtype=torch.int32)
    num_tokens = 3 if only_decodes else 8
    sequences = table, zeros[:3], zeros, zeros[:3] + 40
    context = StateContext.of_step(*sequences, num_tokens, 16, only_decodes=only_decodes)
    assert context.sequence_of is not None
    assert context.sequence_of.max() < 3
    x, weight, inputs = torch.randn(num_tokens, 48), torch.randn(16, 3), torch.full((1, 4, 16), torch.nan)
    assert recurrent.short_conv(x, weight, None, inputs, context).count_nonzero() == 0
    states = DeltaStates(*(torch.full((1, *s), torch.nan) for s in ((1, 16, 16), (16, 1, 16), (16, 1, 16), (16, 1))))
    for module in (scans, fixed):
        module.delta_rule(x, torch.zeros(num_tokens, 2), torch.ones(1), torch.ones(1), states, context)
    assert all(each.isnan().all() for each in (inputs, states.before, states.keys, states.updates, states.decays))
