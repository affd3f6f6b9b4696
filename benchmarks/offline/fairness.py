"""What one client's flood costs another in a real engine, in this process, beside first come, first served.

    python -m benchmarks.offline.fairness --model configs/demo
    python -m benchmarks.offline.fairness --model llama-3.1-8b --load-format dummy

The clients are those of `benchmarks.micro.fairness`, and so is the table. First come, first served is the same with one
owner for both; it is measured first, when the engine has never seen two.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.micro.fairness import FLOODER, FLOODS, OTHER, Flood
from benchmarks.model_shapes import model_folder
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, flag, load


@dataclass(frozen=True)
class FairnessFlags:
    """Fairness."""

    seconds: int = flag(15, "of each measurement", at_least=2)


class Run:
    """A flood, or none, and a client that asks for 8 tokens once a second."""

    def __init__(self, engine: Engine, flood: Flood | None, fair: bool, seconds: int) -> None:
        """`fair`: the two are different owners."""
        self._engine, self._flood, self._fair, self._seconds = engine, flood, fair, seconds
        self._dice = random.Random(0)
        self._num_requests = 0
        self._flooding: set[str] = set()
        self._sent: dict[str, float] = {}
        self.latencies: list[float] = []
        self.tokens_per_second = 0.0

    def run(self) -> Run:
        engine, next_second, start = self._engine, 1.0, perf_counter()
        before = engine.stats()
        while (now := perf_counter() - start) < self._seconds:
            self._refill()
            if now >= next_second:
                self._sent[self._add(OTHER, 20, 8)] = next_second
                next_second += 1 + self._dice.random() / 10
            for output in engine.step().outputs if engine.has_work() else ():
                if output.finish_reason is not None:
                    self._flooding.discard(output.request_id)
                    if sent := self._sent.pop(output.request_id, 0.0):
                        self.latencies.append(perf_counter() - start - sent)
        after, seconds = engine.stats(), perf_counter() - start
        num_tokens = after.prompt_tokens + after.generation_tokens - before.prompt_tokens - before.generation_tokens
        self.tokens_per_second = num_tokens / seconds
        self.latencies += [seconds - sent for sent in self._sent.values()]  # they have waited so long by now
        for request_id in (*self._flooding, *self._sent):
            engine.abort(request_id)
        while engine.has_work():
            engine.step()
        return self

    def _refill(self) -> None:
        flood = self._flood
        if flood is None or len(self._flooding) > 100 * flood.n:
            return
        for _ in range(200):
            answer = flood.answer(self._dice)
            prompt = self._prompt(flood.prompt)
            self._flooding.update(self._add(FLOODER, 0, answer, prompt) for _ in range(flood.n))

    def _add(self, owner: str, num_prompt: int, num_answer: int, prompt: list[int] | None = None) -> str:
        self._num_requests += 1
        request_id = f"{owner} {self._num_requests}"
        sampling = SamplingParams(max_tokens=num_answer, ignore_eos=True)
        prompt = prompt or self._prompt(num_prompt)
        self._engine.add_request(EngineRequest(request_id, prompt, sampling, owner=owner if self._fair else ""))
        return request_id

    def _prompt(self, length: int) -> list[int]:
        return [self._dice.randrange(300, 3000) for _ in range(length)]

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.latencies, n=20, method="inclusive")[-1]


def measure(engine: Engine, seconds: int) -> None:
    for flood in (FLOODS[0], None):
        Run(engine, flood, False, 3).run()  # warm-up
    alone = Run(engine, None, False, seconds).run()
    print(f"alone: median {statistics.median(alone.latencies) * 1e3:.1f} ms, p95 {alone.p95 * 1e3:.1f} ms", flush=True)
    runs = {(flood.name, fair): Run(engine, flood, fair, seconds).run() for fair in (False, True) for flood in FLOODS}
    for flood in FLOODS:
        fcfs, fair = runs[flood.name, False], runs[flood.name, True]
        print(
            f"{flood.name:20} p95 {fair.p95 * 1e3:7.1f} ms, {fair.p95 / alone.p95:4.1f}× alone "
            f"(first come, first served {fcfs.p95:6.2f} s); {fair.tokens_per_second:9,.0f} tokens/s of "
            f"{fcfs.tokens_per_second:9,.0f}: {fair.tokens_per_second / fcfs.tokens_per_second:6.1%}",
            flush=True,
        )


def main(argv: list[str]) -> None:
    parser = Parser(prog="fairness", description=__doc__)
    add_flags(parser, FairnessFlags, EngineConfig)
    try:
        flags, config = load(parser.parse_args(argv), FairnessFlags, EngineConfig)
        with tempfile.TemporaryDirectory() as folder:
            config = dataclasses.replace(config, model=str(model_folder(config.model, Path(folder))))
            engine = Engine(config)
            print(engine.summary(), flush=True)
            measure(engine, flags.seconds)
            engine.close()
    except ConfigError as error:
        sys.exit(f"fairness: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
