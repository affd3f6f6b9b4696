"""From the times of answers to the figures of a serving benchmark.

The figures, their names and the printed labels are those of `vllm bench serve`. What is beyond it has names of its own.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.serving.client import Answer

METRICS = {  # name → (label, title)
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_COUNTS = {  # what is printed first: key → (label, format)
    "completed": ("Successful requests:", "d"),
    "failed": ("Failed requests:", "d"),
    "max_concurrency": ("Maximum request concurrency:", "d"),
    "configured_rate": ("Request rate configured (RPS):", ".2f"),
    "duration": ("Benchmark duration (s):", ".2f"),
    "total_input_tokens": ("Total input tokens:", "d"),
    "total_output_tokens": ("Total generated tokens:", "d"),
    "request_throughput": ("Request throughput (req/s):", ".2f"),
    "request_goodput": ("Request goodput (req/s):", ".2f"),
    "output_throughput": ("Output token throughput (tok/s):", ".2f"),
    "max_output_tokens_per_s": ("Peak output token throughput (tok/s):", ".2f"),
    "max_concurrent_requests": ("Peak concurrent requests:", ".2f"),
    "total_token_throughput": ("Total token throughput (tok/s):", ".2f"),
    "prefix_cache_hit_rate": ("Prefix cache hit rate:", ".4f"),
    "busiest_engine": ("Busiest engine over the mean:", ".3f"),
}
_SUMS = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "cached_input_tokens"}
# two-sided 95 % quantiles of Student's t, for 1, 2, … degrees of freedom
_T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
_T95 += [2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]


def t95(degrees: float) -> float:
    """The quantile that makes a 95 % confidence interval."""
    if degrees < 1:
        return math.inf
    return _T95[int(degrees) - 1] if degrees < len(_T95) + 1 else 1.96 + 2.46 / degrees


def confidence(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % confidence interval; None of a single value."""
    if len(values) < 2:
        return None
    return t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Report:
    """Choice of figures."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] | None = None  # ttft, tpot, e2el → most milliseconds of a good request


def samples_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Seconds: of each whole answer ttft, tpot (of two tokens and more) and e2el, of each event but the first itl."""
    whole = [answer for answer in answers if answer.ok]
    return {
        "ttft": [answer.ttft for answer in whole],
        "tpot": [tpot_of(answer) for answer in whole if answer.output_len > 1],
        "itl": [gap for answer in whole for gap in answer.itl],
        "e2el": [answer.latency for answer in whole],
    }


def tpot_of(answer: Answer) -> float:
    return (answer.latency - answer.ttft) / (answer.output_len - 1) if answer.output_len > 1 else 0.0


def measure(answers: Sequence[Answer], duration: float, report: Report) -> dict[str, Any]:
    """The figures by the keys of vLLM's result file. `duration`: seconds from the first request to the last answer."""
    whole = [answer for answer in answers if answer.ok]
    num_input, num_output = sum(a.prompt_len for a in whole), sum(a.output_len for a in whole)
    good = sum(is_good(answer, report.goodput) for answer in whole) if report.goodput else 0
    peak_tokens, peak_requests = peaks(whole)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(whole) / duration,
        "request_goodput": good / duration if report.goodput else None,
        "input_throughput": num_input / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "cached_input_tokens": sum(answer.num_cached for answer in whole),
        "failures": dict(Counter(answer.cause for answer in answers if not answer.ok)),
    }
    samples = samples_of(answers)
    for name in report.metrics:
        result |= summarize(name, samples[name], report.percentiles)
    return result


def summarize(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles in milliseconds; zeros when there is nothing to summarize."""
    values = np.asarray(seconds if len(seconds) else [0.0]) * 1e3
    result = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return result | {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Does the answer keep all limits, which are in milliseconds?"""
    own = {"ttft": answer.ttft, "tpot": tpot_of(answer), "e2el": answer.latency}
    return all(own[name] * 1e3 <= limit for name, limit in limits.items())


def peaks(whole: Sequence[Answer]) -> tuple[float, int]:
    """The most tokens in one second (counted from the first request on), and the most requests at the same time."""
    if not whole:
        return 0.0, 0
    start = min(answer.start for answer in whole)
    tokens = np.zeros(int(max(answer.times[-1] for answer in whole) - start) + 1)
    for answer in whole:
        seconds = (np.asarray(answer.times) - start).astype(int)
        np.add.at(tokens, seconds, answer.output_len / len(answer.times))
    changes = sorted([(a.start, 1) for a in whole] + [(a.times[-1], -1) for a in whole])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return float(tokens.max()), most


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """Lists with an entry for each request, for `--save-detailed`."""
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [answer.output_len if answer.ok else 0 for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itl for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.start for answer in answers],
        "queue_times": [answer.queue_time for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def merge(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge runs: means of figures, sums of counts and durations, `confidence` with 95 % intervals, `runs`."""
    if len(runs) == 1:
        return dict(runs[0])
    merged: dict[str, Any] = {}
    intervals = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if key in _SUMS:
            merged[key] = sum(values)
        elif key == "failures":
            merged[key] = dict(sum((Counter(value) for value in values), Counter()))
        elif isinstance(first, (int, float)) and not isinstance(first, bool):
            merged[key] = statistics.fmean(values)
            intervals[key] = confidence(values)
        else:
            merged[key] = first
    return {**merged, "num_runs": len(runs), "confidence_95": intervals, "runs": list(runs)}


def table(result: Mapping[str, Any], report: Report) -> str:
    """The printed report, as vLLM's; with ± after the figures of several runs."""
    return "\n".join(_lines(result, report))


def _lines(result: Mapping[str, Any], report: Report) -> Iterator[str]:
    intervals = result.get("confidence_95", {})

    def line(label: str, key: str, form: str = ".2f") -> str:
        shown = f"{result[key]:{form}}"
        if intervals.get(key) is not None:
            shown += f" ± {intervals[key]:.2f}"
        return f"{label:<40} {shown:<10}"

    yield f"{' Serving Benchmark Result ':=^50}"
    for key, (label, form) in _COUNTS.items():
        if result.get(key) is not None:
            yield line(label, key, form)
    for name in report.metrics if result["completed"] else ():
        label, title = METRICS[name]
        yield f"{title:-^50}"
        yield line(f"Mean {label} (ms):", f"mean_{name}_ms")
        yield line(f"Median {label} (ms):", f"median_{name}_ms")
        for p in report.percentiles:
            yield line(f"P{p:g} {label} (ms):", f"p{p:g}_{name}_ms")
    if result["failures"]:
        yield f"{'Failed requests by cause':-^50}"
        for cause, count in sorted(result["failures"].items(), key=lambda item: -item[1]):
            yield f"{cause + ':':<40} {count:<10}"
    yield "=" * 50
