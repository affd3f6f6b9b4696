"""Time without answers after the engine process was killed under load: `python -m tests.attack.recovery`.

    python -m tests.attack.recovery             three kills
    python -m tests.attack.recovery --kills 10

Each kill meets a server of its own: of one that is lost again and again, each restart waits longer. Held when requests
are answered again at most two seconds later than a start of the server takes, and each request that was in the server
is answered, or told why not: only one whose answer had begun may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.attack.target import Answer, Target, serving

ROOM_SECONDS = 2.0
NUM_CLIENTS = 32
NUM_RUNNING = 16  # of their requests; the others wait
LOAD_SECONDS = 2.0  # before a kill
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}).encode()


@dataclass
class Recovery:
    """Effects of the kills."""

    start_seconds: float  # of the server, until it was ready
    seconds: list[float] = field(default_factory=list)  # from each kill to the first answer
    statuses: dict[int, int] = field(default_factory=dict)  # of the requests that were in the server at a kill

    @property
    def is_held(self) -> bool:
        in_time = max(self.seconds) <= self.start_seconds + ROOM_SECONDS
        few_failed = self.statuses.get(500, 0) <= NUM_RUNNING * len(self.seconds)
        return in_time and few_failed and self.statuses.keys() <= {200, 500}

    def __str__(self) -> str:
        answers = ", ".join(f"{count} x {status}" for status, count in self.statuses.items())
        return (
            f"kill -9 of the engine under load: start-up {self.start_seconds:.1f} s, from the kill to the next answer "
            f"{', '.join(f'{seconds:.1f}' for seconds in self.seconds)} s; requests that were there: {answers}; "
            f"{'held' if self.is_held else 'not held'}"
        )


def recovery(num_kills: int = 3) -> Recovery:
    """Measure servers of their own, of whose requests only some run at a time."""
    found, statuses = Recovery(0.0), Counter[int]()
    for _ in range(num_kills):
        with serving("--kv-cache-memory-bytes", "64m", "--max-num-seqs", str(NUM_RUNNING)) as target:
            found.start_seconds = max(found.start_seconds, target.start_seconds)
            seconds, answers = asyncio.run(_killed(target))
        found.seconds.append(seconds)
        statuses += Counter(answer.status for answer in answers)
    found.statuses = dict(sorted(statuses.items()))
    return found


async def _killed(target: Target) -> tuple[float, list[Answer]]:
    """Kill the engine under load. Returns the seconds until the next answer, and those to requests that were there."""
    load = Load(target, BODY)
    clients = [asyncio.create_task(load.ask()) for _ in range(NUM_CLIENTS)]
    await asyncio.sleep(LOAD_SECONDS)
    killed = time.monotonic()
    os.kill(target.engine_pid(), signal.SIGKILL)
    while not load.answered_since(killed):
        await asyncio.sleep(0.02)
    load.runs = False
    await asyncio.gather(*clients)
    return min(load.answered_since(killed)) - killed, load.asked_before(killed)


class Load:
    """Clients that ask one request after another."""

    def __init__(self, target: Target, body: bytes) -> None:
        self.runs, self._target, self._body = True, target, body
        self.answers: list[tuple[float, float, Answer]] = []  # begin, end

    async def ask(self) -> None:
        """One client."""
        while self.runs:
            begin = time.monotonic()
            answer = await self._target.post("/v1/completions", self._body)
            self.answers.append((begin, time.monotonic(), answer))
            if answer.status != 200:
                await asyncio.sleep(0.1)

    def answered_since(self, moment: float) -> list[float]:
        """When."""
        return [end for _, end, answer in self.answers if end > moment and answer.status == 200]

    def asked_before(self, moment: float) -> list[Answer]:
        """The answers to the requests that were in the server at that moment."""
        return [answer for begin, end, answer in self.answers if begin <= moment < end]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=3)
    found = recovery(parser.parse_args(argv).kills)
    print(found)
    return not found.is_held


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
