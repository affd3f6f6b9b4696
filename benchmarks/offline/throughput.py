"""Offline throughput: all requests given at once, tokens a second until the last is done."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import workloads
from benchmarks.result_files import save
from benchmarks.workloads import Request
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, flag, load

if TYPE_CHECKING:
    from engine.processing.input_processor import InputProcessor

EPILOG = """examples:
  quire bench throughput --model configs/demo --input-len 64 --output-len 64 --num-prompts 64
  quire bench throughput --model ./qwen3-0.6b --load-format dummy --dataset-name nano --max-model-len 4096
  quire bench throughput --model ./my-model --dataset-path prompts.jsonl

A dataset is a text file with one prompt on each line, or .jsonl with {"prompt": "...", "output_len": 128} lines.
The figures are of the median run; answers always have their full length (ignore_eos).
"""


@dataclass(frozen=True)
class WorkloadFlags:
    """Workload."""

    dataset_name: str = flag(
        "random",
        "random: --input-len and --output-len; nano: both from 100 to 1024 (nano-vllm's published benchmark); "
        "or one of " + ", ".join(name for name in workloads.NAMED if name != "nano"),
        choices=("random", *workloads.NAMED),
        metavar="NAME",
    )
    dataset_path: str | None = flag(None, "file with prompts, instead", metavar="FILE")
    num_prompts: int | None = flag(
        None, "how many prompts (else 256 random ones, 16 on a CPU, or all there are)", at_least=1
    )
    input_len: int | None = flag(None, "prompt tokens of random prompts (else 1024, 128 on a CPU)", at_least=1)
    output_len: int | None = flag(
        None, "tokens of each answer, of random and of files (else 128, 64 on a CPU)", at_least=1
    )
    temperature: float = flag(0.6, "of sampling", at_least=0, at_most=100)
    num_runs: int | None = flag(None, "how often the workload is run (else 3 times, once on a CPU)", at_least=1)
    output_json: str | None = flag(None, "where to save the results (else under out/bench)", metavar="FILE")

    def sized(self, *, on_cpu: bool) -> SizedWorkload:
        """Fill in sizes with which a run ends within a minute."""
        lengths = (self.input_len or (128 if on_cpu else 1024), self.output_len or (64 if on_cpu else 128))
        return SizedWorkload(16 if on_cpu else 256, *lengths, self.num_runs or (1 if on_cpu else 3))


@dataclass(frozen=True)
class SizedWorkload:
    """The sizes of a workload on this machine."""

    num_random_prompts: int  # where no number is given
    input_len: int
    output_len: int
    num_runs: int


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="quire bench throughput", description="Measure offline throughput: all requests at once.", epilog=EPILOG
    )
    add_flags(parser, WorkloadFlags, EngineConfig)
    args = parser.parse_args(argv)
    workload, config = load(args, WorkloadFlags, EngineConfig)
    if workload.dataset_path is None:
        config = dataclasses.replace(config, skip_tokenizer_init=True)
    result = measure(workload, config)
    print(table(result))
    save(result, workload.output_json or f"out/bench/throughput-{result['model']}-{result['workload']}.json")
    return 0


def measure(workload: WorkloadFlags, config: EngineConfig) -> dict[str, Any]:
    """Run the workload on a new engine and say how it went. What cannot run is refused before the model is loaded."""
    from engine.core.params.sampling import SamplingParams
    from engine.offline.llm import LLM
    from engine.processing.input_processor import InputProcessor
    from engine.setup.machine import environment
    from engine.worker.device import DeviceNotFoundError, find_device

    try:
        sized = workload.sized(on_cpu=not find_device(config.device).is_accelerator)
    except DeviceNotFoundError as error:
        raise ConfigError(str(error)) from None
    input_processor = InputProcessor.load(config)
    requests = requests_of(workload, sized, input_processor.spec.vocab_size)
    prompts = _encoded(requests, input_processor)
    start = time.perf_counter()
    llm = LLM(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})
    startup = time.perf_counter() - start
    gc.collect()
    gc.freeze()

    def run(count: int | None, output_len: int | None, use_tqdm: bool) -> tuple[float, int]:
        """Seconds, and tokens that were made."""
        llm.reset_prefix_cache()
        params = [
            SamplingParams(
                temperature=workload.temperature,
                ignore_eos=True,
                max_tokens=output_len or request.output_len,
                detokenize=workload.dataset_path is not None,
            )
            for request in requests[:count]
        ]
        begin = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": p} for p in prompts[:count]], params, use_tqdm=use_tqdm)
        return time.perf_counter() - begin, sum(len(result.outputs[0].token_ids) for result in results)

    run(4, 8, False)  # the first steps of a process are slower
    (prefill, _), (both, _) = run(4, 1, False), run(4, 8, False)
    steps = max(request.output_len for request in requests)
    at_most = (prefill + max(both - prefill, 0.0) / 7 * steps) * len(requests) / 4
    print(f"{sized.num_runs} × {len(requests)} requests, each run at most about {at_most:.0f} s", file=sys.stderr)
    runs = [run(None, None, True) for _ in range(sized.num_runs)]
    llm.close()
    return {
        "benchmark": "throughput",
        "model": Path(config.model).name,
        "workload": Path(workload.dataset_path).stem if workload.dataset_path else workload.dataset_name,
        **_figures(len(requests), sum(map(len, prompts)), runs),
        "startup_seconds": startup,
        "workload_settings": dataclasses.asdict(workload) | dataclasses.asdict(sized),
        "engine_settings": dataclasses.asdict(config),
        "environment": environment(),
    }


def _figures(num_requests: int, num_prompt: int, runs: list[tuple[float, int]]) -> dict[str, Any]:
    """Tokens and speed of the median run. `runs`: seconds and output tokens of each."""
    seconds, num_output = statistics.median(seconds for seconds, _ in runs), runs[0][1]
    return {
        "num_requests": num_requests,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "total_num_tokens": num_prompt + num_output,
        "elapsed_time": seconds,
        "elapsed_times": [seconds for seconds, _ in runs],
        "requests_per_second": num_requests / seconds,
        "output_tokens_per_second": num_output / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
    }


def _encoded(requests: list[Request], input_processor: InputProcessor) -> list[list[int]]:
    """Token ids of the prompts. Raises `ConfigError` if one does not fit the context with its output."""
    prompts = [input_processor.encode(r.prompt) if isinstance(r.prompt, str) else r.prompt for r in requests]
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        if not prompt or len(prompt) + request.output_len > input_processor.max_model_len:
            raise ConfigError(
                f"prompt {index} has {len(prompt)} tokens and asks for {request.output_len}, but the context holds "
                f"{input_processor.max_model_len}"
            )
    return prompts


def requests_of(workload: WorkloadFlags, sized: SizedWorkload, vocab_size: int) -> list[Request]:
    """Requests of the flags. Raises `ConfigError`, which names the fault of the file."""
    if workload.dataset_path is not None:
        path = Path(workload.dataset_path)
        requests = workloads.read_prompts(path, sized.output_len)
        if any(isinstance(request.prompt[0], dict) for request in requests):
            raise ConfigError(f"dataset_path {path}: has messages, which only quire bench serve can send")
        return workloads.repeated(requests, workload.num_prompts)
    if workload.dataset_name == "random":
        top = min(workloads.MAX_TOKEN_ID, vocab_size - 1)
        return workloads.fixed(workload.num_prompts or sized.num_random_prompts, sized.input_len, sized.output_len, top)
    return workloads.repeated(workloads.named(workload.dataset_name, vocab_size).requests, workload.num_prompts)


def table(result: dict[str, Any]) -> str:
    """The figures, for people."""
    slowest, fastest = max(result["elapsed_times"]), min(result["elapsed_times"])
    rows = [
        ("requests", f"{result['num_requests']:,}"),
        ("prompt tokens", f"{result['num_prompt_tokens']:,}"),
        ("output tokens", f"{result['num_output_tokens']:,}"),
        ("start-up", f"{result['startup_seconds']:.1f} s"),
        (
            "time",
            f"{result['elapsed_time']:.2f} s  "
            f"(from {fastest:.2f} to {slowest:.2f} in {len(result['elapsed_times'])} runs)",
        ),
        ("requests/s", f"{result['requests_per_second']:,.2f}"),
        ("output tokens/s", f"{result['output_tokens_per_second']:,.0f}"),
        ("total tokens/s", f"{result['tokens_per_second']:,.0f}"),
    ]
    return "\n".join(f"{name:<18}{value:>12}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
