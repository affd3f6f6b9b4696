"""Requests with images to the servers of several engines: python -m benchmarks.serving.image_servers

Each server gets the same three loads, one behind the other: requests of text, requests with an image that no other has,
and requests that share a few images. Weights are random, images are files as large as photographs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import SHAPES, add_tokenizer, model_folder
from benchmarks.offline.engines import Job, check_engine, words_of
from benchmarks.processes import (
    describe_machine,
    free_port,
    last_line,
    nvidia_smi,
    process_group,
    wait_for_free_gpu,
    wait_until_ready,
)
from benchmarks.result_files import to_text
from benchmarks.serving.servers import MODULES, as_options, server_command
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, nearest, run_command

ASCII = 128  # token ids below it are characters, so that texts have as many tokens in every engine
LOADS = "text", "unique", "repeated"
WANTED = {  # (load, figure): the ratio that is the goal, and whether a larger one is better
    ("unique", "requests/s"): (1.15, True),
    ("repeated", "requests/s"): (1.4, True),
    ("unique", "TTFT"): (0.8, False),
    ("repeated", "TTFT"): (0.8, False),
    ("text", "requests/s"): (1.0, True),
}
WANTED_REPEATED = 3.0  # requests/s of repeated images, times those of unique ones
LOG_LINES = 40  # of a server that failed


@dataclass(frozen=True)
class ImageServersFlags:
    """Comparison."""

    engines: tuple[str, ...] = flag((), "quire, vllm (else those installed)", metavar="NAME")
    model: str = flag("qwen3-vl-8b", "a name of benchmarks/model_shapes.py, or a folder", metavar="NAME")
    loads: tuple[str, ...] = flag(LOADS, "what is sent: text, unique, repeated", metavar="NAME")
    num_prompts: int = flag(256, "requests of each load", at_least=1)
    max_concurrency: int = flag(64, "requests at the same time", at_least=1)
    height: int = flag(768, "pixels of each image", at_least=1)
    width: int = flag(1024, "pixels of each image", at_least=1)
    num_distinct: int = flag(8, "images that the repeated ones are chosen from", at_least=1)
    input_len: int = flag(32, "tokens of text beside an image", at_least=1)
    text_len: int = flag(512, "tokens of requests without one", at_least=1)
    output_len: int = flag(64, "answer tokens", at_least=1)
    rounds: int = flag(1, "how often each server is started", at_least=1)
    repeat: int = flag(2, "runs of each load in each round", at_least=1)
    time_limit: int | None = flag(None, "seconds that the whole comparison may take", at_least=1)
    ready_timeout: int = flag(300, "seconds that a server may take until it is ready", at_least=1)
    max_model_len: int = flag(32768, "context", size=True, at_least=2)
    gpu_memory_utilization: float = flag(0.85, "share of the GPU's memory for each engine", above=0, at_most=1)
    engine_args: dict[str, Any] | None = flag(  # noqa: RUF009
        None, 'more settings, such as {"vllm": {"mm_encoder_attn_backend": "TORCH_SDPA"}}'
    )
    models_dir: str = flag("out/models", "where configurations of models are written", metavar="FOLDER")
    output_json: str | None = flag(None, "where to save the results (else under out/bench)", metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "engines", words_of(self.engines) or _installed())
        object.__setattr__(self, "loads", words_of(self.loads))
        for kind in self.loads:
            if kind not in LOADS:
                raise ConfigError(f"loads must be {', '.join(LOADS)}, got {kind!r}{nearest(kind, LOADS)}")
        for engine in (*self.engines, *(self.engine_args or {})):
            check_engine(engine, MODULES, None, None)

    def settings_of(self, engine: str) -> dict[str, Any]:
        """Return the settings of an engine's server. All else is as the engine has it by default, its caches too."""
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_concurrency,
            "dtype": "bfloat16" if nvidia_smi("name") else "float32",
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "limit_mm_per_prompt": {"image": 1, "video": 0},
            "seed": 0,
        }
        settings |= (self.engine_args or {}).get(engine, {})
        return settings

    def client_options(self, load: str, number: int) -> dict[str, Any]:
        """Return the options of `quire bench serve` for a load: the same for every engine."""
        options: dict[str, Any] = {
            "endpoint": "/v1/chat/completions",
            "dataset_name": "random" if load == "text" else "random-mm",
            "num_prompts": self.num_prompts,
            "num_warmups": self.max_concurrency,
            "max_concurrency": self.max_concurrency,
            "random_input_len": self.text_len if load == "text" else self.input_len,
            "random_output_len": self.output_len,
            "random_vocab_size": ASCII,
            "temperature": 0.6,
            "seed": 1000 * number + 100 * LOADS.index(load),
            "repeat": self.repeat,
            "metric_percentiles": "50,99",
        }
        if load != "text":
            options["random_mm_bucket_config"] = f"{{({self.height}, {self.width}, 1): 1}}"
        if load == "repeated":
            options["random_mm_num_distinct_items"] = self.num_distinct
        return options


def _installed() -> tuple[str, ...]:
    return tuple(name for name, module in MODULES.items() if importlib.util.find_spec(module))


@dataclass
class ImageComparison:
    """The run of the command; `rows` and `failures` grow."""

    flags: ImageServersFlags
    path: Path
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Measure all loads of all engines, and save the figures after each."""
        flags = self.flags
        folder = model_folder(flags.model, Path(flags.models_dir))
        if flags.model in SHAPES:
            add_tokenizer(folder)
        with tempfile.TemporaryDirectory() as scratch:
            self.machine = describe_machine(Path(scratch))
            for number in range(flags.rounds):
                for engine in flags.engines[:: -1 if number % 2 else 1]:
                    job = Job(engine, Path(flags.model).name, folder, flags.settings_of(engine), ())
                    self._measure(job, number, Path(scratch))
        return self.save()

    def _measure(self, job: Job, number: int, scratch: Path) -> None:
        log = scratch / "server.txt"
        with self._served(job, log) as port:
            for load in self.flags.loads if port else ():
                print(f"[{number + 1}/{self.flags.rounds}] {job.engine} · {load}", file=sys.stderr, flush=True)
                assert port is not None
                found = self._load(job, load, number, port, scratch)
                if found is None:
                    if time.time() >= self.deadline:
                        self.failures.append(f"{job.engine} · {load}: the time was over")
                    else:
                        self._failed(f"{job.engine} · {load}", scratch / "client.txt", log)
                    return
                self.rows.append({"engine": job.engine, "load": load, "round": number, **found})
                self.save()

    @contextlib.contextmanager
    def _served(self, job: Job, log: Path) -> Iterator[int | None]:
        """Start a server for the block; give its port, or None if it does not start."""
        wait_for_free_gpu()
        port, begin = free_port(), time.time()
        with process_group(server_command(job, port), job.engine, log) as process:
            if not wait_until_ready(process, port, min(self.deadline, begin + self.flags.ready_timeout)):
                in_time = " in time" if process.poll() is None else ""
                self._failed(f"{job.engine} did not start{in_time}", log)
                yield None
                return
            print(f"{job.engine} was ready after {time.time() - begin:.1f} s", file=sys.stderr, flush=True)
            yield port
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)

    def _load(self, job: Job, load: str, number: int, port: int, scratch: Path) -> dict[str, Any] | None:
        """Send a load; return the client's figures, None if a request failed or the time is over."""
        result = scratch / "serve.json"
        result.unlink(missing_ok=True)
        options = self.flags.client_options(load, number)
        options |= {"port": port, "model": job.model, "tokenizer": job.folder}
        options |= {"result_dir": result.parent, "result_filename": result.name}
        command = [sys.executable, "-m", "benchmarks.serving.serve", "--save-result", "--disable-tqdm"]
        with process_group([*command, *as_options(options)], "quire", scratch / "client.txt") as client:
            try:
                code = client.wait(None if self.deadline == float("inf") else max(1.0, self.deadline - time.time()))
            except subprocess.TimeoutExpired:
                return None
        found: dict[str, Any] | None = None if code else json.loads(result.read_text(encoding="utf-8"))
        return found

    def _failed(self, what: str, *logs: Path) -> None:
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]]
        print("\n".join(lines), file=sys.stderr, flush=True)
        self.failures.append(f"{what}: {last_line(logs[0])}")

    def save(self) -> dict[str, Any]:
        """Save the figures so far."""
        result = {
            "benchmark": "image_servers",
            "ratios": [dataclasses.asdict(ratio) for ratio in ratios(self.rows)],
            "rows": self.rows,
            "failures": self.failures,
            "settings": dataclasses.asdict(self.flags),
            "environment": self.machine,
        }
        self.path.write_text(to_text(result), encoding="utf-8")
        return result


@dataclass(frozen=True, slots=True)
class Ratio:
    """Figures of two loads, one divided by the other, and the goal."""

    name: str
    value: float
    goal: float
    is_met: bool


def medians(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Return requests a second and milliseconds to the first token by engine and load: medians of all runs."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["engine"], row["load"]), []).extend(row.get("runs", [row]))
    return {
        key: {
            "requests/s": statistics.median(run["request_throughput"] for run in each),
            "TTFT": statistics.median(run["p50_ttft_ms"] for run in each),
        }
        for key, each in runs.items()
    }


def ratios(rows: list[dict[str, Any]]) -> list[Ratio]:
    """Return what was measured of the goals: Quire beside vLLM, and repeated images beside unique ones."""
    found = medians(rows)
    listed = []
    for (kind, figure), (goal, is_larger) in WANTED.items():
        if ("quire", kind) in found and ("vllm", kind) in found:
            value = found["quire", kind][figure] / found["vllm", kind][figure]
            is_met = value >= goal if is_larger else value <= goal
            listed.append(Ratio(f"{kind}: {figure} of Quire ÷ vLLM", value, goal, is_met))
    for engine in dict.fromkeys(engine for engine, _ in found):
        if (engine, "unique") in found and (engine, "repeated") in found:
            value = found[engine, "repeated"]["requests/s"] / found[engine, "unique"]["requests/s"]
            name = f"repeated ÷ unique: requests/s of {engine}"
            listed.append(Ratio(name, value, WANTED_REPEATED, value >= WANTED_REPEATED))
    return listed


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    machine, flags = result["environment"], result["settings"]
    where = machine.get("gpu", f"{machine['cpu_cores']} CPU cores")
    size = f"{flags['width']} x {flags['height']} pixels"
    lines = [f"{where} · {flags['model']} · {size} · {flags['max_concurrency']} at once", ""]
    lines += ["| server | load | requests/s | p50 TTFT ms | p99 TTFT ms |", "|---|---|---:|---:|---:|"]
    for (engine, kind), figures in medians(result["rows"]).items():
        rows = [row for row in result["rows"] if (row["engine"], row["load"]) == (engine, kind)]
        late = max(row["p99_ttft_ms"] for row in rows)
        lines.append(f"| {engine} | {kind} | {figures['requests/s']:.2f} | {figures['TTFT']:.0f} | {late:.0f} |")
    lines += [""] + [
        f"{each['name']}: **{each['value']:.2f}** (goal {each['goal']:g}, {'met' if each['is_met'] else 'missed'})"
        for each in result["ratios"]
    ]
    return "\n".join([*lines, *(f"Failed: {failure}" for failure in result["failures"])])


def main(argv: list[str]) -> int:
    parser = Parser(prog="benchmarks.serving.image_servers", description=str(__doc__))
    add_flags(parser, ImageServersFlags)
    (flags,) = load(parser.parse_args(argv), ImageServersFlags)
    path = Path(flags.output_json or f"out/bench/images-{time.strftime('%Y%m%d-%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = ImageComparison(flags, path, time.time() + (flags.time_limit or float("inf"))).run()
    print(table(result))
    print(f"saved {path}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    run_command(main)
