"""Simulate how `engine.replicas.routing` uses the caches of many replicas: no model, no clock.

    python -m benchmarks.micro.routing                                    4, 16 and 64 replicas
    python -m benchmarks.micro.routing --replicas 1000 --requests 100     a gibibyte of memory, some minutes

--output-json saves the figures, which `quire bench plot` draws.

Conversations begin all the time, each with one of some system prompts; each turn repeats all of the conversation before
it. A replica computes prompts one after the other and generates for all its requests at once, the slower the more there
are; it forgets as an LRU cache does. Figures: the share of prompt tokens found in a cache, beside that of one cache as
large as all together (the most there is to find); the busiest replica's work over the mean; and the seconds to the
first token, beside those of random and of round-robin routing.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, quantiles

from benchmarks.result_files import save
from engine.replicas.routing import CHUNK_TOKENS, Router

PREFILL = 40_000.0  # tokens a second of one replica
STEP = 0.008, 0.00005  # seconds of a decode step, and for each request in it
CAPACITY = 400_000  # tokens that a replica's cache holds
CONVERSATIONS = 24  # at once, for each replica
TURNS = 8
SYSTEM_PROMPTS, SYSTEM_TOKENS = 6, 2_000
TURN_TOKENS, ANSWER_TOKENS = (20, 800), (50, 600)
THINKING = 8.0  # mean seconds between an answer and the next turn


@dataclass(slots=True)
class Conversation:
    number: int
    tokens: array[int]
    turns: int = TURNS


@dataclass(slots=True)
class Replica:
    """A cache, and the work that is done."""

    capacity: int
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0  # when it has computed the prompts that it has
    running: int = 0
    work: float = 0.0

    def hits(self, names: Sequence[int]) -> int:
        found = 0
        for name in names:
            if name not in self.known:
                break
            found += 1
        return found * CHUNK_TOKENS

    def keep(self, names: Sequence[int]) -> None:
        for name in reversed(names):
            self.known[name] = None
            self.known.move_to_end(name)
        while len(self.known) > self.capacity // CHUNK_TOKENS:
            self.known.popitem(last=False)


def _random_tokens(draw: random.Random, count: int) -> array[int]:
    return array("H", draw.randbytes(2 * count))


def _names(tokens: array[int]) -> list[int]:
    """Names of the full chunks."""
    names, name = [], 0
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        name = hash((name, tokens[start : start + CHUNK_TOKENS].tobytes()))
        names.append(name)
    return names


Choose = Callable[[str, Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one simulation."""

    hit_rate: float  # of prompt tokens
    imbalance: float  # the work of the busiest replica over the mean
    first_token_p50: float  # seconds
    first_token_p95: float


def simulate(
    num_replicas: int, num_requests: int, choose: Choose, ended: Callable[[str, int], None], *, joint: bool = False
) -> Outcome:
    """`joint`: one replica of all their speed and cache."""
    draw = random.Random(1)
    factor = num_replicas if joint else 1
    replicas = [Replica(CAPACITY * factor) for _ in range(1 if joint else num_replicas)]
    systems = [_random_tokens(draw, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    numbers, order = itertools.count(), itertools.count()

    def begin() -> Conversation:
        weights = [1 / (1 + i) for i in range(SYSTEM_PROMPTS)]
        return Conversation(next(numbers), draw.choices(systems, weights)[0][:])

    events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(order), what))

    hits = total = done = 0
    waits: list[float] = []

    def ask(conversation: Conversation, now: float) -> None:
        nonlocal hits, total, done
        conversation.tokens += _random_tokens(draw, draw.randint(*TURN_TOKENS))
        request_id, done = f"{conversation.number}-{conversation.turns}", done + 1
        replica = replicas[0 if joint else choose(request_id, conversation.tokens)]
        names, length = _names(conversation.tokens), len(conversation.tokens)
        found = min(replica.hits(names), length - 1)
        hits, total = hits + found, total + length
        replica.keep(names)
        seconds = (length - found) / (PREFILL * factor)
        replica.free_at = max(replica.free_at, now) + seconds
        replica.running += 1
        waits.append(replica.free_at - now)
        num_answer = draw.randint(*ANSWER_TOKENS)
        step = STEP[0] + STEP[1] * replica.running / factor
        replica.work += seconds + num_answer * STEP[1]
        at(
            replica.free_at + num_answer * step,
            lambda then: answered(conversation, replica, request_id, num_answer, then),
        )

    def answered(conversation: Conversation, replica: Replica, request_id: str, num_answer: int, now: float) -> None:
        replica.running -= 1
        ended(request_id, num_answer)
        conversation.tokens += _random_tokens(draw, num_answer)
        replica.keep(_names(conversation.tokens))
        conversation.turns -= 1
        following = conversation if conversation.turns else begin()
        if done < num_requests:
            at(now + draw.expovariate(1 / THINKING), lambda then: ask(following, then))

    for conversation in [begin() for _ in range(CONVERSATIONS * num_replicas)]:
        at(draw.uniform(0, 60.0), functools.partial(ask, conversation))
    while events:
        time, _, what = heapq.heappop(events)
        what(time)
    work = [replica.work for replica in replicas]
    return Outcome(hits / total, max(work) / fmean(work), quantiles(waits, n=2)[0], quantiles(waits, n=20)[-1])


def compare(num_replicas: int, num_requests: int) -> dict[str, Outcome]:
    """Every way to route, and the joint cache."""
    router = Router(num_replicas, CAPACITY)
    everyone = range(num_replicas)
    turns = itertools.count()
    luck = random.Random(2)
    ways: dict[str, Choose] = {
        "by prefix and load": lambda request_id, tokens: router.choose(request_id, tokens, "", everyone),
        "round robin": lambda request_id, tokens: next(turns) % num_replicas,
        "random": lambda request_id, tokens: luck.randrange(num_replicas),
    }
    found = {
        name: simulate(num_replicas, num_requests, choose, router.end if name.startswith("by") else lambda *end: None)
        for name, choose in ways.items()
    }
    return {**found, "one cache": simulate(num_replicas, num_requests, lambda *end: 0, lambda *end: None, joint=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64], metavar="N")
    parser.add_argument("--requests", type=int, default=600, help="for each replica")
    parser.add_argument("--output-json", metavar="FILE")
    args = parser.parse_args()
    runs = []
    for num_replicas in args.replicas:
        print(f"{num_replicas} replicas")
        for name, outcome in compare(num_replicas, args.requests * num_replicas).items():
            runs.append({"replicas": num_replicas, "way": name, **asdict(outcome)})
            print(
                f"  {name:20s} hits {outcome.hit_rate:.3f}  busiest {outcome.imbalance:.2f} x mean"
                f"  first token {outcome.first_token_p50 * 1e3:.0f} ms, p95 {outcome.first_token_p95 * 1e3:.0f} ms",
                flush=True,
            )
    if args.output_json:
        save({"benchmark": "routing", "requests_per_replica": args.requests, "runs": runs}, args.output_json)


if __name__ == "__main__":
    main()
