"""One model on 1, 2, 4, … GPUs (on a CPU: ranks): how much faster, and what part of the ideal that is.

Each layout runs in a process of its own, as the engines of `benchmarks.offline.engines` do, whose work and rounds these
are.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.offline.engines import EnginesFlags, Job, Results, measure_all, plan, summary
from benchmarks.processes import nvidia_smi
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, run_command

PARALLEL = {  # how → (the program of one_engine.py that runs it, its setting)
    "tensor": ("quire", "tensor_parallel_size"),
    "pipeline": ("quire", "pipeline_parallel_size"),
    "data": ("quire-replicas", "data_parallel_size"),
}
WORK = ("latency1", "latency8", "nano", "decode", "prefill")
EPILOG = """examples:
  quire bench scale --model llama-3.1-8b --output-json scale.json
  quire bench scale --model llama-100m --gpus 1,2 --parallel tensor --work 4x32x32     on a CPU: ranks
  quire bench plot scale.json

Weights are random, settings and work those of `quire bench engines`. Speed-up: of medians, over one GPU that is used in
the same way. Efficiency: speed-up ÷ GPUs. Ranks on a CPU share its cores, so that they show no speed-up.
"""


@dataclass(frozen=True)
class ScaleFlags:
    """Scaling."""

    model: str = flag("llama-3.1-8b", "name of benchmarks/model_shapes.py, or a folder with a config.json")
    gpus: tuple[str, ...] = flag((), "numbers of GPUs, 1 among them (else 1,2,4)", metavar="N")
    parallel: tuple[str, ...] = flag((), f"of {', '.join(PARALLEL)} (else tensor and data)", metavar="NAME")
    work: tuple[str, ...] = flag((), f"as for quire bench engines (else {','.join(WORK)})", metavar="NAME")
    rounds: int = flag(2, "how often each is started; those that do not fit the time limit are left out", at_least=1)
    repeat: int | None = flag(None, "timed runs of each work in each round (else 3, and 7 of up to 16)", at_least=1)
    time_limit: int | None = flag(None, "seconds that all of it may take", at_least=1)
    dtype: str | None = flag(None, "of the weights", choices=("bfloat16", "float16", "float32"))
    max_model_len: int | None = flag(None, "context, for all work", size=True, at_least=2)
    gpu_memory_utilization: float = flag(0.85, "share of each GPU's memory", above=0, at_most=1)
    models_dir: str = flag("out/models", "where configurations of models are written", metavar="FOLDER")
    output_json: str | None = flag(
        None, "where to save the results, with a Markdown table beside them (else under out/bench)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check(self)
        for name, default in (("gpus", ("1", "2", "4")), ("parallel", ("tensor", "data")), ("work", WORK)):
            words = tuple(dict.fromkeys(word for item in getattr(self, name) for word in item.split(",") if word))
            object.__setattr__(self, name, words or default)
        if "1" not in self.gpus or not all(word.isdecimal() and int(word) for word in self.gpus):
            raise ConfigError(f"gpus must be numbers, 1 among them, got {','.join(self.gpus)}")
        if unknown := [word for word in self.parallel if word not in PARALLEL]:
            raise ConfigError(f"parallel must be of {', '.join(PARALLEL)}, got {unknown[0]!r}")
        if "prefix" in self.work:
            raise ConfigError("work prefix needs one engine, whose prefix cache is emptied: quire bench engines")

    @property
    def sizes(self) -> list[int]:
        return sorted(map(int, self.gpus))


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="quire bench scale", description="Measure speed-up and efficiency on several GPUs.", epilog=EPILOG
    )
    add_flags(parser, ScaleFlags)
    (flags,) = load(parser.parse_args(argv), ScaleFlags)
    path = Path(flags.output_json or f"out/bench/scale-{time.strftime('%Y%m%d-%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = nvidia_smi("name")
    if names is not None and len(names) < flags.sizes[-1]:
        raise ConfigError(f"gpus: {flags.sizes[-1]} are asked for, and this machine has {len(names)}")
    common = EnginesFlags(
        engines=("quire",), models=(flags.model,), work=flags.work, rounds=flags.rounds, repeat=flags.repeat,
        time_limit=flags.time_limit, dtype=flags.dtype, max_model_len=flags.max_model_len,
        gpu_memory_utilization=flags.gpu_memory_utilization, models_dir=flags.models_dir,
    )  # fmt: skip
    layouts = [layouts_of(job, flags) for (job,) in plan(common, has_gpu=names is not None)]

    def report(results: Results, machine: dict[str, Any]) -> dict[str, Any]:
        found = summary(common, results, machine)
        return found | {
            "benchmark": "scale",
            "runs": scaled(found["runs"], flags.parallel),
            "settings": dataclasses.asdict(flags),
        }

    result = measure_all(common, layouts, path, report, table)
    print(table(result))
    print(f"saved {path} and {path.with_suffix('.md')}")
    return 1 if result["failures"] else 0


def layouts_of(job: Job, flags: ScaleFlags) -> list[Job]:
    """The same job in each way, on each number of GPUs. Ways of the same program share its run on one GPU."""
    return [
        dataclasses.replace(
            job, engine=f"{how} {size}", program=PARALLEL[how][0], settings=job.settings | {PARALLEL[how][1]: size}
        )
        for how in flags.parallel
        for size in flags.sizes
        if size > 1 or alone(how, flags.parallel) == how
    ]


def alone(how: str, parallel: Sequence[str]) -> str:
    """The first of the ways whose program is that of `how`: under its name that program runs on one GPU."""
    return next(each for each in parallel if PARALLEL[each][0] == PARALLEL[how][0])


def scaled(rows: Sequence[dict[str, Any]], parallel: Sequence[str]) -> list[dict[str, Any]]:
    """Each way's, with `parallel`, `gpus`, `speed_up` and `efficiency`; without one GPU's, the last two are None."""
    measured = {(row["engine"], row["work"]): row for row in rows}
    found = []
    for how in parallel:
        first = alone(how, parallel)
        for row in rows:
            name, _, size = row["engine"].partition(" ")
            if name != (first if size == "1" else how):
                continue
            one = measured.get((f"{first} 1", row["work"]))
            speed_up = statistics.median(one["seconds"]) / statistics.median(row["seconds"]) if one else None
            more = {"engine": f"{how} {size}", "parallel": how, "gpus": int(size), "speed_up": speed_up}
            found.append(row | more | {"ratio": speed_up, "efficiency": speed_up and speed_up / int(size)})
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    machine, rows = result["environment"], result["runs"]
    where = machine.get("gpu", f"{machine['cpu_cores']} CPU cores")
    lines = [f"{result['settings']['model']} · {where} · torch {machine['torch']}", ""]
    lines += [
        "| parallel | work | what | GPUs | tokens a second | speed-up | efficiency |",
        "|---|---|---|" + "---:|" * 4,
    ]
    for row in sorted(
        rows, key=lambda row: (row["parallel"], result["settings"]["work"].index(row["work"]), row["gpus"])
    ):
        made = row["num_output_tokens"] > row["num_requests"]
        rate = row["output_tokens_per_second" if made else "tokens_per_second"]
        ratios = ["–", "–"] if row["speed_up"] is None else [f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}"]
        what = workloads.describe(row["work"])
        lines.append(
            "| " + " | ".join([row["parallel"], row["work"], what, str(row["gpus"]), f"{rate:,.0f}", *ratios]) + " |"
        )
    for title in ("failures", "left_out"):
        lines += ["", *(f"- {title.replace('_', ' ')}: {item}" for item in result[title])]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    run_command(main)
