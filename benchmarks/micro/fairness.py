"""What one client's flood costs another, simulated: the real scheduler, and steps that take the time a device would take.

    python -m benchmarks.micro.fairness

One client floods: 200 requests for 4 answers each, or 200 long prompts, again and again. Another sends a request for 8
tokens each second. First come, first served is the same with one owner for both. Nothing here depends on the machine
that it runs on; `benchmarks.serving.fairness` asks a real server.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.core.batch import SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler

SECONDS, BLOCK_SIZE = 60, 16
FLOODER, OTHER = "flooder", "other"


@dataclass(frozen=True)
class Device:
    """How long steps take, in seconds, as measured, and the engine's defaults there.

    A GPU reads the weights while it computes few tokens; a CPU does both one after the other.
    """

    name: str
    step: float  # a step of one token
    prefill_step: float  # at least, with a prompt in it, which runs without a CUDA graph
    token: float  # for each token
    decode: float  # and for each request that computes one token
    max_num_seqs: int
    max_num_batched_tokens: int
    is_cpu: bool = False  # the engine's loop is not ahead: launching a step takes as long as the step
    num_blocks: int = 100_000
    server: float = 6e-3  # seconds of a request outside of the engine

    def seconds(self, output: SchedulerOutput) -> float:
        batch = output.batch
        step = self.step if batch.num_decodes == len(batch) else self.prefill_step
        tokens = self.token * batch.total_num_tokens
        return self.decode * batch.num_decodes + (step + tokens if self.is_cpu else max(step, tokens))


DEVICES = (
    Device("bundled model, CPU", 1e-3, 1e-3, 66e-6, 78e-6, 256, 2048, is_cpu=True),
    Device("the same, fewer rows", 1e-3, 1e-3, 66e-6, 78e-6, 64, 512, is_cpu=True),
    Device("Llama of 100M, CPU", 6e-3, 6e-3, 450e-6, 220e-6, 256, 2048, is_cpu=True),
    Device("Qwen3 0.6B, H200", 0.9e-3, 2.5e-3, 2.4e-6, 14e-6, 1024, 8192),
    Device("Llama 3.1 8B, H200", 4.4e-3, 6e-3, 23.6e-6, 32e-6, 1024, 8192),
)


@dataclass(frozen=True)
class Flood:
    name: str
    n: int  # answers to each prompt
    prompt: int  # tokens
    answer: Callable[[random.Random], int]  # tokens


FLOODS = (
    Flood("200 × n=4", 4, 32, lambda dice: dice.choice([8, 32, 128, 512])),
    Flood("200 long prompts", 1, 1800, lambda dice: dice.choice([8, 64])),
)


class Simulation:
    """A flood, or none, and a client that asks once a second."""

    def __init__(self, device: Device, flood: Flood | None, fair: bool, seconds: int = SECONDS) -> None:
        """`fair`: the two are different owners."""
        self.device, self._flood, self._fair, self._end = device, flood, fair, seconds
        self.scheduler = Scheduler(
            device.num_blocks, BLOCK_SIZE, device.max_num_seqs, device.max_num_batched_tokens, 2048,
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
        """As the engine runs: one step ahead where steps run beside it, so that a request meets the step after the next."""
        in_flight = None
        while self._now < self._end:
            self._refill()
            while self._arrivals and self._arrivals[0] <= self._now:
                arrival = self._arrivals.pop(0)
                self._sent[self._add(OTHER, 20, 8, arrival)] = arrival
            launched = self.scheduler.schedule() or None
            if launched and self.device.is_cpu:
                in_flight, launched = launched, None
            if in_flight is not None:
                self._now += self.device.seconds(in_flight)
                self._read(in_flight)
            elif launched is None:
                self._now = self._arrivals[0] if self._arrivals else self._end
            in_flight = launched
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
        engine_request = EngineRequest(request_id, prompt, sampling, owner=owner if self._fair else "", arrival=arrival)
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


def rows() -> Iterator[str]:
    yield f"{'device':28}{'flood':20}{'alone':>9}{'fair':>9}{'':>7}{'fcfs':>9}{'fcfs tokens/s':>15}{'fair':>8}"
    for device in DEVICES:
        alone = Simulation(device, None, fair=True).run()
        for flood in FLOODS:
            fair, fcfs = (Simulation(device, flood, fair=each).run() for each in (True, False))
            yield (
                f"{device.name:28}{flood.name:20}{alone.p95 * 1e3:6.0f} ms{fair.p95 * 1e3:6.0f} ms"
                f"{fair.p95 / alone.p95:6.1f}×{fcfs.p95:7.1f} s{fcfs.num_tokens / SECONDS:15,.0f}"
                f"{fair.num_tokens / fcfs.num_tokens:8.1%}"
            )


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
