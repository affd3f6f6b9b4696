"""Simulation of one client's flood beside another client: the real scheduler, steps that take a device's time.

One client floods: 200 requests for 4 answers each, or 200 long prompts, again and again, perhaps each with another
user's name. Another sends a request for 8 tokens each second. First come, first served is the same with one owner for
both. `benchmarks.serving.fairness` asks a real server.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.batch import SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.fairness.tenants import SEPARATOR
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler

NUM_BLOCKS, BLOCK_SIZE = 100_000, 16
FLOODER, OTHER = "flooder", "other"


@dataclass(frozen=True)
class Device:
    """Seconds of a CPU's steps, as measured. Launching a step takes as long as the step, so the loop is not ahead."""

    step: float
    token: float  # for each token
    decode: float  # for each request that computes one token
    max_num_seqs: int
    max_num_batched_tokens: int
    server: float  # seconds of a request outside of the engine

    def seconds(self, output: SchedulerOutput) -> float:
        batch = output.batch
        return self.step + self.token * batch.total_num_tokens + self.decode * batch.num_decodes


# The bundled model on two cores, with few rows.
CPU = Device(1e-3, 66e-6, 78e-6, max_num_seqs=64, max_num_batched_tokens=512, server=6e-3)


@dataclass(frozen=True)
class Flood:
    name: str
    n: int  # answers to each prompt
    prompt: int  # tokens
    answer: Callable[[random.Random], int]  # tokens
    num_names: int = 1  # of users that the client invents


FLOODS = (
    Flood("200 × n=4", 4, 32, lambda dice: dice.choice([8, 32, 128, 512])),
    Flood("200 long prompts", 1, 1800, lambda dice: dice.choice([8, 64])),
    Flood("200 names", 4, 32, lambda dice: dice.choice([8, 32, 128, 512]), num_names=200),
)


class Simulation:
    """A flood, or none, and a client that asks once a second."""

    def __init__(self, device: Device, flood: Flood | None, fair: bool, seconds: int) -> None:
        """`fair`: the two are different owners."""
        self.device, self._flood, self._fair, self._end = device, flood, fair, seconds
        self.scheduler = Scheduler(
            NUM_BLOCKS, BLOCK_SIZE, device.max_num_seqs, device.max_num_batched_tokens, 2048,
            clock=lambda: self._now,
        )  # fmt: skip
        self._dice = random.Random(0)
        self._now = 0.0
        self._num_requests = self._num_flooding = 0
        self._sent: dict[str, float] = {}
        self._arrivals = [i + self._dice.random() / 10 for i in range(seconds)]
        self.latencies: list[float] = []  # seconds, of the requests of the client that asks seldom
        self.num_tokens = 0  # of prompts and answers, of both

    def run(self) -> Simulation:
        """Run until the time is over."""
        while self._now < self._end:
            self._refill()
            while self._arrivals and self._arrivals[0] <= self._now:
                arrival = self._arrivals.pop(0)
                self._sent[self._add(OTHER, 20, 8, arrival)] = arrival
            if output := self.scheduler.schedule():
                self._now += self.device.seconds(output)
                self._read(output)
            else:
                self._now = self._arrivals[0] if self._arrivals else self._end
        return self

    def _refill(self) -> None:
        flood = self._flood
        if flood is None or self._num_flooding > 100 * flood.n:
            return
        for _ in range(200):
            answer = flood.answer(self._dice)
            for _ in range(flood.n):
                self._add(FLOODER, flood.prompt, answer)
                self._num_flooding += 1

    def _add(self, owner: str, num_prompt: int, num_answer: int, arrival: float = 0.0) -> str:
        self._num_requests += 1
        request_id = f"{owner} {self._num_requests}"
        prompt = [self._dice.randrange(1 << 30) for _ in range(num_prompt)]
        sampling = SamplingParams(max_tokens=num_answer, ignore_eos=True)
        tenant = owner if self._fair else ""
        if tenant == FLOODER and self._flood is not None and self._flood.num_names > 1:
            tenant += f"{SEPARATOR}user {self._num_requests % self._flood.num_names}"
        engine_request = EngineRequest(request_id, prompt, sampling, tenant=tenant, arrival=arrival)
        self.scheduler.add(Request(engine_request, frozenset(), 0))
        return request_id

    def _read(self, output: SchedulerOutput) -> None:
        batch = output.batch
        self.num_tokens += batch.total_num_tokens
        num_sampled = [int(i not in batch.partial) for i in range(len(batch))]
        for given in self.scheduler.update(output, StepResult([1] * sum(num_sampled), num_sampled)).outputs:
            if given.finish_reason is None:
                continue
            if given.request_id.startswith(FLOODER):
                self._num_flooding -= 1
            else:
                self.latencies.append(self._now - self._sent.pop(given.request_id) + self.device.server)

    @property
    def p95(self) -> float:
        """Requests that were not answered in time count as long as they have waited so far."""
        waited = [self._end - sent for sent in self._sent.values()]
        return statistics.quantiles(self.latencies + waited, n=20)[-1]
