"""Latency of one batch, in this process: from the prompts to the last token.

Flags, labels and JSON keys are those of `vllm bench latency`.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.result_files import save
from benchmarks.workloads import MAX_TOKEN_ID, fixed
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, flag, load

PERCENTILES = (10, 25, 50, 75, 90, 99)
EPILOG = """examples:
  quire bench latency --model configs/demo
  quire bench latency --model ./qwen3-0.6b --load-format dummy --disable-detokenize --batch-size 1 --output-json 1.json

All prompts of the batch are given at once, random token ids; answers have their full length (ignore_eos). The prefix
cache is off unless --enable-prefix-caching is given.
"""


@dataclass(frozen=True)
class LatencyFlags:
    """Batch."""

    input_len: int = flag(32, "tokens of each prompt", at_least=1)
    output_len: int = flag(128, "tokens of each answer", at_least=1)
    batch_size: int = flag(8, "prompts in the batch", at_least=1)
    temperature: float = flag(1.0, "of sampling", at_least=0, at_most=100)
    num_iters_warmup: int = flag(10, "runs before those that count", at_least=0)
    num_iters: int = flag(30, "runs that count", at_least=1)
    disable_detokenize: bool = flag(False, "make no text of the tokens; needs no tokenizer")
    output_json: str | None = flag(None, "where to save the results", metavar="FILE")


def main(argv: list[str]) -> int:
    parser = Parser(prog="quire bench latency", description="Measure the latency of one batch.", epilog=EPILOG)
    add_flags(parser, LatencyFlags, EngineConfig)
    flags, config = load(parser.parse_args(argv), LatencyFlags, EngineConfig, defaults={"enable_prefix_caching": False})
    if flags.disable_detokenize:
        config = dataclasses.replace(config, skip_tokenizer_init=True)
    result = measure(flags, config)
    print(table(result))
    if flags.output_json:
        save(result, flags.output_json)
    return 0


def measure(flags: LatencyFlags, config: EngineConfig) -> dict[str, Any]:
    """Run the batch again and again. A batch that does not fit the context is refused before the model is loaded."""
    from engine.core.params.sampling import SamplingParams
    from engine.offline.llm import LLM
    from engine.processing.input_processor import InputProcessor
    from engine.setup.machine import environment

    input_processor = InputProcessor.load(config)
    if flags.input_len + flags.output_len > input_processor.max_model_len:
        raise ConfigError(
            f"input_len {flags.input_len} and output_len {flags.output_len} are more than the context holds, "
            f"{input_processor.max_model_len}"
        )
    top = min(MAX_TOKEN_ID, input_processor.spec.vocab_size - 1)
    requests = fixed(flags.batch_size, flags.input_len, flags.output_len, top)
    params = SamplingParams(
        temperature=flags.temperature,
        ignore_eos=True,
        max_tokens=flags.output_len,
        detokenize=not config.skip_tokenizer_init,
    )
    start = time.perf_counter()
    llm = LLM(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})
    startup = time.perf_counter() - start
    gc.collect()
    gc.freeze()
    latencies = []
    for number in tqdm(range(-flags.num_iters_warmup, flags.num_iters), desc="iterations", disable=None):
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": request.prompt} for request in requests], params, use_tqdm=False)
        if number >= 0:
            latencies.append(time.perf_counter() - begin)
    llm.close()
    return {
        "benchmark": "latency",
        "model": Path(config.model).name,
        "avg_latency": statistics.fmean(latencies),
        "std_latency": statistics.pstdev(latencies),
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
        "median_ms_per_token": statistics.median(latencies) / flags.output_len * 1e3,
        "output_tokens_per_second": flags.batch_size * flags.output_len / statistics.median(latencies),
        "startup_seconds": startup,
        "batch_settings": dataclasses.asdict(flags),
        "engine_settings": dataclasses.asdict(config),
        "environment": environment(),
    }


def table(result: dict[str, Any]) -> str:
    """The figures, for people."""
    lines = [f"Avg latency: {result['avg_latency']:.6f} seconds", f"Std latency: {result['std_latency']:.6f} seconds"]
    lines += [f"{p}% percentile latency: {seconds:.6f} seconds" for p, seconds in result["percentiles"].items()]
    lines.append(
        f"Median: {result['median_ms_per_token']:.3f} ms a token, "
        f"{result['output_tokens_per_second']:,.0f} output tokens/s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
