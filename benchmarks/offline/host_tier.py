"""The prefix cache's tier in host memory: what it costs where nothing comes back, and what it gains for conversations.

    python -m benchmarks.offline.host_tier qwen3-8b out/models --work evicting
    python -m benchmarks.offline.host_tier llama-3.1-8b out/models --work conversations --host-gib 48

Two engines in this process, one with the tier and one without, work by turns on random weights and equal tokens.
`evicting`: requests as nano-vllm's, always new ones, and a cache so small that it evicts all the time; tokens a second.
`conversations`: so many at once go on, each request repeats all turns before it; their contexts together are so many
times the cache. Turns a second, and the times to the first token. Before the clock each conversation has one turn.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import model_folder
from benchmarks.result_files import save
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.setup.machine import environment

TOP = 1000  # token ids of prompts are below
BLOCK = 16  # tokens
NAMES = ("without", "with")


def start(model: Path, args: argparse.Namespace, cache_tokens: int, host_gib: float) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, device=args.device,
            max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs, block_size=BLOCK,
            num_gpu_blocks_override=cache_tokens // BLOCK, kv_offloading_size=host_gib,
        )
    )  # fmt: skip


def request(name: str, prompt: list[int], num_output: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    return EngineRequest(name, prompt, sampling)


def evicting(engine: Engine, args: argparse.Namespace, seed: int) -> float:
    """Return tokens made in a second for requests that no engine has seen."""
    rng, total = random.Random(seed), 0
    for index in range(args.requests):
        prompt = [rng.randrange(1, TOP) for _ in range(rng.randint(args.least, args.most))]
        num_output = rng.randint(args.least, args.most)
        engine.add_request(request(str(index), prompt, num_output))
        total += num_output
    begin = time.perf_counter()
    while engine.has_work():
        engine.step()
    return total / (time.perf_counter() - begin)


@dataclass(slots=True)
class Conversation:
    """One of those at once. Those that end are followed by new ones, whose system prompt and turns are others'."""

    number: int
    num_turns: int  # until it ends
    tokens: list[int] = field(default_factory=list)
    ready: float = 0.0  # when the next turn begins
    sent: float = 0.0
    is_first_token: bool = True


class Conversations:
    """Conversations with one engine, from turn to turn. They stand at different turns from the start."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self._engine, self._args = engine, args
        self._numbers = itertools.count()
        self._rng = random.Random(3)
        self.times_to_first: list[float] = []
        self.num_turns = 0
        self._stopped = time.perf_counter()
        self._waiting = [self._new(next(self._numbers) % args.turns) for _ in range(args.conversations)]
        self._running: dict[str, Conversation] = {}
        self.run(float("inf"), args.conversations)

    def _new(self, num_done: int = 0) -> Conversation:
        """Return a conversation with so many turns behind it."""
        args = self._args
        tokens = [self._rng.randrange(1, TOP) for _ in range(num_done * (args.turn_tokens + args.answer_tokens))]
        return Conversation(next(self._numbers), args.turns - num_done, tokens)

    def run(self, seconds: float, most: float = float("inf")) -> float:
        """Go on for so many seconds, or turns. Returns turns a second. Turns that run then go on in the next call,
        as if no time had passed.
        """
        self.times_to_first, self.num_turns, begun = [], 0, 0
        begin = now = time.perf_counter()
        for conversation in (*self._waiting, *self._running.values()):
            conversation.sent += begin - self._stopped
            conversation.ready += begin - self._stopped
        while now < begin + seconds and self.num_turns < most:
            for conversation in [each for each in self._waiting if each.ready <= now and begun < most]:
                self._begin(conversation, now)
                begun += 1
            if self._engine.has_work():
                self._step()
            now = time.perf_counter()
        self._stopped = now
        return self.num_turns / (now - begin)

    def _begin(self, conversation: Conversation, now: float) -> None:
        self._waiting.remove(conversation)
        conversation.tokens += [self._rng.randrange(1, TOP) for _ in range(self._args.turn_tokens)]
        conversation.sent, conversation.is_first_token = now, True
        self._running[str(conversation.number)] = conversation
        self._engine.add_request(request(str(conversation.number), list(conversation.tokens), self._args.answer_tokens))

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            conversation = self._running[output.request_id]
            if output.new_token_ids and conversation.is_first_token:
                conversation.is_first_token = False
                self.times_to_first.append(now - conversation.sent)
            conversation.tokens += output.new_token_ids
            if output.finish_reason is not None:
                self._end(self._running.pop(output.request_id), now)

    def _end(self, conversation: Conversation, now: float) -> None:
        self.num_turns += 1
        conversation.num_turns -= 1
        if not conversation.num_turns:
            conversation = self._new()
        conversation.ready = now + (self._rng.expovariate(1 / self._args.thinking) if self._args.thinking else 0)
        self._waiting.append(conversation)


def measure_evicting(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    engines = [start(model, args, args.cache_tokens, gib) for gib in (0, args.host_gib)]
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(-1, args.rounds):  # the first one fills host memory
        for index in (0, 1) if turn % 2 else (1, 0):
            speed = evicting(engines[index], args, turn)
            if turn >= 0:
                found[NAMES[index]].append(speed)
    stats = engines[1].stats()
    for engine in engines:
        engine.close()
    ratio = statistics.median(found["with"]) / statistics.median(found["without"])
    for name, speeds in found.items():
        print(f"{name:8} the tier: {', '.join(f'{speed:,.0f}' for speed in speeds)} tokens/s")
    print(f"ratio of medians {ratio:.3f}; {stats.num_used_host_blocks:,} of {stats.num_host_blocks:,} slots in use")
    return {"tokens_per_second": found, "ratio": ratio, "external_hits": stats.external_hits}


def measure_conversations(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    mean = (args.turn_tokens + args.answer_tokens) * (args.turns + 1) // 2
    cache_tokens = args.conversations * mean // args.times
    print(f"contexts of {mean:,} tokens on average; a cache of {cache_tokens:,} tokens", flush=True)
    engines = [start(model, args, cache_tokens, gib) for gib in (0, args.host_gib)]
    runs = [Conversations(engine, args) for engine in engines]
    speeds: dict[str, list[float]] = {name: [] for name in NAMES}
    firsts: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(args.rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            speeds[NAMES[index]].append(runs[index].run(args.seconds / (2 * args.rounds)))
            firsts[NAMES[index]] += runs[index].times_to_first
    stats = engines[1].stats()
    for engine in engines:
        engine.close()
    medians = {name: statistics.median(times) for name, times in firsts.items()}
    for name in NAMES:
        shown = ", ".join(f"{speed:.2f}" for speed in speeds[name])
        print(
            f"{name:8} the tier: {shown} turns/s; first token after {medians[name]:.3f} s ({len(firsts[name])} turns)"
        )
    ratio = statistics.mean(speeds["with"]) / statistics.mean(speeds["without"])
    print(
        f"turns {ratio:.2f} times, first token {medians['with'] / medians['without']:.2f} times; "
        f"{stats.external_hits:,} tokens loaded; {stats.num_used_host_blocks:,} of {stats.num_host_blocks:,} slots"
    )
    return {"turns_per_second": speeds, "ratio": ratio, "median_time_to_first": medians, "cache_tokens": cache_tokens}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline.host_tier", description="An engine with a host tier beside one without."
    )
    parser.add_argument("shape", help="of benchmarks.model_shapes, or a folder with a config.json")
    parser.add_argument("folder", type=Path, help="where the model's config.json is written")
    parser.add_argument("--work", choices=("evicting", "conversations"), default="evicting")
    parser.add_argument("--host-gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--requests", type=int, default=96, help="of evicting")
    parser.add_argument("--least", type=int, default=100, help="tokens of a prompt and of an answer of evicting")
    parser.add_argument("--most", type=int, default=1024)
    parser.add_argument("--cache-tokens", type=int, default=49152, help="of evicting")
    parser.add_argument("--conversations", type=int, default=64, help="at once")
    parser.add_argument("--times", type=int, default=8, help="the conversations' contexts ÷ the cache")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-tokens", type=int, default=430)
    parser.add_argument("--answer-tokens", type=int, default=50)
    parser.add_argument("--thinking", type=float, default=0.0, help="mean seconds from an answer to the next turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="of conversations, both engines together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    model = model_folder(args.shape, args.folder)
    measure = measure_evicting if args.work == "evicting" else measure_conversations
    result = measure(model, args)
    if args.json:
        given = {name: value for name, value in vars(args).items() if name not in ("folder", "json")}
        save({**given, "results": result, "environment": environment()}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
