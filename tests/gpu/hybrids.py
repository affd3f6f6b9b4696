"""Checks of recurrent layers: their kernels, and hybrid models by the whole engine."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import kernels
from engine import LLM, SamplingParams
from kernels import DeltaStates, StateContext
from tests.gpu.checks import BF16, F32, Checks, relative_error
from tests.gpu.models import check_families
from tests.oracles.recurrent import Heads, whole_conv, whole_delta_rule
from tests.oracles.state_steps import StateSteps

CASES = ("lfm2", "lfm2-bias", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
SERVED = ("lfm2", "qwen3_5", "qwen3_next")
LENGTHS = [1, 16, 33, 150, 400]
LIMITS = {BF16: 8e-3, F32: 1e-5}
NETS: dict[str, Heads] = {"Qwen3.5-27B": (16, 48, 128, 128), "Qwen3.5-35B-A3B": (16, 32, 128, 128)}
BLOCK = 16


def check_recurrent(checks: Checks) -> None:
    """Sequences in chunks, over states of which few are held, against whole sequences in float64; and times."""
    for dtype, length in itertools.product((BF16, F32), (3, 4)):
        _check_conv(checks, dtype, length)
    for dtype, name in itertools.product((BF16, F32), NETS):
        _check_delta_rule(checks, dtype, name)
    if checks.device != "cpu":
        for name in NETS:
            for num_seqs, num_tokens in ((1, 1), (8, 1), (64, 1), (256, 1), (1, 2048), (4, 2048)):
                _time_delta_rule(checks, name, num_seqs, num_tokens)


def _check_conv(checks: Checks, dtype: torch.dtype, length: int) -> None:
    name, channels = f"short convolution of {length}, {dtype}", 2048
    if not checks.wants(name):
        return
    steps, device = StateSteps(length, LENGTHS, BLOCK), checks.device
    x = torch.randn(sum(LENGTHS), 3 * channels).to(dtype)
    weight = torch.randn(channels, length).to(dtype)
    expected = whole_conv(x, weight, None, LENGTHS)
    inputs = torch.full((steps.num_blocks, 4, channels), torch.nan, dtype=dtype, device=device)
    found = torch.zeros(sum(LENGTHS), channels, dtype=dtype)
    for indices, context in steps.steps(device):
        out = kernels.short_conv(_rows(x, indices), weight.to(device), None, inputs, context)
        _collect(found, indices, out)
    checks.add(name, relative_error(found, expected), LIMITS[dtype])


def _check_delta_rule(checks: Checks, dtype: torch.dtype, net: str) -> None:
    name = f"delta rule of {net}, {dtype}"
    if not checks.wants(name):
        return
    heads, device = NETS[net], checks.device
    num_keys, num_values, key_dim, value_dim = heads
    steps = StateSteps(num_values, LENGTHS, BLOCK)
    qkv = torch.randn(sum(LENGTHS), 2 * num_keys * key_dim + num_values * value_dim).to(dtype)
    gates = torch.randn(sum(LENGTHS), 2 * num_values).to(dtype)
    rate, bias = torch.rand(num_values) * 2, torch.randn(num_values)
    expected = whole_delta_rule(qkv, gates, rate, bias, LENGTHS, heads)
    states = _states(steps.num_blocks, heads, dtype, device, torch.nan)
    found = torch.zeros(sum(LENGTHS), num_values, value_dim, dtype=dtype)
    for indices, context in steps.steps(device):
        inputs = _rows(qkv, indices), _rows(gates, indices), rate.to(device), bias.to(device)
        _collect(found, indices, kernels.delta_rule(*inputs, states, context))
    checks.add(name, relative_error(found, expected), LIMITS[dtype])


def _rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of x on the device of the indices; those of padding, below 0, are anything."""
    return x[indices.clamp(min=0).cpu()].to(indices.device)


def _collect(found: Tensor, indices: Tensor, out: Tensor) -> None:
    real = (indices >= 0).cpu()
    found[indices.cpu()[real]] = out.cpu()[real]


def _states(num_blocks: int, heads: Heads, dtype: torch.dtype, device: str, value: float) -> DeltaStates:
    num_keys, num_values, key_dim, value_dim = heads
    new = partial(torch.full, fill_value=value, device=device)
    return DeltaStates(
        new((num_blocks, num_values, key_dim, value_dim), dtype=F32),
        new((num_blocks, BLOCK, num_keys, key_dim), dtype=dtype),
        new((num_blocks, BLOCK, num_values, value_dim), dtype=F32),
        new((num_blocks, BLOCK, num_values), dtype=F32),
    )


def _time_delta_rule(checks: Checks, net: str, num_seqs: int, num_tokens: int) -> None:
    """Time a step in which each sequence computes `num_tokens` tokens; decodes are in the middle of a block."""
    kind = "decode" if num_tokens == 1 else f"{num_tokens} tokens"
    name, heads, device = f"time of delta rule of {net}, {num_seqs} x {kind}", NETS[net], checks.device
    if not checks.wants(name):
        return
    num_keys, num_values, key_dim, value_dim = heads
    context_len = 1000 if num_tokens == 1 else num_tokens
    states = _states(2 * num_seqs, heads, BF16, device, 0.0)
    tables = torch.full((num_seqs + 1, 1 + context_len // BLOCK), -1, dtype=torch.int32, device=device)
    tables[:, (context_len - 1) // BLOCK] = torch.arange(num_seqs + 1, device=device) % (2 * num_seqs)
    order = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    context = StateContext.of_step(
        tables, order[:num_seqs], order * num_tokens, torch.full_like(order[:num_seqs], context_len),
        num_seqs * num_tokens, BLOCK, only_decodes=num_tokens == 1,
    )  # fmt: skip
    total = num_seqs * num_tokens
    qkv = torch.randn(total, 2 * num_keys * key_dim + num_values * value_dim, device=device).to(BF16)
    gates = torch.randn(total, 2 * num_values, device=device).to(BF16)
    rate, bias = torch.rand(num_values, device=device), torch.randn(num_values, device=device)
    call = partial(kernels.delta_rule, qkv, gates, rate, bias, states, context)
    finite = float(not call().isfinite().all())
    num_old = (context_len - 1) % BLOCK if num_tokens == 1 else 0
    of_seq = num_values * value_dim * 4 * (key_dim + num_old) + num_keys * key_dim * 2 * num_old
    num_bytes = num_seqs * of_seq + qkv.nbytes + total * num_values * value_dim * 2
    checks.add(name, finite, 0.0, call, num_bytes, graph=True)


def check_hybrid_families(checks: Checks) -> None:
    """See `check_families`."""
    check_families(checks, CASES)


def check_hybrids(checks: Checks) -> None:
    """Hybrid models by the whole engine in float32: transformers' greedy text, token for token, also from the prefix
    cache, with few blocks, eagerly and in graphs.
    """
    if importlib.util.find_spec("transformers") is None:
        print("left out: hybrid models (transformers is not installed)")
        return
    from tests.oracles.hybrids import NUM_TOKENS, fill_unwritten, make_hybrid

    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for case in SERVED:
        if not checks.wants(f"hybrid {case}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            prompts, answers = make_hybrid(case, Path(folder))
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            for budget, blocks, states, eager in (
                (2048, 1000, 100, True),
                (2048, 1000, 100, False),
                (50, 40, 30, False),
            ):
                llm = LLM(
                    model=folder, device=checks.device, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
                    max_num_batched_tokens=budget, num_gpu_blocks_override=blocks, num_states_override=states,
                    max_num_seqs=16, enforce_eager=eager, debug_checks=True,
                )  # fmt: skip
                fill_unwritten(llm._engine.runner)
                for again in ("", " again"):  # then from the prefix cache
                    found = [a.outputs[0].token_ids for a in llm.generate(given, sampling, use_tqdm=False)]
                    differs = sum(a != b for a, b in zip(found, answers, strict=True)) / len(answers)
                    how = f"{budget} tokens a step, {blocks} blocks, {'eager' if eager else 'graphs'}{again}"
                    checks.add(f"hybrid {case}, {how}: texts differ", differs, 0.0)
                hits = llm._engine.stats().prefix_hits
                checks.add(f"hybrid {case}, {budget} tokens a step: prefix missed", float(hits < 300), 0.0)
                llm.close()
