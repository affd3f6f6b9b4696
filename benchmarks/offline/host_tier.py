"""The prefix cache's tiers: what they cost where nothing comes back, and what they gain for conversations and restarts.

    python -m benchmarks.offline.host_tier qwen3-8b out/models --work evicting
    python -m benchmarks.offline.host_tier llama-3.1-8b out/models --work conversations --host-gib 48
    python -m benchmarks.offline.host_tier llama-3.1-8b out/models --work conversations --engines with,vllm
    python -m benchmarks.offline.host_tier llama-3.1-8b out/models --work restart --max-model-len 32768

Engines on random weights, with the host tier and without, work by turns on equal tokens. `evicting`: requests as
nano-vllm's, always new ones, and a cache so small that it evicts all the time; tokens a second. `conversations`: so
many at once go on, each request repeats all turns before it; their contexts together are so many times the cache. Turns
a second, and the times to the first token. Before the clock each conversation has one turn. `vllm` is vLLM with its own
offload to as much host memory, in its own process. `restart`: prompts are computed, saved in the prefix cache's file
and asked again after a restart, with a cache that holds one of them: times to the first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import model_folder
from benchmarks.offline.conversations import TOP, Conversations
from benchmarks.offline.stepped import BLOCK, Quire, Stepped, Vllm
from benchmarks.result_files import save
from engine.setup.machine import environment

NAMES = ("without", "with")
QUIET_SECONDS = 3.0
WARM_UP = [TOP] * 64
RATIOS = (("with", "without"), ("with", "vllm"))


def start(model: Path, args: argparse.Namespace, cache_tokens: int, host_gib: float, **more: Any) -> Quire:
    return Quire(
        model, device=args.device, max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs,
        num_gpu_blocks_override=cache_tokens // BLOCK, kv_offloading_size=host_gib, **more,
    )  # fmt: skip


def start_named(name: str, model: Path, args: argparse.Namespace, cache_tokens: int) -> Stepped:
    """`name`: of `--engines`."""
    if name == "vllm":
        return Vllm(
            model, cache_tokens=cache_tokens, host_gib=args.host_gib, max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
        )  # fmt: skip
    return start(model, args, cache_tokens, {"without": 0.0, "with": args.host_gib}[name])


def evicting(engine: Stepped, args: argparse.Namespace, seed: int) -> float:
    """Return tokens made in a second for requests that no engine has seen."""
    rng, total = random.Random(seed), 0
    for index in range(args.requests):
        prompt = [rng.randrange(1, TOP) for _ in range(rng.randint(args.least, args.most))]
        num_output = rng.randint(args.least, args.most)
        engine.add(str(index), prompt, num_output)
        total += num_output
    begin = time.perf_counter()
    while engine.has_work():
        list(engine.step())
    return total / (time.perf_counter() - begin)


def measure_evicting(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    engines = [start(model, args, args.cache_tokens, gib) for gib in (0, args.host_gib)]
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(-1, args.rounds):  # the first one fills host memory
        for index in (0, 1) if turn % 2 else (1, 0):
            speed = evicting(engines[index], args, turn)
            if turn >= 0:
                found[NAMES[index]].append(speed)
    stats = engines[1].engine.stats()
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
    names = sorted(args.engines.split(","), reverse=True)  # vLLM wants a GPU to itself while it starts
    engines = {name: start_named(name, model, args, cache_tokens) for name in names}
    runs = {name: Conversations(engine, args) for name, engine in engines.items()}
    speeds: dict[str, list[float]] = {name: [] for name in names}
    firsts: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names[:: -1 if turn % 2 else 1]:
            speeds[name].append(runs[name].run(args.seconds / (len(names) * args.rounds)))
            firsts[name] += runs[name].times_to_first
    for name, engine in engines.items():
        if isinstance(engine, Quire) and name == "with":
            stats = engine.engine.stats()
            used = f"{stats.num_used_host_blocks:,} of {stats.num_host_blocks:,} slots"
            print(f"{name}: {stats.external_hits:,} tokens loaded; {used}")
        engine.close()
    medians = {name: statistics.median(times) for name, times in firsts.items()}
    for name in names:
        shown = ", ".join(f"{speed:.2f}" for speed in speeds[name])
        print(f"{name:8} {shown} turns/s; first token after {medians[name]:.3f} s ({len(firsts[name])} turns)")
    ratios = {}
    for name, other in RATIOS:
        if name in speeds and other in speeds:
            ratio = ratios[f"{name} / {other}"] = statistics.mean(speeds[name]) / statistics.mean(speeds[other])
            print(f"{name} / {other}: turns {ratio:.2f}, first token {medians[name] / medians[other]:.2f}")
    return {
        "turns_per_second": speeds, "ratios": ratios, "median_time_to_first": medians, "cache_tokens": cache_tokens,
    }  # fmt: skip


def measure_restart(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    rng, path = random.Random(7), args.prefix_file.absolute()
    prompts = [[rng.randrange(1, TOP) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
    cache_tokens = args.prompt_tokens + args.max_num_seqs * BLOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    engine = start(model, args, cache_tokens, args.host_gib, prefix_cache_file=str(path))
    computed = _first_tokens(engine, prompts)
    _wait_for_file(engine)
    num_saved = engine.engine.stats().num_file_blocks
    engine.close()
    begin = time.perf_counter()
    engine = start(model, args, cache_tokens, args.host_gib, prefix_cache_file=str(path))
    starting = time.perf_counter() - begin
    again = _first_tokens(engine, prompts)
    stats = engine.engine.stats()
    engine.close()
    path.unlink()
    share = stats.prefix_hits / sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in (WARM_UP, *prompts))
    for name, times in (("computed", computed), ("after a restart", again)):
        print(f"{name:16} first tokens after {', '.join(f'{seconds:.3f}' for seconds in times)} s")
    print(
        f"{share:.1%} of the prompts' tokens were found, {stats.external_hits:,} read when they were asked for; "
        f"{num_saved:,} blocks in the file before it was closed; the second start took {starting:.1f} s"
    )
    return {"computed": computed, "again": again, "share_found": share, "start": starting}


def _first_tokens(engine: Quire, prompts: list[list[int]]) -> list[float]:
    """Return the seconds to the first token of each prompt, one after the other; a short one comes before the clock."""
    found = []
    for index, prompt in enumerate((WARM_UP, *prompts)):
        begin = time.perf_counter()
        engine.add(str(index), prompt, 1)
        while engine.has_work():
            list(engine.step())
        found.append(time.perf_counter() - begin)
    return found[1:]


def _wait_for_file(engine: Quire) -> None:
    """Let an idle engine save until nothing more is written."""
    before, since = -1, time.perf_counter()
    while time.perf_counter() < since + QUIET_SECONDS:
        engine.engine.idle()
        if (now := engine.engine.stats().num_file_blocks) != before:
            before, since = now, time.perf_counter()


WORK = {"evicting": measure_evicting, "conversations": measure_conversations, "restart": measure_restart}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline.host_tier", description="Engines with tiers below the KV cache and without."
    )
    parser.add_argument("shape", help="of benchmarks.model_shapes, or a folder with a config.json")
    parser.add_argument("folder", type=Path, help="where the model's config.json is written")
    parser.add_argument("--work", choices=tuple(WORK), default="evicting")
    parser.add_argument("--engines", default="without,with", help="of conversations: without, with, vllm")
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
    parser.add_argument("--seconds", type=float, default=60.0, help="of conversations, all engines together")
    parser.add_argument("--prompt-tokens", type=int, default=30000, help="of restart")
    parser.add_argument("--prompts", type=int, default=2, help="of restart")
    parser.add_argument("--prefix-file", type=Path, default=Path("out/prefixes.kv"), help="of restart; removed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    model = model_folder(args.shape, args.folder)
    result = WORK[args.work](model, args)
    if args.json:
        given = {name: value for name, value in vars(args).items() if name not in ("folder", "json", "prefix_file")}
        save({**given, "results": result, "environment": environment()}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
