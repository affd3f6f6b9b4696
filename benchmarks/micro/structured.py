"""Slow-down of plain requests by guided ones in the same batch, in this process.

    python -m benchmarks.micro.structured                                            # the bundled model
    python -m benchmarks.micro.structured --model qwen3-0.6b --load-format dummy     # a known shape, random weights

Half of the requests are plain in every run. The other half are plain, too, or each have a JSON schema of their own, or
tools that they may call; they run before the plain ones begin, and on until those are done, so that the batch is always
full. What counts is the speed of the plain half; that of the others is told, too.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model_shapes import SHAPES, add_tokenizer, model_folder
from benchmarks.result_files import save
from benchmarks.workloads import MAX_TOKEN_ID
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import StructuredOutputs, Tag, Tags
from engine.engine import Engine
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, flag, load
from engine.processing.input_processor import InputProcessor
from engine.setup.machine import environment

KINDS = ("plain", "json", "tools")  # of the other half
EPILOG = """examples:
  python -m benchmarks.micro.structured --num-requests 16 --output-len 64
  python -m benchmarks.micro.structured --model qwen3-0.6b --load-format dummy --output-json structured.json
"""


@dataclass(frozen=True)
class StructuredFlags:
    """Requests."""

    num_requests: int = flag(64, "in the batch; half of them are plain in every run", at_least=2)
    input_len: int = flag(128, "tokens of each prompt", at_least=1)
    output_len: int = flag(256, "tokens of each plain answer", at_least=2)
    temperature: float = flag(0.6, "of sampling", at_least=0, at_most=100)
    repeat: int = flag(5, "runs of each kind, alternately; the first of each does not count", at_least=1)
    models_folder: str = flag("out/models", "where the files of well-known shapes are written", metavar="FOLDER")
    output_json: str | None = flag(None, "where to save the results", metavar="FILE")


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="python -m benchmarks.micro.structured", description="Measure what grammars cost.", epilog=EPILOG
    )
    add_flags(parser, StructuredFlags, EngineConfig)
    flags, config = load(parser.parse_args(argv), StructuredFlags, EngineConfig, defaults={"model": "configs/demo"})
    if config.model in SHAPES:
        folder = model_folder(config.model, Path(flags.models_folder))
        add_tokenizer(folder)
        config = dataclasses.replace(config, model=str(folder))
    result = measure(flags, config)
    print(table(result))
    if flags.output_json:
        save(result, flags.output_json)
    return 0


def measure(flags: StructuredFlags, config: EngineConfig) -> dict[str, Any]:
    """The plain half's tokens a second beside each kind of others."""
    input_processor = InputProcessor.load(config)
    needed = flags.input_len + 4 * flags.output_len
    if needed > input_processor.max_model_len:
        raise ConfigError(
            f"input_len {flags.input_len} and 4 times output_len {flags.output_len} are more than the context holds, "
            f"{input_processor.max_model_len}"
        )
    engine = Engine(
        input_processor.local(config),
        spec=input_processor.spec,
        eos_token_ids=input_processor.eos_token_ids,
        offline=True,
    )
    gc.collect()
    gc.freeze()
    print(engine.summary(), file=sys.stderr)
    half = flags.num_requests // 2
    asked = {kind: [_sampling(flags, input_processor, kind, i) for i in range(half)] for kind in KINDS}
    runs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    others: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(flags.repeat + 1):
        for kind in KINDS:
            rates = _run(engine, flags, asked[kind], number, min(MAX_TOKEN_ID, input_processor.spec.vocab_size - 1))
            if number:
                runs[kind].append(rates[0])
                others[kind].append(rates[1])
    engine.close()
    plain = statistics.median(runs["plain"])
    return {
        "benchmark": "structured",
        "model": Path(config.model).name,
        "plain_tokens_per_second": {kind: statistics.median(found) for kind, found in runs.items()},
        "ratios": {kind: statistics.median(found) / plain for kind, found in runs.items()},
        "other_tokens_per_second": {kind: statistics.median(found) for kind, found in others.items()},
        "runs": runs,
        "other_runs": others,
        "settings": dataclasses.asdict(flags),
        "engine_settings": dataclasses.asdict(config) | {"model": Path(config.model).name},
        "environment": environment(),
    }


def _run(
    engine: Engine, flags: StructuredFlags, others: list[SamplingParams], number: int, top: int
) -> tuple[float, float]:
    """Tokens a second of the plain half and of the others, from when all decode until the plain half is half done."""
    half, dice = len(others), np.random.default_rng(0)
    prompts = dice.integers(0, top, (2 * half, flags.input_len)).tolist()
    names = [f"{number} {i}" for i in range(2 * half)]
    for name, prompt, sampling in zip(names, prompts, others, strict=False):
        engine.add_request(EngineRequest(name, prompt, sampling, cache_salt=str(number)))
    _step_until(engine, dict.fromkeys(names[:half], 1))
    sampling = SamplingParams(
        temperature=flags.temperature, max_tokens=flags.output_len, ignore_eos=True, detokenize=False
    )
    for name, prompt in zip(names[half:], prompts[half:], strict=True):
        engine.add_request(EngineRequest(name, prompt, sampling, cache_salt=str(number)))
    _step_until(engine, dict.fromkeys(names[half:], 1))
    start = time.perf_counter()
    got = _step_until(engine, dict.fromkeys(names[half:], 0), flags.output_len // 2)
    seconds = time.perf_counter() - start
    for name in names:
        engine.abort(name)
    while engine.has_work():
        engine.step()
    plain = sum(got[name] for name in names[half:])
    return plain / seconds, (sum(got.values()) - plain) / seconds


def _step_until(engine: Engine, wanted: dict[str, int], num_each: int = 0) -> Counter[str]:
    """Until each of them has so many new tokens, or all of them `num_each` on average; how many everybody got."""
    got: Counter[str] = Counter()
    while any(got[name] < number for name, number in wanted.items()) or (
        sum(got[name] for name in wanted) < num_each * len(wanted)
    ):
        for output in engine.step():
            if output.finish_reason not in (None, "length", "abort"):
                raise RuntimeError(f"request {output.request_id} ended: {output.finish_reason}")
            got[output.request_id] += len(output.new_token_ids)
    return got


def _sampling(flags: StructuredFlags, input_processor: InputProcessor, kind: str, number: int) -> SamplingParams:
    sampling = SamplingParams(
        temperature=flags.temperature, max_tokens=4 * flags.output_len, ignore_eos=True, detokenize=False, seed=number
    )
    if kind == "json":
        sampling = sampling.clone(structured_outputs=StructuredOutputs(json=_schema(number)))
    elif kind == "tools":
        schema = {"type": "object", "properties": _schema(number)["items"]["properties"]}
        tags = [Tag(begin=f'\n{{"name": "f{i}", "arguments": ', schema=schema, end="}\n</tool_call>") for i in range(4)]
        sampling = sampling.clone(structured_outputs=StructuredOutputs(tags=Tags(trigger="<tool_call>", tags=tags)))
    return input_processor.check(EngineRequest("", [0], sampling)).sampling


def _schema(number: int) -> dict[str, Any]:
    """A list of records, too long to come to an end; another one for each number."""
    dice = np.random.default_rng(number)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 10 ** int(dice.integers(1, 9))},
        {"type": "boolean"},
        {"enum": [f"choice {number} {i}" for i in range(8)]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 5},
        {"type": "string", "format": "date"},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": f"^[a-z]{{{number % 5 + 1},12}}$"}]},
    ]
    properties = {f"field_{number}_{i}": kinds[int(dice.integers(len(kinds)))] for i in range(6)}
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 1000}


def table(result: dict[str, Any]) -> str:
    """The figures, for people."""
    half = result["settings"]["num_requests"] // 2
    names = {"plain": "plain ones", "json": "JSON schemas", "tools": "tools they may call"}
    lines = [f"{half} plain requests beside {half} others, which are"]
    for kind, rate in result["plain_tokens_per_second"].items():
        other = result["other_tokens_per_second"][kind]
        lines.append(
            f"  {names[kind]:<20} {rate:>10,.0f} tokens/s  {result['ratios'][kind]:.3f}   "
            f"the others {other:,.0f} tokens/s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
