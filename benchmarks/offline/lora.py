"""Speed with LoRA adapters beside that without, in this process, on random weights.

    python -m benchmarks.offline.lora qwen3-8b out/models --rank 16 --json out/lora.json

Rows: the model without LoRA; with `enable_lora` and no adapter in use; with one adapter for all requests; with several,
each for a part of them. Columns: tokens a second of one request, of eight and of 256, and their ratio to the first row.
With --registered, so many further adapters are offered at the same time. Then, with --late-rank, how long another
adapter took to load while 64 requests ran, and their longest steps. `--choice` sets fields of `kernels.cuda.choice` for
the linear layers with adapters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import model_folder
from benchmarks.random_adapters import write_adapter
from benchmarks.result_files import save
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.models.lora import CONFIG, WEIGHTS
from engine.offline.llm import LLM
from engine.processing.adapters import LoRARequest, find_adapter
from engine.setup.machine import environment

NUM_REQUESTS = (1, 8, 256)
PROMPT, ANSWER = 128, 128
ROWS = {"no adapter in use": 0, "one adapter": 1, "8 adapters": 8, "32 adapters": 32, "64 adapters": 64}


def new_adapter(folder: Path, model: Path, rank: int, seed: int) -> LoRARequest:
    write_adapter(folder, model, rank, seed)
    return LoRARequest(folder.name, seed + 1, str(folder))


def register(llm: LLM, folder: Path, like: LoRARequest, count: int) -> None:
    """Load `count` adapters one after the other, as a server does that offers them. They share one file of weights."""
    for index in range(count):
        own = folder / f"registered {index}"
        own.mkdir()
        config = json.loads((Path(like.lora_path) / CONFIG).read_text())
        (own / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": own.name}))
        (own / WEIGHTS).hardlink_to(Path(like.lora_path) / WEIGHTS)
        found = find_adapter(own.name, str(own))
        if reason := llm._engine.load_adapter(found.name, found.path, found.version).result():
            raise SystemExit(reason)


def tokens_per_second(llm: LLM, count: int, adapters: list[LoRARequest | None], runs: int = 2) -> float:
    """Return the best of several runs of `count` requests, without the time of their prompts."""
    prompts: Any = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(PROMPT)]} for i in range(count)]
    given = [adapters[i % len(adapters)] for i in range(count)]
    seconds = []
    for answer in (1, ANSWER):
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        times = []
        for _ in range(runs + 1):
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False, lora_request=given)
            times.append(time.perf_counter() - start)
        seconds.append(min(times[1:]))
    return count * (ANSWER - 1) / (seconds[1] - seconds[0])


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "device": args.device, "max_model_len": 1024,
        "enable_prefix_caching": False, "max_num_seqs": 256,
    }  # fmt: skip
    num_adapters = max(map(ROWS.__getitem__, args.rows))
    with tempfile.TemporaryDirectory() as temporary:
        requests = [new_adapter(Path(temporary) / f"a{i}", model, args.rank, i) for i in range(num_adapters)]
        served = {"enable_lora": True, "max_loras": args.max_loras or max(num_adapters, 32), "max_lora_rank": args.rank}
        with_lora: dict[str, Any] = {name: requests[: ROWS[name]] or [None] for name in args.rows}
        parts: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {"without LoRA": [None]}), (served, with_lora)]
        for options, rows in parts:
            llm = LLM(str(model), **settings, **options)
            if options and args.registered:
                register(llm, Path(temporary), requests[0], args.registered)
            for name, adapters in rows.items():
                found[name] = {count: tokens_per_second(llm, count, list(adapters)) for count in args.requests}
                shown = ", ".join(f"{count}: {speed:,.0f} tokens/s" for count, speed in found[name].items())
                ratios = [found[name][count] / found["without LoRA"][count] for count in args.requests]
                print(f"{name:18} {shown}  ({', '.join(f'{ratio:.3f}' for ratio in ratios)})", flush=True)
            llm.close()
        if args.late_rank:
            late = new_adapter(Path(temporary) / "late", model, args.late_rank, num_adapters)
            llm = LLM(str(model), **settings, enable_lora=True, max_loras=2, max_lora_rank=args.late_rank)
            found["loading"] = loading(llm, requests[:1], late)
            print(found["loading"])
            llm.close()
    return found


def loading(llm: LLM, running: list[LoRARequest], late: LoRARequest) -> dict[str, float]:
    """Return how long an adapter takes until its first token while 64 requests run, and the longest steps."""
    engine = llm._engine
    sampling = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True, detokenize=False)
    adapter = find_adapter(running[0].lora_name, running[0].lora_path)
    for index in range(64):
        engine.add_request(EngineRequest(f"stream {index}", [index + 1] * PROMPT, sampling, adapter=adapter))
    times: list[float] = []
    for _ in range(100):
        engine.step()
        times.append(time.perf_counter())
    usual = max(after - before for before, after in pairwise(times[20:]))
    engine.add_request(EngineRequest("new", [5] * 4, sampling, adapter=adapter))  # whose adapter is there
    times = [time.perf_counter()]
    for _ in range(4):
        engine.step()
        times.append(time.perf_counter())
    with_new = max(after - before for before, after in pairwise(times))
    sent = time.perf_counter()
    added = find_adapter(late.lora_name, late.lora_path)
    engine.add_request(EngineRequest("late", [5] * 4, sampling, adapter=added))
    times, first = [time.perf_counter()], 0.0
    while not first and len(times) < 500:
        outputs = engine.step()
        times.append(time.perf_counter())
        if any(output.request_id == "late" for output in outputs):
            first = times[-1] - sent
    longest = max(after - before for before, after in pairwise(times))
    for index in range(64):
        engine.abort(f"stream {index}")
    engine.abort("new")
    engine.abort("late")
    while engine.has_work():
        engine.step()
    return {
        "seconds_to_first_token": first,
        "longest_step_before": usual,
        "longest_step_with_new_request": with_new,
        "longest_step_while_loading": longest,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline.lora", description="Speed with LoRA adapters beside that without."
    )
    parser.add_argument("shape", help="of benchmarks.model_shapes")
    parser.add_argument("folder", type=Path, help="where the model's config.json is written")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--late-rank", type=int, help="of an adapter that is loaded under load")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["no adapter in use", "one adapter", "32 adapters"])
    parser.add_argument("--requests", nargs="+", type=int, default=NUM_REQUESTS)
    parser.add_argument("--registered", type=int, help="adapters that are loaded first, beside those in use")
    parser.add_argument("--max-loras", type=int, help="slots (default: as many as adapters, at least 32)")
    parser.add_argument("--choice", nargs="+", metavar="NAME=VALUE", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    if args.choice:
        from kernels.cuda import lora  # needs Triton
        from kernels.cuda.choice import CHOICE

        chosen = {name: json.loads(value) for name, value in (each.split("=") for each in args.choice)}
        vars(lora)["CHOICE"] = replace(CHOICE, **chosen)
    result = measure(model_folder(args.shape, args.folder), args)
    if args.json:
        given = {"shape": args.shape, "rank": args.rank, "late_rank": args.late_rank, "choice": args.choice}
        save({**given, "results": result, "environment": environment()}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
