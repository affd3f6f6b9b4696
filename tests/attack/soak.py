"""Twenty minutes under clients of all kinds, with a fault each minute: what failed, what leaked, how memory went.

    python -m tests.attack.soak                                   20 minutes, 64 clients
    python -m tests.attack.soak --minutes 5 --clients 16 --json soak.json --plot soak.png

Faults: the engine process is killed, stopped, raises an exception, runs out of memory, gives NaN; the disk fills, the
clock jumps, the tokenizer panics. A request may fail only while a fault or the recovery from it lasts, and must be told
why; what fails at any other time is unexplained. At the end nothing may be left: no block, row, request, connection or
descriptor.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.result_files import save
from engine.setup.machine import environment
from tests.attack.clients import FAILED, KINDS, Client, Outcome, run_once
from tests.attack.faults import FOLDER, arm
from tests.attack.target import Target, serving
from tests.support.served import blocks_in_use

WATCHDOG_SECONDS = 8
SAMPLE_SECONDS = 2.0
AFTERMATH_SECONDS = 5.0  # after the server is ready again, for what clients still hear of the fault


@dataclass
class Fault:
    """One fault, from its injection until the server answered again. Seconds since the soak began."""

    name: str
    begin: float
    end: float = float("inf")
    failed: int = 0  # requests that heard of it


@dataclass
class Record:
    """All that the soak saw. Seconds since it began; bytes."""

    seconds: float = 0.0
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)  # kind of client → how many requests went how
    faults: list[Fault] = field(default_factory=list)
    failures: list[tuple[float, float, str, str]] = field(default_factory=list)  # begin, end, kind, reason
    # Time, resident bytes of the API process and of the engine process, descriptors of both.
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    unexplained: list[tuple[float, float, str, str]] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)  # what remained in the end


def _signal(number: int) -> Callable[[Target, Path], None]:
    return lambda target, _: os.kill(target.engine_pid(), number)


def _armed(name: str) -> Callable[[Target, Path], None]:
    return lambda _, folder: arm(folder, name)


FAULTS: tuple[tuple[str, Callable[[Target, Path], None]], ...] = (
    ("kill -9", _signal(signal.SIGKILL)),
    ("exception", _armed("exception")),
    ("out of memory", _armed("memory")),
    ("NaN", _armed("nan")),
    ("SIGSTOP", _signal(signal.SIGSTOP)),
    ("clock jump", _armed("clock")),
    ("tokenizer panic", _armed("panic")),
    ("full disk", _armed("disk")),
)


class Soak:
    """Runs the clients and the faults against one server."""

    def __init__(self, target: Target, folder: Path, minutes: float, num_clients: int, every: float, seed: int) -> None:
        """`folder`: where faults are armed; `every`: seconds from one to the next."""
        self._target, self._folder, self._num_clients = target, folder, num_clients
        self._every, self._seed = every, seed
        self._begin = time.monotonic()
        self._deadline = self._begin + minutes * 60
        self.record = Record(outcomes={kind.__name__: {} for kind in KINDS})

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    @property
    def _running(self) -> bool:
        return time.monotonic() < self._deadline

    async def run(self) -> Record:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._target.url, timeout=120, limits=limits) as http:
            clients = [self._client(http, index) for index in range(self._num_clients)]
            await asyncio.gather(self._inject(http), self._sample(), *clients)
        record = self.record
        record.seconds = self._now
        for begin, end, kind, reason in record.failures:
            fault = next((f for f in record.faults if begin <= f.end + AFTERMATH_SECONDS and end >= f.begin), None)
            if fault is None:
                record.unexplained.append((begin, end, kind, reason))
            else:
                fault.failed += 1
        return record

    async def _client(self, http: httpx.AsyncClient, index: int) -> None:
        client = Client(http, random.Random(self._seed + index))
        while self._running:
            kind, begin = client.random.choice(KINDS), self._now
            outcome: Outcome = await run_once(client, kind)
            counts = self.record.outcomes[kind.__name__]
            counts[outcome.how] = counts.get(outcome.how, 0) + 1
            if outcome.how == FAILED:
                self.record.failures.append((begin, self._now, kind.__name__, outcome.reason))
                await asyncio.sleep(0.2)
            else:
                await asyncio.sleep(client.random.random() * 0.2)

    async def _inject(self, http: httpx.AsyncClient) -> None:
        """One fault after another; the last one leaves time to recover."""
        for name, inject in itertools.cycle(FAULTS):
            await asyncio.sleep(min(self._every, max(self._deadline - time.monotonic(), 0)))
            if time.monotonic() > self._deadline - self._every:
                return
            fault = Fault(name, self._now)
            self.record.faults.append(fault)
            inject(self._target, self._folder)
            print(f"{fault.begin:6.0f} s  {name}", flush=True)
            await asyncio.sleep(WATCHDOG_SECONDS + 2 if name == "SIGSTOP" else 2)
            fault.end = await self._answered(http)

    async def _answered(self, http: httpx.AsyncClient) -> float:
        """When the server has generated again."""
        body = {"prompt": "Once", "max_tokens": 2}
        while self._running:
            try:
                if (await http.post("/v1/completions", json=body)).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
        return self._now

    async def _sample(self) -> None:
        while self._running:
            memory = await asyncio.to_thread(self._target.resident_by_process)
            self.record.samples.append((self._now, *memory, self._target.open_files()))
            await asyncio.sleep(SAMPLE_SECONDS)


def what_is_left(target: Target, files_before: int) -> dict[str, float]:
    """Leaks: figures that must be zero once the clients have gone."""
    in_use = blocks_in_use(target.url, 60)
    load = httpx.get(f"{target.url}/load", timeout=60).json()
    time.sleep(8)  # connections that clients kept open have ended by then
    return {
        "blocks in use": in_use,
        "requests running": load["num_requests_running"],
        "requests waiting": load["num_requests_waiting"],
        "requests in the API process": load["server_load"],
        "descriptors": max(target.open_files() - files_before, 0),
    }


def plot(record: Record, path: str) -> None:
    """Memory of each process, and descriptors, over time, with the faults."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    figure, (memory, files) = pyplot.subplots(2, figsize=(10, 5), sharex=True, height_ratios=(3, 1))
    times, api, engine, descriptors = zip(*record.samples, strict=True)
    minutes = [at / 60 for at in times]
    memory.plot(minutes, [each / 2**20 for each in engine], color="#0072B2", label="engine process")
    memory.plot(minutes, [each / 2**20 for each in api], color="#009E73", label="API process")
    files.plot(minutes, descriptors, color="#D55E00")
    for fault in record.faults:
        for axes in (memory, files):
            axes.axvspan(fault.begin / 60, min(fault.end, record.seconds) / 60, color="#999999", alpha=0.3, linewidth=0)
        top = memory.get_xaxis_transform()
        memory.text(fault.begin / 60, 1.02, fault.name, rotation=45, va="bottom", fontsize=7, transform=top)
    memory.set(ylabel="resident MiB", ylim=(0, None), xlim=(0, record.seconds / 60))
    memory.legend(loc="lower right")
    files.set(xlabel="minutes", ylabel="descriptors", ylim=(0, None))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def report(record: Record) -> None:
    total: Counter[str] = sum(map(Counter, record.outcomes.values()), Counter())
    print(f"{sum(total.values())} requests in {record.seconds / 60:.1f} minutes: {dict(total)}")
    for fault in record.faults:
        print(
            f"  {fault.name}: {fault.failed} requests failed, {fault.end - fault.begin:.1f} s until it answered again"
        )
    print(f"left in the end: {record.left}")
    for begin, end, kind, reason in record.unexplained[:20]:
        print(f"UNEXPLAINED {begin:.1f} to {end:.1f} s, {kind}: {reason}")
    print(f"{len(record.unexplained)} unexplained errors")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--every", type=float, default=60, metavar="SECONDS", help="from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="where to save what was seen")
    parser.add_argument("--plot", metavar="FILE", help="picture of memory and descriptors")
    args = parser.parse_args(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install -e ".[plot]"')
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as name:
        folder = Path(name)
        flags: list[Any] = ["--engine-watchdog-timeout", WATCHDOG_SECONDS, "--kv-cache-memory-bytes", "64m"]
        flags += ["--prefix-cache-file", folder / "cache", "--served-model-name", "demo"]
        with serving(*map(str, flags), module="tests.attack.faults", environment={FOLDER: name}) as target:
            files_before = target.open_files()
            record = asyncio.run(Soak(target, folder, args.minutes, args.clients, args.every, args.seed).run())
            record.left = what_is_left(target, files_before)
    report(record)
    if args.json:
        save({**asdict(record), "environment": environment()}, args.json)
    if args.plot:
        plot(record, args.plot)
    return 1 if record.unexplained or any(record.left.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
