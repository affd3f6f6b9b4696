"""Deterministic forms of latent attention, recurrent layers and adapters on a GPU: bit for bit, and right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import FORMS, AdapterTokens, DeltaStates, Experts, NewLatents, PagedLatents, StateContext, reference
from kernels.cuda import attention, deterministic, fixed_latent, fixed_lora, split_sums
from kernels.data.state import StateSpace
from kernels.triton import fixed_scan, recurrent
from tests.gpu.checks import BF16, F16, F32, LIMITS, Checks, relative_error
from tests.oracles.random_adapters import random_expert_slots, random_slots
from tests.oracles.recurrent import Heads, whole_delta_rule, whole_kda, whole_mamba2
from tests.oracles.state_steps import StateSteps

MOST, BLOCK = 300, 16
LENGTHS = [1, 16, 33, 120]
NETS: dict[str, Heads] = {"delta": (16, 32, 128, 128), "mamba2": (8, 64, 128, 64), "kda": (8, 8, 128, 128)}
L, R, PAGE = 512, 64, 16
Compare = Callable[[Checks, str, Callable[[slice], Any]], None]


def check_deterministic_states(checks: Checks) -> None:
    """Whole prompts, chunks and decodes give a token the same bytes, whichever blocks of states are held."""
    FORMS.choose(True)
    try:
        for kind, dtype, before in itertools.product(NETS, (BF16, F32), (F32, F16)):
            name = f"deterministic {kind} {dtype}, states {before}"
            if checks.wants(name.replace("torch.", "")) and (dtype == BF16 or before == F32):
                _check_states(checks, name, kind, dtype, before)
        for gated in (True, False):
            _check_conv(checks, gated)
    finally:
        FORMS.choose(False)


def _check_states(checks: Checks, name: str, kind: str, dtype: torch.dtype, before: torch.dtype) -> None:
    device, count, heads = checks.device, sum(LENGTHS), NETS[kind]
    num_keys, num_values, key_dim, value_dim = heads
    new = partial(torch.randn, device=device)
    x = new(count, 2 * num_keys * key_dim + num_values * value_dim).to(dtype)
    rate, bias, skip, limits = new(num_values).abs() / 4, new(num_values), new(num_values), (0.0, 10.0)
    inputs = [x, new(count, num_values * (2 if kind == "delta" else 1)).to(dtype)]
    if kind == "kda":
        bias, forget = new(num_values * key_dim), new(count, num_values * key_dim).to(dtype)
        inputs.append(forget)
        want = whole_kda(x, inputs[1], forget, (rate, bias), LENGTHS, heads)
    elif kind == "delta":
        want = whole_delta_rule(x, inputs[1], rate, bias, LENGTHS, heads)
    else:
        want = whole_mamba2(x, inputs[1], (rate, bias, skip), limits, LENGTHS, heads)
    layer = StateSpace(rate, bias, skip, limits)
    of_heads: tuple[Any, ...] = (layer,) if kind == "mamba2" else (rate, bias)
    run: Any = {"delta": fixed_scan.delta_rule, "kda": fixed_scan.kda, "mamba2": fixed_scan.mamba2}[kind]
    found = []
    for seed in range(3):
        steps = StateSteps(seed, LENGTHS, BLOCK, only_decodes=seed == 2)
        made = steps.states(heads, dtype, before=before, of_channels=kind == "kda")
        states = DeltaStates(
            made.before.to(device), made.keys.to(device), made.updates.to(device), made.decays.to(device)
        )

        def compute(*args: Any) -> Tensor:
            return run(*args[:-1], *of_heads, states, args[-1])  # type: ignore[no-any-return] # noqa: B023

        found.append(steps.collect(compute, inputs, device))
    wrong = sum(int((each != found[0]).flatten(1).any(1).sum()) for each in found[1:])
    checks.add(f"{name}: {wrong} of {2 * count} tokens differ", wrong, 0)
    limit = 3 * LIMITS[dtype] if before == F32 else 2e-2
    checks.add(f"{name}: right", relative_error(found[0], want), limit)


def _check_conv(checks: Checks, gated: bool) -> None:
    name, device, channels, dtype = f"deterministic convolution, gated {gated}", checks.device, 1024, BF16
    x = checks.random(sum(LENGTHS), (3 if gated else 1) * channels)
    weight, bias, found = checks.random(channels, 4), checks.random(channels), []
    for seed in range(2):
        steps = StateSteps(seed, LENGTHS, BLOCK, only_decodes=seed == 1)
        cached = torch.full((steps.num_blocks, 4, channels), torch.nan, dtype=dtype, device=device)

        def compute(part: Tensor, context: StateContext) -> Tensor:
            convolution = recurrent.short_conv if gated else recurrent.causal_conv
            return convolution(part, weight, bias, cached, context)  # type: ignore[no-any-return] # noqa: B023

        found.append(steps.collect(compute, [x], device))
    checks.add(name, int((found[0] != found[1]).any(1).sum()), 0)


def check_deterministic_latents(checks: Checks, compare: Compare) -> None:
    """Tokens decoded among 300 and alone, and prefilled in chunks; projections of each head."""
    device, length = checks.device, 1500
    for heads, dtype in ((16, BF16), (20, BF16), (128, BF16), (16, F32)):
        name = f"deterministic latent attention {heads} {dtype}"
        if not checks.wants(name.replace("torch.", "")):
            continue
        blocks = length // PAGE + 1
        cache, query = (
            checks.random(blocks, 1, PAGE, L + R, dtype=dtype),
            checks.random(length, heads, L + R, dtype=dtype),
        )
        tables, scale = torch.randperm(blocks, device=device).view(1, -1).int(), (L + R) ** -0.5
        rows = torch.zeros(MOST, dtype=torch.int32, device=device)

        def prefilled(first: int, last: int) -> Tensor:
            starts = torch.tensor([0, last - first], dtype=torch.int32, device=device)
            paged = PagedLatents(cache, tables, rows[:1], torch.tensor([last], dtype=torch.int32, device=device))  # noqa: B023
            out = query.new_empty(last - first, heads, L)  # noqa: B023
            return attention.latent_attention_prefill(query[first:last].clone(), starts, paged, scale=scale, out=out)  # noqa: B023

        whole, lens = prefilled(0, length), torch.randint(1, length + 1, (MOST,), device=device).int()
        newest = query[lens.long() - 1]

        def decoded(at: slice) -> Tensor:
            paged, own = PagedLatents(cache, tables, rows[at], lens[at].clone()), newest[at].clone()  # noqa: B023
            return fixed_latent.latent_attention_decode(own, paged, scale=scale, out=own.new_empty(len(own), heads, L))  # noqa: B023

        both = decoded(slice(0, MOST))
        wrong = int((both != whole[lens.long() - 1]).flatten(1).any(1).sum())
        for i in range(0, MOST, 11):
            wrong += not torch.equal(decoded(slice(i, i + 1))[0], both[i])
        cuts = [0, *sorted(random.Random(3).sample(range(1, length), 12)), length]
        for first, last in itertools.pairwise(cuts):
            wrong += not torch.equal(prefilled(first, last), whole[first:last])
        checks.add(f"{name}: {wrong} differ", wrong, 0)
        few, wide = slice(0, 20), cache.double()
        paged = PagedLatents(wide, tables, rows[few], lens[few])
        want = reference.latent_attention_decode(newest[few].double(), paged, scale=scale, out=both[few].double())
        checks.add(f"{name}: right", relative_error(both[few], want), LIMITS[dtype])
        _check_projections(checks, compare, heads, dtype)


def _check_projections(checks: Checks, compare: Compare, heads: int, dtype: torch.dtype) -> None:
    plain, device = 128, checks.device
    query, new = checks.random(MOST, heads, plain + R, dtype=dtype), checks.random(MOST, L + R, dtype=dtype)
    both, norm = checks.random(heads, 2 * plain, L, dtype=dtype), checks.random(L, dtype=dtype)
    positions, table = torch.arange(MOST, device=device).int(), checks.random(MOST, R, dtype=F32)

    def absorbed(at: slice) -> list[Tensor]:
        cache = torch.zeros(MOST // PAGE + 1, 1, PAGE, L + R, dtype=dtype, device=device)
        own = NewLatents(new[at].clone(), norm, 1e-6, positions[at], table, cache, positions[at].long(), True)
        found = fixed_latent.absorb_and_store(query[at].clone(), both[:, :plain], own)
        values = fixed_latent.head_linear(found[..., :L], both[:, plain:])
        return [found, values, cache[:, 0].flatten(0, 1)[positions[at].long()]]

    compare(checks, f"deterministic latent projections {heads} {dtype}", absorbed)


def check_deterministic_adapters(checks: Checks, compare: Compare) -> None:
    """Tokens with 32 adapters and without, alone and among 300; experts' adapters."""
    if not checks.wants("deterministic adapters"):
        return
    FORMS.choose(True)
    try:
        for rank, dtype in ((16, BF16), (64, BF16), (16, F32)):
            weights = random_slots(32, rank, 4096, (4096, 1024, 1024), dtype=dtype, device=checks.device)
            slots = torch.randint(-1, 32, (MOST,), device=checks.device).int()
            x, matrix = checks.random(MOST, 4096, dtype=dtype), checks.random(6144, 4096, dtype=dtype) / 64

            def adapted(at: slice) -> list[Tensor]:
                tokens = AdapterTokens(slots[at].clone(), 32)  # noqa: B023
                return [fixed_lora.adapted_linear(x[at].clone(), matrix, None, weights, tokens)]  # noqa: B023

            name = f"deterministic adapters of rank {rank} {dtype}"
            compare(checks, name, adapted)
            want = reference.adapted_linear(x, matrix, None, weights, AdapterTokens(slots, 32))
            checks.add(f"{name}: right", relative_error(adapted(slice(0, MOST))[0], want), 2 * LIMITS[dtype])
        _check_expert_adapters(checks, compare)
    finally:
        FORMS.choose(False)


def _check_expert_adapters(checks: Checks, compare: Compare) -> None:
    count, hidden, inner, chosen = 16, 2048, 768, 8
    lora = random_expert_slots(4, count, 16, hidden, (inner, inner), dtype=BF16, device=checks.device)
    gate_up, down = (checks.random(count, n, k) / k**0.5 for n, k in ((2 * inner, hidden), (hidden, inner)))
    stack, x = Experts(gate_up, down), checks.random(MOST, hidden)
    ids = torch.rand(MOST, count, device=checks.device).argsort(1)[:, :chosen].int()
    weights, slots = torch.rand(MOST, chosen, device=checks.device), torch.randint(-1, 4, (MOST,), device=checks.device)

    def adapted(at: slice) -> list[Tensor]:
        tokens = AdapterTokens(slots[at].int(), 4)
        args = x[at].clone(), ids[at].clone(), weights[at].clone(), stack
        pieces = tuple(slice(2 * i, 2 * i + 2) for i in range(8))
        return [fixed_lora.adapted_experts(*args, lora, tokens), split_sums.split_experts(*args, pieces, lora, tokens)]

    compare(checks, "deterministic adapters of experts", adapted)
    plain, got = deterministic.experts(x, ids, weights, stack), adapted(slice(0, MOST))
    wrong = int((plain != got[0])[slots < 0].any(1).sum())
    checks.add("deterministic adapters of experts: tokens without one", wrong, 0)
    want = reference.adapted_experts(x, ids, weights, stack, lora, AdapterTokens(slots.int(), 4))
    for each in got:
        checks.add("deterministic adapters of experts: right", relative_error(each, want), 3 * LIMITS[BF16])
