"""Checks of recurrent layers: their kernels, and hybrid models by the whole engine."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels
from engine import LLM, SamplingParams
from kernels import DeltaStates, StateContext
from tests.gpu.checks import BF16, F32, Checks, relative_error
from tests.gpu.models import check_families
from tests.oracles.recurrent import Heads, whole_conv, whole_delta_rule, whole_mamba2
from tests.oracles.state_steps import StateSteps

CASES = (
    *("lfm2", "lfm2-bias", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("nemotron_h", "nemotron_h-moe", "granitemoehybrid", "bamba", "falcon_h1", "kimi_linear"),
)
SERVED = ("lfm2", "qwen3_5", "qwen3_next", "nemotron_h")
LENGTHS = [1, 16, 33, 150, 400]
LIMITS = {BF16: 8e-3, F32: 1e-5}
NETS: dict[str, Heads] = {"Qwen3.5-27B": (16, 48, 128, 128), "Qwen3.5-35B-A3B": (16, 32, 128, 128)}
STATE_SPACES: dict[str, Heads] = {"Nemotron 3 Nano": (8, 64, 128, 64), "Granite 4 H": (1, 128, 128, 64)}
BLOCK = 16


def check_recurrent(checks: Checks) -> None:
    """Sequences in chunks, over states of which few are held, against whole sequences in float64; and times."""
    for dtype, length in itertools.product((BF16, F32), (3, 4)):
        _check_conv(checks, dtype, length)
    for dtype, layer in itertools.product((BF16, F32), _layers()):
        _check_layer(checks, dtype, layer)
        _check_prompts(checks, dtype, layer)
    if checks.device != "cpu":
        for layer in _layers():
            for num_seqs, num_tokens in ((1, 1), (8, 1), (64, 1), (256, 1), (1, 2048), (4, 2048)):
                _time_layer(checks, layer, num_seqs, num_tokens)


@dataclass(frozen=True)
class Layer:
    """The delta rule or a state-space layer with heads of a model."""

    name: str
    heads: Heads
    is_delta: bool
    run: Callable[..., Tensor]

    @property
    def width(self) -> int:
        """Numbers per token of the inputs."""
        num_keys, num_values, key_dim, value_dim = self.heads
        return 2 * num_keys * key_dim + num_values * value_dim

    def inputs(self, count: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        """Return random inputs and gates of tokens, and what belongs to heads."""
        num_values, new = self.heads[1], partial(torch.randn, device=device)
        x, gates = new(count, self.width).to(dtype), new(count, num_values * (1 + self.is_delta)).to(dtype)
        rate, bias = new(num_values).abs(), new(num_values)
        if self.is_delta:
            return x, gates, rate, bias
        return x, gates, kernels.StateSpace(rate / 8, bias, new(num_values), (0.0, 10.0))

    def whole(self, inputs: tuple[Any, ...], lengths: list[int]) -> Tensor:
        """Return the outputs of whole sequences in float64."""
        if self.is_delta:
            x, gates, rate, bias = inputs
            return whole_delta_rule(x, gates, rate, bias, lengths, self.heads)
        x, steps, layer = inputs
        return whole_mamba2(x, steps, layer[:3], layer.limits, lengths, self.heads)


def _layers() -> list[Layer]:
    return [
        *(Layer(f"delta rule of {net}", heads, True, kernels.delta_rule) for net, heads in NETS.items()),
        *(Layer(f"mamba2 of {net}", heads, False, kernels.mamba2) for net, heads in STATE_SPACES.items()),
    ]


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


def _check_layer(checks: Checks, dtype: torch.dtype, layer: Layer) -> None:
    name, device = f"{layer.name}, {dtype}", checks.device
    if not checks.wants(name):
        return
    steps = StateSteps(layer.heads[1], LENGTHS, BLOCK)
    inputs = layer.inputs(sum(LENGTHS), dtype, device)
    states = _states(steps.num_blocks, layer.heads, dtype, device, torch.nan)
    found = torch.zeros(sum(LENGTHS), layer.heads[1], layer.heads[3], dtype=dtype)
    for indices, context in steps.steps(device):
        own = (each[indices.clamp(min=0)] for each in inputs[:2])
        _collect(found, indices, layer.run(*own, *inputs[2:], states, context))
    checks.add(name, relative_error(found, layer.whole(inputs, LENGTHS).cpu()), LIMITS[dtype])


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


def _check_prompts(checks: Checks, dtype: torch.dtype, layer: Layer) -> None:
    """Four long prompts in one step."""
    name, device, lengths = f"{layer.name}, {dtype}, 4 x 2048 tokens", checks.device, [2048] * 4
    if checks.device == "cpu" or not checks.wants(name):
        return
    inputs = layer.inputs(sum(lengths), dtype, device)
    context, num_blocks = _prompts(len(lengths), 2048, device)
    found = layer.run(*inputs, _states(num_blocks, layer.heads, dtype, device, torch.nan), context)
    checks.add(name, relative_error(found.cpu(), layer.whole(inputs, lengths).cpu()), LIMITS[dtype])


def _prompts(num_seqs: int, num_tokens: int, device: str) -> tuple[StateContext, int]:
    """Return a step of whole prompts, of which the last block is held, or of decodes at position 999; and the number of
    blocks.
    """
    context_len = 1000 if num_tokens == 1 else num_tokens
    tables = torch.full((num_seqs + 1, 1 + context_len // BLOCK), -1, dtype=torch.int32, device=device)
    tables[:, (context_len - 1) // BLOCK] = torch.arange(num_seqs + 1, device=device) % (2 * num_seqs)
    order = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    context = StateContext.of_step(
        tables, order[:num_seqs], order * num_tokens, torch.full_like(order[:num_seqs], context_len),
        num_seqs * num_tokens, BLOCK, only_decodes=num_tokens == 1,
    )  # fmt: skip
    return context, 2 * num_seqs


def _time_layer(checks: Checks, layer: Layer, num_seqs: int, num_tokens: int) -> None:
    """Time a step in which each sequence computes `num_tokens` tokens; decodes are in the middle of a block."""
    kind = "decode" if num_tokens == 1 else f"{num_tokens} tokens"
    name, device = f"time of {layer.name}, {num_seqs} x {kind}", checks.device
    if not checks.wants(name):
        return
    num_keys, num_values, key_dim, value_dim = layer.heads
    context, num_blocks = _prompts(num_seqs, num_tokens, device)
    states = _states(num_blocks, layer.heads, BF16, device, 0.0)
    inputs = layer.inputs(num_seqs * num_tokens, BF16, device)
    call = partial(layer.run, *inputs, states, context)
    finite = float(not call().isfinite().all())
    num_old = 999 % BLOCK if num_tokens == 1 else 0
    of_seq = num_values * value_dim * 4 * (key_dim + num_old) + num_keys * key_dim * 2 * num_old
    num_bytes = num_seqs * of_seq + inputs[0].nbytes + num_seqs * num_tokens * num_values * value_dim * 2
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
