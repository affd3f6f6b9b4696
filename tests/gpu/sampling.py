"""Checks of sampling: masks, filters and thresholds against the reference implementation, draws against their
distribution.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

import kernels
from benchmarks.micro.sampling import FILTERS as TIMED_FILTERS
from kernels import Part, SamplingRows, reference
from tests.gpu.checks import BF16, F16, F32, Checks

FILTERS = {"greedy": (0.0, 0, 1.0, 0.0), "top_k 50000": (1.0, 50_000, 1.0, 0.0), **TIMED_FILTERS}


def check_sampling(checks: Checks) -> None:
    vocab_size = 151936
    for batch, dtype, spread in ((256, BF16, 3.0), (256, BF16, 0.5), (256, F32, 3.0), (64, F16, 3.0), (1, BF16, 3.0)):
        logits = (checks.random(batch, vocab_size, dtype=F32) * spread).to(dtype)
        seeds = torch.randint(-(2**62), 2**62, (batch,), device=checks.device)
        positions = torch.randint(0, 2**17, (batch,), device=checks.device)
        check_masks(checks, logits.clone(), seeds, positions)
        for name, (temperature, top_k, top_p, min_p) in FILTERS.items():
            filters = (
                torch.full((batch,), temperature, device=checks.device),
                torch.full((batch,), top_k, dtype=torch.int32, device=checks.device),
                torch.full((batch,), top_p, device=checks.device),
                torch.full((batch,), min_p, device=checks.device),
            )
            rows = SamplingRows(*filters, seeds, positions)
            call = partial(kernels.sample, logits, rows)
            error = float((call() != reference.sample(logits, rows)).float().mean())
            checks.add(
                f"sample {batch} x {vocab_size} {dtype} spread {spread} {name}", error, 0.02, call, logits.nbytes
            )
            if name in ("greedy", "none"):
                check_parts(checks, name, logits, rows)
            else:
                got = kernels.sampling_thresholds(logits, *filters)
                want = reference.sampling_thresholds(logits.float(), *filters)
                left, expected = ((logits.float() >= x.unsqueeze(1)).sum(1) for x in (got, want))
                error = float(((left - expected).abs() / expected).max())
                checks.add(f"  its thresholds leave {int(left.min())} to {int(left.max())} tokens", error, 1e-3)


def check_parts(checks: Checks, name: str, logits: Tensor, rows: SamplingRows) -> None:
    """Tokens that ranks with parts of the logits choose together, beside one that has them all."""
    vocab_size = logits.shape[1]
    want = kernels.sample(logits, rows, Part.PLAIN)
    for size in (2, 8):
        n = -(-vocab_size // size)
        parts = [part.contiguous() for part in logits.split(n, 1)]
        calls = [partial(kernels.best_keys, part, rows, rank * n, vocab_size) for rank, part in enumerate(parts)]
        keys = torch.cat([call() for call in calls], 1)
        error = float((kernels.best_tokens(keys) != want).float().mean())
        checks.add(f"  {name}: keys of one of {size} ranks", error, 0.0, calls[-1], parts[-1].nbytes)
        checks.add(
            f"  {name}: tokens of all {keys.shape[1]} keys", error, 0.0, partial(kernels.best_tokens, keys), keys.nbytes
        )


def check_masks(checks: Checks, logits: Tensor, seeds: Tensor, positions: Tensor) -> None:
    """Half of the rows are masked, and sampled again."""
    batch, vocab_size = logits.shape
    masked = torch.randperm(batch, device=checks.device)[: (batch + 1) // 2]
    mask_of = torch.full((batch,), -1, dtype=torch.int32, device=checks.device)
    mask_of[masked] = torch.arange(len(masked), dtype=torch.int32, device=checks.device)
    masks = torch.randint(-(2**31), 2**31, (len(masked), vocab_size // 32)).int().pin_memory()
    want = logits.clone()
    reference.mask_logits(want, masks, mask_of)
    mask = partial(kernels.mask_logits, logits, masks, mask_of)
    mask()
    name, size = f"{len(masked)} of {batch} x {vocab_size} {logits.dtype}", logits.nbytes // 2
    checks.add(f"mask_logits {name}", float((logits != want).float().mean()), 0.0, mask, size)
    for temperature, top_k in ((0.6, 0), (0.6, 20)):
        filters = (
            torch.full((batch,), temperature, device=checks.device),
            torch.full((batch,), top_k, dtype=torch.int32, device=checks.device),
            torch.ones(batch, device=checks.device),
            torch.zeros(batch, device=checks.device),
        )
        out = torch.full((batch,), -7, device=checks.device)
        rows = SamplingRows(*filters, seeds, positions)
        call = partial(kernels.sample, logits, rows, Part.REST, mask_of, out)
        expected = reference.sample(logits, rows, Part.REST, mask_of, out.clone())
        error = float((call() != expected).float().mean())
        checks.add(f"sample the rest, {name} top_k {top_k}", error, 0.02, call, size)


def check_faults(checks: Checks) -> None:
    """Rows that are not finite, or that exclude all tokens, at any position of a large vocabulary."""
    batch, vocab_size = 64, 151936
    for dtype, (name, (temperature, top_k, top_p, min_p)) in itertools.product((BF16, F32), FILTERS.items()):
        logits = checks.random(batch, vocab_size, dtype=F32).to(dtype)
        expected = torch.zeros(batch, dtype=torch.int64, device=checks.device)
        at = torch.randint(vocab_size, (batch,)).tolist()
        for row, token in enumerate(at):
            match row % 4:
                case 1:
                    logits[row, token] = float("nan")
                case 2:
                    logits[row, token] = float("inf")
                case 3:
                    logits[row] = float("-inf")
            expected[row] = (0, kernels.NOT_FINITE, kernels.NOT_FINITE, kernels.NOTHING_ALLOWED)[row % 4]
        filters = (
            torch.full((batch,), temperature, device=checks.device),
            torch.full((batch,), top_k, dtype=torch.int32, device=checks.device),
            torch.full((batch,), top_p, device=checks.device),
            torch.full((batch,), min_p, device=checks.device),
        )
        seeds = positions = torch.arange(batch, device=checks.device)
        found = kernels.sample(logits, SamplingRows(*filters, seeds, positions)).clamp(max=0)
        checks.add(f"faults in {batch} x {vocab_size} {dtype} {name}", float((found != expected).float().mean()), 0.0)


def check_distribution(checks: Checks) -> None:
    """Chi-square of many draws of a small vocabulary, sampled inside a CUDA graph whose inputs change between
    replays.
    """
    draws, logits = 1 << 17, torch.tensor([1.5, -0.5, 2.0, 0.0, 1.0, -2.0, 1.9, 0.3], device=checks.device)
    rows = logits.expand(draws, -1).contiguous()
    ones = torch.ones(draws, device=checks.device)
    arguments = (ones, torch.zeros_like(ones, dtype=torch.int32), ones.clone(), torch.zeros_like(ones))
    seeds, positions = (
        torch.arange(draws, device=checks.device),
        torch.zeros(draws, dtype=torch.int64, device=checks.device),
    )
    params = SamplingRows(*arguments, seeds, positions)
    kernels.sample(rows, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = kernels.sample(rows, params)
    expected = draws * logits.softmax(0)
    for position in range(3):
        positions.fill_(position)
        graph.replay()
        counts = chosen.bincount(minlength=8)
        checks.add(
            f"sample in a graph, position {position}: chi-square",
            float(((counts - expected) ** 2 / expected).sum()),
            30,
        )
    arguments[0].zero_()
    graph.replay()
    checks.add("sample in a graph, then greedy", float((chosen != 2).float().mean()), 0.0)
