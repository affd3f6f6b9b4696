"""Checks of the routers and experts of mixtures, at the shapes of published models, against float64."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import kernels
from benchmarks.micro.experts import COMPRESSED, Shape
from kernels import Experts, ExpertWeight, QuantizedWeight, Router, RouterArgs, Weight, reference
from kernels.triton.pairs import sort_pairs
from tests.gpu.checks import BF16, F32, Checks, relative_error
from tests.oracles.random_weights import random_weight
from tests.oracles.rounded_experts import rounded_experts

FORMS = "bfloat16", COMPRESSED, "fp8", "fp8 blocks", "int4"
SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, Router(8, renormalise=True), FORMS),
    "gpt-oss-20b": Shape(2880, 2880, 32, Router(4, "softmax_chosen"), ("bfloat16", "mxfp4"), "clamped_swiglu", True),
    "Mixtral-8x7B": Shape(4096, 14336, 8, Router(2, "softmax_chosen"), ("bfloat16", "int4 asymmetric")),
    "DeepSeek-V3": Shape(7168, 2048, 256, Router(8, "sigmoid", 8, 4, "top2", True, 2.5), ()),
}
NUM_TOKENS = (1, 8, 16, 64, 1000, 5000)  # the last: pairs of most shapes are sorted by chunks


def expert_weights(form: str, count: int, n: int, k: int, device: str) -> Weight:
    """[count, n, k] of a form, of a standard deviation of about k^-0.5. Low-bit experts are one of two."""
    if form in ("bfloat16", COMPRESSED):
        return torch.stack([torch.randn(n, k, dtype=BF16, device=device) * k**-0.5 for _ in range(count)])
    two = [random_weight(form, n, k, device, seed) for seed in range(2)]
    return QuantizedWeight.stack([two[expert % 2] for expert in range(count)])


def check_routers(checks: Checks, num_tokens: Sequence[int] = NUM_TOKENS) -> None:
    """The same experts as in float64 unless their scores are as good as equal, and their weights."""
    for name, shape in SHAPES.items():
        is_corrected = shape.rule.scoring == "sigmoid"
        weight = checks.random(shape.count, shape.hidden, dtype=torch.float32 if is_corrected else torch.bfloat16)
        norm = 1 + checks.random(shape.hidden) / 10
        correction = torch.rand(shape.count, device=checks.device) / 4 if is_corrected else None
        for count in num_tokens:
            x = checks.random(count, shape.hidden)
            weight = weight / weight.norm(dim=1, keepdim=True)
            call = partial(kernels.norm_route, x, norm, 1e-6, RouterArgs(weight, shape.rule, None, correction))
            normed, ids, weights = call()
            want_ids, want = reference.route(normed.double(), RouterArgs(weight.double(), shape.rule, None, correction))
            name_of_check = f"router of {name}, {count} tokens"
            error = max(
                relative_error(normed, reference.rms_norm(x, norm, 1e-6)),
                relative_error(weights, want),
                float((ids != want_ids).double().mean() > 1e-3),
            )
            checks.add(name_of_check, error, 3e-3, call, weight.nbytes + 2 * x.nbytes)


def check_expert_products(checks: Checks, num_tokens: Sequence[int] = NUM_TOKENS) -> None:
    """Each form of each shape; the same bytes when it is run again."""
    for name, shape in SHAPES.items():
        for form in shape.forms:
            wanted = [count for count in num_tokens if checks.wants(_name(name, form, count))]
            if wanted:
                _check_form(checks, name, shape, form, wanted)
                gc.collect()


def check_sorted_pairs(checks: Checks) -> None:
    """So many pairs that chunks are larger than the least: as a stable sort has them, and in tiles that hold each
    once.
    """
    count, first, block_m, name = 128, 16, 128, "sorted pairs of 131072 tokens"
    if checks.device == "cpu" or not checks.wants(name):
        return
    ids = torch.randint(-1, 160, (131_072, 8), dtype=torch.int32, device=checks.device)
    call = partial(sort_pairs, ids, count, first, block_m, with_positions=True)
    order, entries, _, positions, _ = call()
    assert positions is not None
    local = ids.flatten() - first
    pairs = ((local >= 0) & (local < count)).nonzero().flatten()
    want = pairs[local[pairs].argsort(stable=True)]
    experts, starts, stops = entries[entries[:, 0] >= 0].T
    stops = stops.clamp(max=starts + block_m)
    right = (
        torch.equal(order[: len(want)].long(), want)
        and not order[len(want) :].any()
        and torch.equal(positions.flatten()[want].long(), torch.arange(len(want), device=checks.device))
        and torch.equal(starts[1:], stops[:-1])
        and int(starts[0]) == 0
        and torch.equal(experts.repeat_interleave(stops - starts), local[want])
    )
    checks.add(name, float(not right), 0.0, call, 4 * ids.nbytes)


def _name(name: str, form: str, num_tokens: int) -> str:
    return f"{form}: experts of {name}, {num_tokens} tokens"


def _check_form(checks: Checks, name: str, shape: Shape, form: str, num_tokens: Sequence[int]) -> None:
    gate_up = expert_weights(form, shape.count, 2 * shape.inner, shape.hidden, checks.device)
    down = expert_weights(form, shape.count, shape.hidden, shape.inner, checks.device)
    compressed = None
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if shape.biased:
        biases = (checks.random(shape.count, 2 * shape.inner), checks.random(shape.count, shape.hidden))
    else:
        gate_up, down = kernels.pack_experts(gate_up, down, BF16)
    if form == COMPRESSED:
        compressed = kernels.compress_experts(gate_up, down)
        assert compressed is not None
    packed: tuple[ExpertWeight, ExpertWeight] = compressed or (gate_up, down)
    for count in num_tokens:
        x, residual = checks.random(count, shape.hidden), checks.random(count, shape.hidden)
        ids = torch.rand(count, shape.count, device=checks.device).argsort(1)[:, : shape.rule.num_chosen].int()
        weights = torch.rand(count, shape.rule.num_chosen, dtype=F32, device=checks.device)
        if count > 1:
            ids[-1] = -1
        run = partial(kernels.experts, x, ids, weights, Experts(*packed, *biases, shape.activation))
        got, again = run(), run()
        added = run(add_to=residual.clone())
        wanted = [_exact(x, ids, weights, gate_up, down, biases, shape)]
        if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight) and gate_up.rounds_activations:
            wanted.append(rounded_experts(x, ids, weights, gate_up, down, shape.activation))  # a product may round
        error = min(max(relative_error(got, want), relative_error(added, want + residual)) for want in wanted)
        error = error if torch.equal(got, again) else float("inf")
        num_bytes = _bytes_read(ids, packed[0]) + _bytes_read(ids, packed[1]) + 2 * x.nbytes
        checks.add(_name(name, form, count), error, 1.2e-2, run, num_bytes)


def _bytes_read(ids: Tensor, weight: ExpertWeight) -> int:
    """Bytes of the experts that were chosen."""
    return weight.nbytes // len(weight) * len(ids[ids >= 0].unique())


def _exact(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    biases: tuple[Tensor | None, ...],
    shape: Shape,
) -> Tensor:
    """The reference implementation in float64, one expert after the other."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        matrices = [_exact_weight(stack[expert])[None] for stack in (gate_up, down)]
        of_expert = [None if bias is None else bias[expert : expert + 1].double() for bias in biases]
        stack = Experts(matrices[0], matrices[1], of_expert[0], of_expert[1], shape.activation, expert)
        total += reference.experts(x.double(), ids, weights, stack)
    return total


def _exact_weight(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.double()
    return reference.dequantize(weight.codes, weight, torch.float64)
