"""Attacks a server of its own on loopback and prints what held: `python -m tests.attack`, or `make attack`.

    python -m tests.attack                    everything, some ten minutes
    python -m tests.attack "100 MB" slow      attacks whose name contains one of these
    python -m tests.attack --json attack.json results as JSON, too

While an attack runs, again and again until enough is measured, another client asks for /health and for eight tokens, by
turns in a small body and in one of 20 KB, which is decoded in a thread. An attack is held when the server answered all
of it without an error of its own and without leaving a request hanging, /health took at most 0.25 s, the other client's
request at most three times what it takes alone, memory came back to within a fifth, and no block stayed in use. Of the
request both times are the 95th percentile; the one alone is taken while one core is busy, as it is with an attack's own
client. Before the first attack the KV cache was full once.

An attack that is not held for these two times alone is made once more, right after the time alone was taken anew: a
virtual machine has moments of its own. The table shows both figures, and the second one counts; so it does where it is
worse. It also shows for how long the host gave the machine's cores to others ("stolen") in that time.

Then the engine process is killed under load, for the time until requests are answered again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.result_files import save
from engine.setup.machine import environment
from tests.attack import images, imagined_web
from tests.attack.attacks import ATTACKS, HANGS, Attack
from tests.attack.bystander import Waits, busy_core, watching
from tests.attack.recovery import recovery
from tests.attack.target import Target, serving
from tests.support.served import ROOT

HEALTH_SECONDS = 0.25
SLOWER = 3.0  # times, that another client's request may take beside an attack
GROWTH = 1.2  # times, that memory may have grown after an attack
SETTLE_SECONDS = 15.0
ALONE_SECONDS = 8.0
LEAST_SECONDS = 8.0  # for which an attack is made: about a hundred requests of the other client
KEYS = {"attacker": "attacker-" + "k" * 32, "bystander": "bystander-" + "k" * 32}
HOSTILE_MODELS = "tests/models/test_hostile_folders.py"


@dataclass
class Result:
    """Effects of an attack on the server and to another client. Seconds, and bytes of memory."""

    name: str
    seconds: float
    statuses: dict[int, int]
    rounds: int  # how often it was made
    health: float  # the longest
    request: float  # the 95th percentile, as is `alone`
    request_median: float
    request_longest: float
    num_requests: int  # of the other client
    alone: float
    memory_before: int
    memory_after: int
    blocks_in_use: float
    stolen: float  # seconds of all cores together, while it was made
    first_slower: float | None  # `slower` when it was made for the first time, if it was made twice
    failures: list[str]

    @property
    def slower(self) -> float:
        """Time of another client's request over its time alone."""
        return self.request / self.alone

    @property
    def slow(self) -> list[str]:
        """Names of the times that are too long."""
        found = [f"/health {self.health:.2f} s"] if self.health > HEALTH_SECONDS else []
        return found + ([f"another's request {self.slower:.1f} times as long"] if self.slower > SLOWER else [])


async def attack(target: Target, each: Attack, alone: Waits) -> Result:
    before, stolen, start = target.resident_bytes(), _stolen(), time.perf_counter()
    statuses, rounds = Counter[int](), 0
    with watching(target) as waits:
        while not rounds or time.perf_counter() - start < LEAST_SECONDS:
            statuses += await each.run(target)
            rounds += 1
            if target.process.poll() is not None:
                break
    seconds, stolen = time.perf_counter() - start, _stolen() - stolen
    after, in_use = await asyncio.to_thread(_settled, target, int(before * GROWTH))
    result = Result(
        each.name, seconds, dict(sorted(statuses.items())), rounds, waits.longest_health, waits.slow_request,
        waits.median_request, waits.longest_request, len(waits.requests), alone.slow_request, before, after,
        in_use, stolen, None, [],
    )  # fmt: skip
    result.failures = list(_failures(result, each, statuses))
    return result


def _stolen() -> float:
    """Seconds for which the cores were ready to run and the host ran others on them, so far; 0 on a machine of its
    own.
    """
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


def _settled(target: Target, enough: int) -> tuple[int, float]:
    """Memory and use of the KV cache once both are down, or after some seconds."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        memory, in_use = target.resident_bytes(), target.metric("vllm:kv_cache_usage_perc")
        if (memory <= enough and not in_use) or time.monotonic() > deadline:
            return memory, in_use
        time.sleep(0.5)


def _failures(result: Result, each: Attack, statuses: Counter[int]) -> list[str]:
    found = []
    if errors := {status for status in statuses if status >= 500 and status != 503}:
        found.append(f"errors {sorted(errors)}")
    if each.refused and (served := {status for status in statuses if 200 <= status < 300}):
        found.append(f"served {sorted(served)}")
    if each.refused and HANGS in statuses:
        found.append(f"{statuses[HANGS]} left hanging")
    found += result.slow
    if result.memory_after > GROWTH * result.memory_before:
        found.append(f"memory {result.memory_after / result.memory_before:.2f} times as much")
    if result.blocks_in_use:
        found.append("blocks in use")
    return found


def hostile_models() -> str:
    """The table of hostile model folders, which needs no server; the last line of its tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HOSTILE_MODELS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    return lines[-1] if done.returncode == 0 else f"FAILED: {lines[-1]}"


async def run(attacks: list[Attack], console: Console) -> list[Result]:
    results = []
    for keyless, keys in ((False, KEYS), (True, {})):
        if wanted := [each for each in attacks if each.keyless == keyless and not each.images]:
            with serving("--kv-cache-memory-bytes", "64m", keys=keys) as target:
                results += await run_all(target, wanted, console)
    if wanted := [each for each in attacks if each.images]:
        with (
            tempfile.TemporaryDirectory(prefix="quire-attack-") as folder,
            serving(
                *images.FLAGS,
                keys=KEYS,
                model=images.make_model(Path(folder)),
                module=imagined_web.__name__,
                environment={imagined_web.PORTS: ",".join(map(str, images.PORTS))},
            ) as target,
        ):
            results += await run_all(target, wanted, console, length=900)
    return results


async def used(target: Target, length: int) -> None:
    """Takes what is the server's for good, once: all of the KV cache, what the first grammar needs, and, of a model
    that reads images, what their decoder, their encoder and both caches keep.
    """
    asked: list[dict[str, Any]] = [
        {"prompt": [10 + (number * 37 + i) % 240 for i in range(length)], "max_tokens": 1} for number in range(14)
    ]
    asked.append({"prompt": "a", "max_tokens": 8, "structured_outputs": {"json": {"type": "integer"}}})
    async with httpx.AsyncClient(base_url=target.url, headers=target.headers("bystander"), timeout=60) as client:
        for each in asked:
            (await client.post("/v1/completions", json=each)).raise_for_status()
        if "image" in (await client.get("/v1/models")).json()["data"][0].get("input_modalities", ()):
            await images.many_at_once(target)


async def _alone(target: Target) -> Waits:
    with busy_core(), watching(target) as alone:
        await asyncio.sleep(ALONE_SECONDS)
    return alone


async def run_all(target: Target, attacks: list[Attack], console: Console, length: int = 1900) -> list[Result]:
    """`length`: of the first prompts."""
    await used(target, length)
    with watching(target):
        await asyncio.sleep(ALONE_SECONDS / 2)  # the first requests warm up what start-up does not
    with watching(target) as idle:
        await asyncio.sleep(ALONE_SECONDS)
    alone = await _alone(target)
    for name, waits in (("nothing else running", idle), ("one core busy", alone)):
        console.print(
            f"alone, {name}: /health {waits.longest_health * 1e3:.0f} ms at most; {len(waits.requests)} requests, "
            f"median {waits.median_request * 1e3:.0f} ms, 95 % {waits.slow_request * 1e3:.0f} ms, "
            f"longest {waits.longest_request * 1e3:.0f} ms",
            highlight=False,
        )
    results = []
    for each in attacks:
        results.append(await attack(target, each, alone))
        if results[-1].failures and results[-1].failures == results[-1].slow and target.process.poll() is None:
            first = results.pop()
            console.print(f"{each.name}: {'; '.join(first.failures)}; once more", highlight=False)
            results.append(await attack(target, each, await _alone(target)))
            results[-1].first_slower = first.slower
        console.print(f"{each.name}: {'; '.join(results[-1].failures) or 'held'}", highlight=False)
        if target.process.poll() is not None:
            console.print("the server has ended")
            break
    return results


def table(results: list[Result]) -> Table:
    drawn = Table(
        "attack", "s", "stolen", "answers", "/health", "requests: median, 95 %, longest", "95 %", "memory", ""
    )
    for result in results:
        statuses = ", ".join(f"{count} x {status}" for status, count in result.statuses.items())
        memory = f"{result.memory_before >> 20} > {result.memory_after >> 20} MiB"
        times = (result.request_median, result.request, result.request_longest)
        wait = f"{result.num_requests}: {', '.join(f'{seconds * 1e3:.0f}' for seconds in times)} ms"
        slower = f"{result.slower:.1f}x"
        if result.first_slower is not None:
            slower = f"{result.first_slower:.1f}x, then {slower}"
        verdict = "; ".join(result.failures) or "held"
        drawn.add_row(
            result.name,
            f"{result.seconds:.1f}",
            f"{result.stolen:.1f} s",
            statuses,
            f"{result.health:.2f} s",
            wait,
            slower,
            memory,
            verdict,
        )
    return drawn


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="TEXT", help="attacks whose name contains one of these (else all)")
    parser.add_argument("--json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    attacks = [each for each in ATTACKS if not args.names or any(text in each.name for text in args.names)]
    with contextlib.suppress(ValueError):  # for 5,000 connections
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    console = Console(width=160)
    results = asyncio.run(run(attacks, console)) if attacks else []
    console.print(table(results))
    failed = sum(bool(result.failures) for result in results) + len(attacks) - len(results)
    held, recovered = len(attacks) - failed, None
    if not args.names and Path(ROOT, HOSTILE_MODELS).is_file():
        models = hostile_models()
        console.print(f"hostile model folders: {models}")
        failed += models.startswith("FAILED")
        recovered = recovery()
        console.print(str(recovered), highlight=False)
        failed += not recovered.is_held
    if args.json:
        found = [dataclasses.asdict(each) for each in results]
        recovery_found = dataclasses.asdict(recovered) if recovered is not None else None
        save({"results": found, "recovery": recovery_found, "environment": environment()}, args.json)
    console.print(f"{held} attacks held, {len(attacks) - held} not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
