"""The search for the highest request rate at which latencies hold."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.serving.client import Answer
from benchmarks.serving.flags import Target, TrafficFlags

WARM_UP = 1 / 3  # of the seconds that are measured; before them
PRECISION = 1.05  # between the highest rate that holds and the lowest that fails
MIN_PROMPTS = 20  # that are measured
GROWTH, NOISE = 1.25, 3.0  # by which requests in flight may grow; the second in standard deviations


@dataclass
class Run:
    """One pass over the prompts."""

    answers: list[Answer]
    duration: float
    client: dict[str, float]  # how busy we were ourselves
    engines: dict[str, Any]  # what the server says of its caches and engines


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a pass that is measured: requests sent in `seconds` after a warm-up; load goes on until its end."""

    rate: float
    seconds: float

    @property
    def length(self) -> float:
        """Seconds that are measured: more where too few requests would come."""
        return max(self.seconds, MIN_PROMPTS / self.rate)

    @property
    def begin(self) -> float:
        """Seconds after the start of the pass."""
        return self.length * WARM_UP

    @property
    def num_prompts(self) -> int:
        """Number of requests of the whole pass."""
        return math.ceil((self.begin + self.length) * self.rate)

    def measured(self, answers: Sequence[Answer], delays: Sequence[float]) -> list[Answer]:
        """Return the answers to requests that were to be sent in the window. `delays`: seconds after the start."""
        return [answer for answer, delay in zip(answers, delays, strict=True) if delay >= self.begin]

    def grows(self, answers: Sequence[Answer], delays: Sequence[float]) -> bool:
        """Return whether more and more requests are in flight: the server does not keep up, whatever the latencies are.

        Compares the means of the window's first and second half.
        """
        begins = np.sort(delays)
        ends = np.sort(
            [delay + answer.queue_time + answer.latency for answer, delay in zip(answers, delays, strict=True)]
        )
        times = np.linspace(self.begin, self.begin + self.length, 201)
        in_flight = np.searchsorted(begins, times, "right") - np.searchsorted(ends, times, "right")
        first, second = float(in_flight[:100].mean()), float(in_flight[101:].mean())
        return second > GROWTH * first + NOISE * math.sqrt(max(first, 1.0))


class RateSearch:
    """A bisection between no rate and the server's maximum."""

    def __init__(
        self,
        traffic: TrafficFlags,
        run_at: Callable[[float, int, int | None], Awaitable[tuple[Run, list[float]]]],
        measure: Callable[[Run], dict[str, Any]],
    ) -> None:
        """`run_at(rate, number, count)`: sends requests for probe `number`, and returns their times of sending, too."""
        self._seconds, self._run_at, self._measure = traffic.find_seconds, run_at, measure
        self._targets = [Target.parse(text) for text in traffic.find_max_rate]
        self._given = list(traffic.find_max_rate)
        self._probes: list[dict[str, Any]] = []
        self._low, self._high = 0.0, math.inf

    @property
    def best_rate(self) -> float | None:
        """The highest rate that holds; None: none does, or all do."""
        return self._low if 0 < self._low < math.inf else None

    async def run(self) -> dict[str, Any]:
        """Search. Returns the figures of the highest rate that holds."""
        holds, best = await self._probe(math.inf)
        self._low, self._high = (math.inf, math.inf) if holds else (0.0, best["request_throughput"])
        lowest = self._high / 64
        while self._high > lowest and self._high > self._low * PRECISION and best["completed"]:
            rate = (self._low + self._high) / 2
            holds, measured = await self._probe(rate)
            if holds:
                self._low, best = rate, measured
            else:
                self._high = rate
        return best

    async def _probe(self, rate: float) -> tuple[bool, dict[str, Any]]:
        """Return whether a rate holds, and its figures."""
        window = None if self._seconds is None or rate == math.inf else Window(rate, self._seconds)
        run, delays = await self._run_at(rate, len(self._probes), None if window is None else window.num_prompts)
        grows = window is not None and window.grows(run.answers, delays)
        if window is not None:
            run = replace(run, answers=window.measured(run.answers, delays), duration=window.length)
        found = {target.name: target.measured(run.answers) for target in self._targets}
        fit = all(found[each.name] <= each.limit_ms for each in self._targets)
        holds = fit and not grows and all(answer.ok for answer in run.answers)
        measured = self._measure(run)
        if measured["completed"]:
            shown = ", ".join(f"{each.name} {found[each.name]:.1f} of {each.limit_ms:g}" for each in self._targets)
            shown += ", more and more in flight" if grows else ""
            print(f"rate {rate:<8.4g} {'holds' if holds else 'fails'}   {shown}", flush=True)
        speeds = {name: measured[name] for name in ("request_throughput", "output_throughput")}
        self._probes.append({"rate": finite(rate), "holds": holds, "grows": grows, **speeds, **found})
        return holds, measured

    def found(self) -> dict[str, Any]:
        """Return the search for the result file."""
        return {"targets": self._given, "max_rate": finite(self._low), "probes": self._probes}

    def notes(self, num_prompts: int, best: dict[str, Any]) -> list[str]:
        """Return lines that say what was found. `num_prompts`: requests of the last probe."""
        if self._low == math.inf:
            return [f"The targets hold even with all {num_prompts} requests at once: try more --num-prompts."]
        if self._low:
            return [f"Highest request rate that holds (RPS): {self._low:.4g} (fails at {self._high:.4g})"]
        if best["completed"]:
            return [f"No rate holds: the targets fail even at {self._high:.3g} requests a second."]
        return []


def finite(rate: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if rate == math.inf else rate
