"""Another client, in a process of its own so that an attack's own work does not slow it: how long it waits.

    python -m tests.attack.bystander PORT [KEY]

Asks for /health and for eight tokens, by turns in a small body and in one of 20 KB, each in a thread, until its
standard input closes; then prints the seconds of each as JSON. A request that fails counts as infinitely long.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.attack.target import Target
from tests.support.served import ROOT

# By turns a small body, and one that is too large for the event loop.
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, "temperature": 0}).encode()
LARGE_BODY = BODY + b" " * 20_000
PATIENCE = 120.0
PAUSE_SECONDS = 0.05


@dataclass
class Waits:
    """Seconds that another client waited, filled when the watch ends."""

    health: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)

    @property
    def longest_health(self) -> float:
        return max(self.health, default=math.inf)

    @property
    def median_request(self) -> float:
        return statistics.median(self.requests) if self.requests else math.inf

    @property
    def slow_request(self) -> float:
        """The 95th percentile; of few, the longest."""
        return sorted(self.requests)[int(0.95 * len(self.requests))] if self.requests else math.inf

    @property
    def longest_request(self) -> float:
        return max(self.requests, default=math.inf)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """One core is busy while the block runs, as it is with an attack's own client."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def watching(target: Target) -> Iterator[Waits]:
    """Another client while the block runs."""
    command = [sys.executable, "-m", "tests.attack.bystander", str(target.port), target.keys.get("bystander", "")]
    waits = Waits()
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield waits
        finally:
            measured = json.loads(process.communicate(timeout=2 * PATIENCE)[0])
            waits.health, waits.requests = measured["health"], measured["requests"]


def _ask(port: int, key: str, method: str, path: str, body: bytes | None) -> float:
    start = time.perf_counter()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request(method, path, body, headers | ({"Authorization": f"Bearer {key}"} if key else {}))
        response = connection.getresponse()
        response.read()
        connection.close()
    except OSError:
        return math.inf
    return time.perf_counter() - start if response.status == 200 else math.inf


def main(port: int, key: str) -> None:
    done = threading.Event()
    seconds: dict[str, list[float]] = {"health": [], "requests": []}

    def repeat(name: str, method: str, path: str, *bodies: bytes | None) -> None:
        for body in itertools.cycle(bodies):
            if done.is_set():
                return
            seconds[name].append(_ask(port, key, method, path, body))
            done.wait(PAUSE_SECONDS)

    jobs: list[tuple[str, str, str, *tuple[bytes | None, ...]]] = [
        ("health", "GET", "/health", None),
        ("requests", "POST", "/v1/completions", BODY, LARGE_BODY),
    ]
    threads = [threading.Thread(target=repeat, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    print("watching", flush=True)
    sys.stdin.read()
    done.set()
    for thread in threads:
        thread.join()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
