"""Measure one client's flood beside another client at a real server, and first come, first served.

    python -m benchmarks.serving.fairness                                   the bundled model, four minutes
    python -m benchmarks.serving.fairness --model smollm2-135m --load-format dummy --save-result fairness.json

It starts a server with two keys. One key floods: 200 requests for 4 answers each, or 200 long prompts, and another as
soon as one has ended. The other asks for 8 tokens once a second. First come, first served is the same with one key for
both. Rounds alternate between the two, so that what else the machine does is the same for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.model_shapes import SHAPES, add_tokenizer, model_folder
from benchmarks.processes import free_port, last_line, process_group, wait_until_ready
from benchmarks.result_files import save
from benchmarks.serving.client import Client, Failure
from engine.core.fairness.arrivals import AWAY_SECONDS
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, flag, load
from engine.setup.machine import environment

NUM_FLOODING = 200
FLOOD_SECONDS = 3.0  # before it is measured
KEYS = {"flooder": "flooder-" + "k" * 32, "other": "other-" + "k" * 32}


@dataclass(frozen=True)
class FairnessFlags:
    """Fairness."""

    model: str = flag("configs/demo", f"folder of a model, or a shape: {', '.join(SHAPES)}", metavar="NAME_OR_PATH")
    load_format: str = flag("auto", "`dummy`: random weights", choices=("auto", "dummy"))
    seconds: int = flag(20, "of each measurement", at_least=2)
    rounds: int = flag(2, "of all measurements", at_least=1)
    prompt_len: int = flag(1500, "tokens of a long prompt", at_least=1)
    save_result: str | None = flag(None, "where to save the figures as JSON", metavar="FILE")


def _crowd(dice: random.Random, flags: FairnessFlags) -> dict[str, Any]:
    return {"prompt": _tokens(dice, 32), "n": 4, "max_tokens": dice.choice([8, 32, 128, 512])}


def _long(dice: random.Random, flags: FairnessFlags) -> dict[str, Any]:
    return {"prompt": _tokens(dice, flags.prompt_len), "max_tokens": dice.choice([8, 64])}


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(300, 1000) for _ in range(count)]


FLOODS: dict[str, Callable[[random.Random, FairnessFlags], dict[str, Any]]] = {
    "200 × n=4": _crowd,
    "200 long prompts": _long,
}


@dataclass
class Measured:
    """Figures of all rounds."""

    latencies: list[float] = field(default_factory=list)  # seconds, of the client that asks seldom
    tokens_per_second: list[float] = field(default_factory=list)  # of prompts and answers of both, in each round

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.latencies, n=20, method="inclusive")[-1]


class Run:
    """A flood, or none, and a client that asks once a second."""

    def __init__(self, flags: FairnessFlags, url: str, flood: str | None, fair: bool) -> None:
        """`fair`: the two have different keys."""
        self._flags, self._flood, self._fair = flags, flood, fair
        self._dice = random.Random(0)
        self._other = self._client(url, "other")
        self._flooder = self._client(url, "flooder" if fair else "other")

    @staticmethod
    def _client(url: str, key: str) -> Client:
        return Client(url, timeout=600, headers={"Authorization": f"Bearer {KEYS[key]}"})

    async def run(self, into: Measured) -> None:
        flooding = [asyncio.create_task(self._keep_flooding()) for _ in range(NUM_FLOODING if self._flood else 0)]
        await asyncio.sleep(FLOOD_SECONDS if self._fair else AWAY_SECONDS + 1)  # until only one key is known
        begin, num_before = perf_counter(), await self._num_tokens()
        asking = []
        for _ in range(self._flags.seconds):
            asking.append((perf_counter(), asyncio.create_task(self._ask())))
            await asyncio.sleep(1)
        into.tokens_per_second.append((await self._num_tokens() - num_before) / (perf_counter() - begin))
        await asyncio.wait([task for _, task in asking], timeout=2)
        end = perf_counter()
        for sent, task in asking:
            is_answered = task.done() and not task.cancelled() and task.exception() is None
            into.latencies.append(task.result() if is_answered else end - sent)  # so long it has waited by now
        tasks = [*flooding, *(task for _, task in asking)]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._other.close()
        await self._flooder.close()
        await asyncio.sleep(2)  # until the server has ended what is left of the flood

    async def _keep_flooding(self) -> None:
        assert self._flood is not None
        while True:
            body = FLOODS[self._flood](self._dice, self._flags) | {"ignore_eos": True}
            await self._flooder.json("POST", "/v1/completions", body)

    async def _ask(self) -> float:
        start = perf_counter()
        body = {"prompt": _tokens(self._dice, 20), "max_tokens": 8, "ignore_eos": True}
        await self._other.json("POST", "/v1/completions", body)
        return perf_counter() - start

    async def _num_tokens(self) -> float:
        """Tokens of prompts and answers that the server has computed by now."""
        text = (await self._other.fetch("GET", "/metrics")).decode()
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


async def measure(flags: FairnessFlags, url: str) -> dict[tuple[str, bool], Measured]:
    """For each flood, fair or not; and for none, as ("", True)."""
    found = {(flood, fair): Measured() for flood in FLOODS for fair in (False, True)} | {("", True): Measured()}
    await Run(dataclasses.replace(flags, seconds=3), url, None, fair=True).run(Measured())  # warm-up
    for _ in range(flags.rounds):
        for (flood, fair), measured in found.items():
            await Run(flags, url, flood or None, fair).run(measured)
            print(".", end="", flush=True)
    print()
    return found


@contextlib.contextmanager
def _server(flags: FairnessFlags, folder: Path) -> Iterator[str]:
    model = model_folder(flags.model, folder)
    if flags.model in SHAPES:
        add_tokenizer(model)
    keys, log, port = folder / "keys", folder / "log", free_port()
    keys.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    options = ["--host", "127.0.0.1", "--port", str(port), "--load-format", flags.load_format]
    command = [sys.executable, "-m", "quire", "serve", str(model), *options, "--api-key-file", str(keys)]
    with process_group(command, "quire", log) as process:
        if not wait_until_ready(process, port, time.time() + 600):
            raise ConfigError(f"the server does not start: {last_line(log)}")
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def rows(found: dict[tuple[str, bool], Measured]) -> Iterator[dict[str, Any]]:
    alone = found["", True].p95
    for flood in FLOODS:
        fair, fcfs = found[flood, True], found[flood, False]
        speed, before = (statistics.fmean(each.tokens_per_second) for each in (fair, fcfs))
        yield {
            "flood": flood,
            "alone_p95_ms": alone * 1e3,
            "fair_p95_ms": fair.p95 * 1e3,
            "times_alone": fair.p95 / alone,
            "first_come_p95_ms": fcfs.p95 * 1e3,
            "tokens_per_second": speed,
            "first_come_tokens_per_second": before,
            "throughput": speed / before,
        }


def table(found: dict[tuple[str, bool], Measured]) -> str:
    lines = [
        "| flood | alone, p95 | beside it | first come, first served | tokens/s | first come, first served |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows(found):
        lines.append(
            f"| {row['flood']} | {row['alone_p95_ms']:.0f} ms "
            f"| {row['fair_p95_ms']:.0f} ms, {row['times_alone']:.1f} × "
            f"| {row['first_come_p95_ms'] / 1e3:.1f} s | {row['tokens_per_second']:,.0f}, {row['throughput']:.1%} "
            f"| {row['first_come_tokens_per_second']:,.0f} |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = Parser(prog="fairness", description=__doc__)
    add_flags(parser, FairnessFlags)
    try:
        (flags,) = load(parser.parse_args(argv), FairnessFlags)
        with tempfile.TemporaryDirectory() as folder, _server(flags, Path(folder)) as url:
            found = asyncio.run(measure(flags, url))
    except (ConfigError, Failure) as error:
        sys.exit(f"fairness: {error}")
    print(table(found))
    if flags.save_result is not None:
        runs = [{"flood": flood, "fair": fair, **dataclasses.asdict(each)} for (flood, fair), each in found.items()]
        save(
            {
                "settings": dataclasses.asdict(flags),
                "environment": environment(),
                "rows": list(rows(found)),
                "runs": runs,
            },
            flags.save_result,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
