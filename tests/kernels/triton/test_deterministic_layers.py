"""Deterministic forms of latent attention, recurrent layers and adapters for CUDA devices, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import (
    AdapterTokens,
    AttentionArgs,
    Experts,
    NewLatents,
    PagedContext,
    PagedLatents,
    StateContext,
    reference,
)
from kernels.cuda import attention, deterministic, fixed_latent, fixed_lora, split_sums
from kernels.cuda.choice import CHOICE
from kernels.data.forms import FORMS
from kernels.data.state import StateSpace
from kernels.triton import fixed_attention, fixed_scan, recurrent
from kernels.triton.lora import lora_add
from tests.kernels.triton.test_deterministic import MOST, each_alone
from tests.kernels.triton.test_deterministic import products_in_order as products_in_order
from tests.oracles.random_adapters import merged, random_expert_slots, random_slots
from tests.oracles.recurrent import whole_delta_rule, whole_kda, whole_mamba2
from tests.oracles.state_steps import StateSteps

LENGTHS, BLOCK = [1, 8, 19], 8
HEADS, KDA_HEADS = (1, 2, 16, 20), (2, 2, 16, 20)


@pytest.fixture(autouse=True)
def forms() -> Iterator[None]:
    FORMS.choose(True)
    yield
    FORMS.choose(False)


def layer(kind: str, dtype: torch.dtype) -> tuple[list[Tensor], Callable[..., Tensor], Tensor]:
    """Return the inputs of all tokens, the layer, and what whole sequences give in float64."""
    num_keys, num_values, key_dim, value_dim = heads = KDA_HEADS if kind == "kda" else HEADS
    count = sum(LENGTHS)
    x = torch.randn(count, 2 * num_keys * key_dim + num_values * value_dim).to(dtype)
    rate, bias, skip = torch.rand(num_values), torch.randn(num_values), torch.randn(num_values)
    if kind == "delta":
        gates = torch.randn(count, 2 * num_values).to(dtype)
        whole = whole_delta_rule(x, gates, rate, bias, LENGTHS, heads)
        return [x, gates], lambda *a: fixed_scan.delta_rule(*a[:2], rate, bias, *a[2:]), whole
    if kind == "mamba2":
        steps, limits = torch.randn(count, num_values).to(dtype), (0.1, 1.5)
        whole = whole_mamba2(x, steps, (rate, bias, skip), limits, LENGTHS, heads)
        return [x, steps], lambda *a: fixed_scan.mamba2(*a[:2], StateSpace(rate, bias, skip, limits), *a[2:]), whole
    beta, forget = torch.randn(count, num_values).to(dtype), torch.randn(count, num_values * key_dim).to(dtype)
    bias = torch.randn(num_values * key_dim)
    whole = whole_kda(x, beta, forget, (rate, bias), LENGTHS, heads)
    return [x, beta, forget], lambda *a: fixed_scan.kda(*a[:3], rate, bias, *a[3:]), whole


@pytest.mark.parametrize(
    ("kind", "dtype", "before"),
    [
        ("delta", torch.float32, torch.float32),
        ("delta", torch.bfloat16, torch.float16),
        ("mamba2", torch.float16, torch.float32),
        ("kda", torch.float32, torch.float32),
    ],
)
def test_recurrent_layers(kind: str, dtype: torch.dtype, before: torch.dtype) -> None:
    """Whole prompts, chunks and decodes give a token the same bytes, whichever blocks are held."""
    torch.manual_seed(0)
    inputs, run, expected = layer(kind, dtype)
    found = []
    for seed in (1, 2):
        steps = StateSteps(seed, LENGTHS, BLOCK, only_decodes=seed == 2)
        heads = KDA_HEADS if kind == "kda" else HEADS
        states = steps.states(heads, dtype, before=before, of_channels=kind == "kda")

        def compute(*args: Any) -> Tensor:
            return run(*args[:-1], states, args[-1])  # noqa: B023

        found.append(steps.collect(compute, inputs))
    assert torch.equal(*found)
    tolerance = 1e-5 if dtype == before == torch.float32 else 0.03
    torch.testing.assert_close(found[0].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("gated", [True, False])
def test_convolutions(gated: bool) -> None:
    torch.manual_seed(0)
    channels, dtype = 24, torch.bfloat16
    x = torch.randn(sum(LENGTHS), (3 if gated else 1) * channels).to(dtype)
    weight, bias, found = torch.randn(channels, 4).to(dtype), torch.randn(channels).to(dtype), []
    for seed in range(2):
        steps = StateSteps(seed, LENGTHS, BLOCK, only_decodes=seed == 1)
        cached = torch.full((steps.num_blocks, 4, channels), torch.nan, dtype=dtype)

        def compute(part: Tensor, context: StateContext) -> Tensor:
            convolution = recurrent.short_conv if gated else recurrent.causal_conv
            return convolution(part, weight, bias, cached, context)  # type: ignore[no-any-return] # noqa: B023

        found.append(steps.collect(compute, [x]))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latent_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    length, heads, size, rotary, page, plain = 90, 5, 40, 16, 8, 24
    tables, rows = torch.randperm(12).view(1, 12).int(), torch.zeros(1, dtype=torch.int32)
    cache, query = (
        torch.randn(12, 1, page, size + rotary).to(dtype),
        torch.randn(length, heads, size + rotary).to(dtype),
    )

    def latents(last: int, count: int = 1) -> PagedLatents:
        return PagedLatents(cache, tables, rows.repeat(count), torch.tensor([last] * count, dtype=torch.int32))

    def prefilled(first: int, last: int) -> Tensor:
        starts, out = torch.tensor([0, last - first], dtype=torch.int32), query.new_empty(last - first, heads, size)
        own = query[first:last].clone()
        return attention.latent_attention_prefill(own, starts, latents(last), scale=0.2, out=out)

    whole = prefilled(0, length)
    for first, last in [(0, 1), (0, 65), (33, 80), (89, 90)]:
        assert torch.equal(prefilled(first, last), whole[first:last]), (first, last)
    lens = torch.tensor([90, 0, 47, 3], dtype=torch.int32)
    newest = torch.stack([query[max(n - 1, 0)] for n in lens.tolist()])
    paged = PagedLatents(cache, tables, rows.repeat(4), lens)
    out = newest.new_full((4, heads, size), torch.nan)
    fixed_latent.latent_attention_decode(newest, paged, scale=0.2, out=out)
    assert out[1].eq(0).all()
    for i in (0, 2, 3):
        assert torch.equal(out[i], whole[int(lens[i]) - 1]), i
    want = reference.latent_attention_decode(
        newest.double(), replace(paged, cache=cache.double()), scale=0.2, out=out.double()
    )
    torch.testing.assert_close(out.double(), want, atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=2e-3)

    queries = torch.randn(MOST, heads, plain + rotary).to(dtype)
    both = torch.randn(heads, plain + 12, size).to(dtype)
    new, positions, norm = (
        torch.randn(MOST, size + rotary).to(dtype),
        torch.arange(MOST).int(),
        torch.rand(size).to(dtype),
    )
    cos_sin = torch.randn(MOST, rotary)

    def stored(at: slice) -> Tensor:
        into = torch.zeros(20, 1, page, size + rotary, dtype=dtype)
        one = NewLatents(new[at].clone(), norm, 1e-6, positions[at], cos_sin, into, positions[at].long(), False)
        absorbed = fixed_latent.absorb_and_store(queries[at].clone(), both[:, :plain], one)
        values = fixed_latent.head_linear(absorbed[..., :size], both[:, plain:])
        kept = into[:, 0].flatten(0, 1)[positions[at].long()]
        return torch.cat([absorbed.flatten(1), values.flatten(1), kept], 1)

    got = each_alone(stored)
    into = torch.zeros(20, 1, page, size + rotary, dtype=dtype)
    one = NewLatents(new, norm, 1e-6, positions, cos_sin, into, positions.long(), False)
    want = reference.absorb_and_store(queries.float(), both[:, :plain].float(), replace(one, latent=new))
    torch.testing.assert_close(got[:, : want[0].numel()].float(), want.flatten(1).float(), atol=0.05, rtol=0.01)


@pytest.mark.parametrize("by_ranges", [False, True])
def test_attention_over_an_e4m3_cache(by_ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(deterministic, "CHOICE", replace(CHOICE, fixed_ranges=by_ranges))
    monkeypatch.setattr(fixed_attention, "RANGE", 64)
    length, size = 150, 16
    cache = torch.randn(2, 10, 2, size, 16).to(torch.float8_e4m3fn)
    tables, rows, args = torch.randperm(10).view(1, 10).int(), torch.zeros(1, dtype=torch.int32), AttentionArgs(0.25)
    args = replace(args, kv_scale=torch.rand(2, 2) + 0.5)
    query = torch.randn(length, 8, 16).bfloat16()

    def prefilled(first: int, last: int) -> Tensor:
        context = PagedContext(cache[0], cache[1], tables, rows, torch.tensor([last], dtype=torch.int32))
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        return deterministic.paged_attention_prefill(query[first:last].clone(), starts, context, args)

    whole = prefilled(0, length)
    assert torch.equal(prefilled(33, 90), whole[33:90])
    lens = torch.tensor([150, 47], dtype=torch.int32)
    context = PagedContext(cache[0], cache[1], tables, rows.repeat(2), lens)
    got = deterministic.paged_attention_decode(query[lens.long() - 1], context, args)
    assert torch.equal(got, whole[lens.long() - 1])
    want = reference.paged_attention_decode(query[lens.long() - 1].float(), context, args)
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 16), (torch.float16, 48)])
def test_adapters(dtype: torch.dtype, rank: int) -> None:
    torch.manual_seed(0)
    weights, slots = random_slots(4, rank, 700, (96, 32), dtype=dtype), torch.randint(-1, 4, (MOST,), dtype=torch.int32)
    x, matrix = torch.randn(MOST, 700).to(dtype), (torch.randn(128, 700) / 26).to(dtype)

    def adapted(at: slice, gate: Any = None) -> Tensor:
        tokens = AdapterTokens(slots[at].clone(), 4)
        return fixed_lora.adapted_linear(x[at].clone(), matrix, None, weights, tokens, gate=gate)

    got = each_alone(adapted)
    plain = deterministic.linear(x, matrix)
    assert torch.equal(got[slots < 0], plain[slots < 0])
    want = merged(plain, x, weights, slots)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    assert torch.equal(lora_add(plain.clone(), x, weights, AdapterTokens(slots, 4)), got)
    each_alone(lambda at: adapted(at, "silu"))


def test_adapters_of_a_large_step_have_the_tiles_of_others() -> None:
    torch.manual_seed(0)
    weights, slots = random_slots(2, 16, 512, (64,)), torch.full((1030,), -1, dtype=torch.int32)
    slots[500:600] = 1
    x, y = torch.randn(1030, 512), torch.randn(1030, 64)
    whole = lora_add(y.clone(), x, weights, AdapterTokens(slots, 2))
    for at in (slice(510, 511), slice(500, 590)):
        assert torch.equal(lora_add(y[at].clone(), x[at].clone(), weights, AdapterTokens(slots[at], 2)), whole[at])


def test_adapters_of_experts() -> None:
    torch.manual_seed(0)
    hidden, inner, count, chosen = 64, 32, 4, 2
    lora = random_expert_slots(3, count, 16, hidden, (inner, inner), dtype=torch.float16)
    gate_up, down = (torch.randn(count, n, k).half() / 8 for n, k in ((2 * inner, hidden), (hidden, inner)))
    stack, slots = Experts(gate_up, down), torch.randint(-1, 3, (MOST,), dtype=torch.int32)
    x, weights = torch.randn(MOST, hidden).half(), torch.rand(MOST, chosen)
    ids = torch.stack([torch.randperm(count)[:chosen] for _ in range(MOST)]).int()

    def adapted(at: slice) -> Tensor:
        tokens = AdapterTokens(slots[at].clone(), 3)
        args = x[at].clone(), ids[at].clone(), weights[at].clone(), stack
        pieces = tuple(slice(i // 2, (i + 1) // 2) for i in range(8))
        shared = split_sums.split_experts(*args, pieces, lora, tokens)
        return torch.cat([fixed_lora.adapted_experts(*args, lora, tokens).float(), shared], 1)

    got = each_alone(adapted)
    plain = deterministic.experts(x, ids, weights, stack)
    assert torch.equal(got[slots < 0, :hidden], plain[slots < 0].float())
    want = reference.adapted_experts(x, ids, weights, stack, lora, AdapterTokens(slots, 3)).float()
    torch.testing.assert_close(got[:, :hidden], want, atol=0.1, rtol=0.05)
    torch.testing.assert_close(got[:, hidden:], want, atol=0.1, rtol=0.05)
