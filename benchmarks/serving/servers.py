"""The servers of several engines under the same client, in alternating order, beside their own offline speed.

Each server runs with random weights in a process of its own; `benchmarks.serving.serve` in another one is the client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import llama_cpp
from benchmarks.model_shapes import SHAPES, add_tokenizer, model_folder
from benchmarks.offline.engines import EnginesFlags, Job, Results, check_engine, run_job, words_of
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
from benchmarks.workloads import MAX_TOKEN_ID, named
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, nearest, run_command

MODULES = {"quire": "quire", "vllm": "vllm"}
EPILOG = """examples:
  quire bench servers --models qwen3-0.6b
  quire bench servers --engines quire,llama.cpp --llama-server FILE --gguf FILE --models llama-100m --max-concurrency 16
  quire bench servers --engines quire,vllm --offline quire --models qwen3-0.6b,llama-3.1-8b --time-limit 580

Every engine serves random weights with its own defaults but for: bfloat16 (float32 where there is no GPU), 85 % of the
GPU's memory, a context of 4096 tokens, at most --max-concurrency requests at once, no prefix cache, no access log. The
offline speed is that of the same requests, given all at once to the engine's LLM class without detokenisation.
"""


@dataclass(frozen=True)
class ServersFlags:
    """Comparison of servers."""

    engines: tuple[str, ...] = flag((), "quire, vllm (else those installed), llama.cpp", metavar="NAME")
    models: tuple[str, ...] = flag((), "names of benchmarks/model_shapes.py (else qwen3-0.6b)", metavar="NAME")
    num_prompts: int = flag(1024, "requests in each run", at_least=1)
    max_concurrency: int = flag(256, "requests at the same time", at_least=1)
    input_len: int = flag(256, "prompt tokens", at_least=1)
    output_len: int = flag(256, "answer tokens", at_least=1)
    offline: tuple[str, ...] = flag(
        (), "engines whose offline speed is measured, too; none: of no engine (else of all that run)", metavar="NAME"
    )
    rounds: int = flag(
        2, "how often each server is started; those that do not fit the time limit are left out", at_least=1
    )
    repeat: int = flag(2, "runs of the client in each round", at_least=1)
    time_limit: int | None = flag(None, "seconds that the whole comparison may take", at_least=1)
    ready_timeout: int = flag(300, "seconds that a server may take until it is ready", at_least=1)
    dtype: str | None = flag(None, "of the weights", choices=("bfloat16", "float16", "float32"))
    max_model_len: int = flag(4096, "context", size=True, at_least=2)
    gpu_memory_utilization: float = flag(0.85, "share of the GPU's memory for each engine", above=0, at_most=1)
    engine_args: dict[str, Any] | None = flag(  # noqa: RUF009
        None, 'more settings, such as {"vllm": {"block_size": 32}}'
    )
    client_args: dict[str, Any] | None = flag(  # noqa: RUF009
        None, 'other options of `quire bench serve`, such as {"dataset_name": "conversations"}'
    )
    llama_server: str | None = flag(None, "program of the engine llama.cpp, to be named in --engines", metavar="FILE")
    gguf: str | None = flag(None, "the model as llama.cpp reads it", metavar="FILE")
    models_dir: str = flag("out/models", "where configurations of models are written", metavar="FOLDER")
    output_json: str | None = flag(
        None, "where to save the results, with a Markdown table beside them (else under out/bench)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("engines", "models", "offline"):
            object.__setattr__(self, name, words_of(getattr(self, name)))
        for engine in (*self.engines, *(self.engine_args or {})):
            check_engine(engine, MODULES, self.llama_server, self.gguf)
        if not all(isinstance(settings, dict) for settings in (self.engine_args or {}).values()):
            raise ConfigError('engine_args must be settings for each engine, such as {"vllm": {"block_size": 32}}')
        if self.input_len + self.output_len > self.max_model_len:
            raise ConfigError(
                f"input_len {self.input_len} and output_len {self.output_len} are more than max_model_len "
                f"{self.max_model_len}"
            )
        engines = self.engines or tuple(name for name, module in MODULES.items() if importlib.util.find_spec(module))
        if self.offline != ("none",):
            # LLM; llama.cpp has only its server.
            classes = tuple(engine for engine in engines if engine != llama_cpp.NAME)
            for engine in self.offline:
                if engine not in classes:
                    raise ConfigError(
                        f"offline must be none or engines that run ({', '.join(classes)}), got {engine!r}"
                        f"{nearest(engine, classes)}"
                    )
            object.__setattr__(self, "offline", self.offline or classes)
        object.__setattr__(self, "engines", engines)
        object.__setattr__(self, "models", self.models or ("qwen3-0.6b",))

    @property
    def work(self) -> str:
        return f"{self.num_prompts}x{self.input_len}x{self.output_len}"


@dataclass
class Comparison:
    """The run of the command; `served` and `failures` grow."""

    flags: ServersFlags
    path: Path
    deadline: float

    def __post_init__(self) -> None:
        self.served: list[dict[str, Any]] = []
        self.results = Results()
        self.machine: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        flags = self.flags
        folders = {model: model_folder(model, Path(flags.models_dir)) for model in flags.models}
        has_gpu = nvidia_smi("name") is not None
        durations: dict[tuple[str, str], float] = {}
        with tempfile.TemporaryDirectory() as scratch:
            self.machine = describe_machine(Path(scratch))
            for number in range(flags.rounds):
                for model in flags.models:
                    engines = flags.engines[:: -1 if number % 2 else 1]
                    if time.time() + sum(durations.get((engine, model), 0.0) for engine in engines) > self.deadline:
                        self.results.left_out.append(f"round {number + 1}: {model}")
                        continue
                    for engine in engines:
                        begin = time.time()
                        print(f"[{number + 1}/{flags.rounds}] {engine} · {model}", file=sys.stderr, flush=True)
                        job = self._job(engine, model, folders[model], has_gpu)
                        self._serve(job, number, Path(scratch))
                        if engine in flags.offline and not number:
                            options = EnginesFlags(engines=(engine,), repeat=flags.repeat)
                            run_job(job, number, options, self.deadline, Path(scratch), self.results)
                        durations[engine, model] = time.time() - begin
                        self.save()
        return self.save()

    def _job(self, engine: str, model: str, folder: Path, has_gpu: bool) -> Job:
        flags = self.flags
        if model in SHAPES:
            add_tokenizer(folder)
        settings = {
            "load_format": "dummy",
            "max_model_len": flags.max_model_len,
            "max_num_seqs": flags.max_concurrency,
            "dtype": flags.dtype or ("bfloat16" if has_gpu else "float32"),
            "gpu_memory_utilization": flags.gpu_memory_utilization,
            "enable_prefix_caching": False,
            "seed": 0,
        } | (flags.engine_args or {}).get(engine, {})
        if engine == llama_cpp.NAME:
            settings = {"llama_server": flags.llama_server, "gguf": flags.gguf, "context": flags.max_model_len}
            settings["max_num_seqs"] = flags.max_concurrency
        return Job(engine, Path(model).name, folder, settings, (named(flags.work, vocab_size_of(folder)),))

    def _serve(self, job: Job, number: int, scratch: Path) -> None:
        """Start a server, run the client against it, stop it."""
        wait_for_free_gpu()
        log_path, result_path = scratch / "server.txt", scratch / "serve.json"
        result_path.unlink(missing_ok=True)
        port = free_port()
        begin = time.time()
        program = job.settings.get("llama_server")
        variables = {"LD_LIBRARY_PATH": str(Path(program).resolve().parent)} if program else {}
        with process_group(server_command(job, port), job.engine, log_path, variables) as process:
            if not wait_until_ready(process, port, min(self.deadline, begin + self.flags.ready_timeout)):
                if process.poll() is not None:
                    self._failed(job, f"the server ended with code {process.poll()}", log_path)
                elif time.time() > self.deadline:
                    self.results.left_out.append(f"round {number + 1}: {job.engine} · {job.model}: the time was over")
                else:
                    self._failed(job, f"the server was not ready after {self.flags.ready_timeout} s", log_path)
                return
            startup = time.time() - begin
            client_log = scratch / "client.txt"
            with process_group(self._client_command(job, number, port, result_path), "quire", client_log) as client:
                try:
                    client.wait(None if self.deadline == float("inf") else max(1.0, self.deadline - time.time()))
                except subprocess.TimeoutExpired:
                    self.results.left_out.append(f"round {number + 1}: {job.engine} · {job.model}: the time was over")
                    return
            if result_path.exists():
                result = json.loads(result_path.read_text(encoding="utf-8"))
                row = {"engine": job.engine, "model": job.model, "round": number, "startup_seconds": startup, **result}
                if all("client" in run for run in _runs([row])):  # else the first request failed, and none was timed
                    self.served.append(row)
            if client.returncode:
                self._failed(job, f"the client ended with code {client.returncode}", client_log)
                self._keep_log(job, log_path)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)

    def _client_command(self, job: Job, number: int, port: int, result_path: Path) -> list[str]:
        flags = self.flags
        options = {
            "port": port,
            "model": job.model,
            "num_prompts": flags.num_prompts,
            "max_concurrency": flags.max_concurrency,
            "random_input_len": flags.input_len,
            "random_output_len": flags.output_len,
            "random_vocab_size": min(MAX_TOKEN_ID, vocab_size_of(job.folder)),
            "num_warmups": flags.max_concurrency,
            "temperature": 0.6,
            "seed": 100 * number,
            "repeat": flags.repeat,
            "metric_percentiles": "50,95,99",
            "result_dir": result_path.parent,
            "result_filename": result_path.name,
        } | (flags.client_args or {})
        return [
            sys.executable,
            "-m",
            "benchmarks.serving.serve",
            "--save-result",
            "--disable-tqdm",
            *as_options(options),
        ]

    def _failed(self, job: Job, what: str, log_path: Path) -> None:
        self.results.failures.append(f"{job.engine} · {job.model}: {what}: {last_line(log_path)}")
        print(log_path.read_text(errors="replace")[-8000:], file=sys.stderr)
        self._keep_log(job, log_path)

    def _keep_log(self, job: Job, log_path: Path) -> None:
        """Save the output of a process beside the result."""
        name = f"{self.path.stem}-{job.engine}-{job.model}-{log_path.name}"
        print(f"kept {shutil.copy(log_path, self.path.with_name(name))}", file=sys.stderr)

    def save(self) -> dict[str, Any]:
        """Save the figures so far."""
        offline = [
            {"engine": engine, "model": model, "seconds": [run["seconds"] for run in runs]}
            for (engine, model, _), runs in self.results.runs.items()
        ]
        result = {
            "benchmark": "servers",
            "served": self.served,
            "offline": offline,
            "failures": self.results.failures,
            "left_out": self.results.left_out,
            "settings": dataclasses.asdict(self.flags),
            "environment": self.machine,
        }
        self.path.write_text(to_text(result), encoding="utf-8")
        self.path.with_suffix(".md").write_text(table(result) + "\n", encoding="utf-8")
        return result


def main(argv: list[str]) -> int:
    parser = Parser(prog="quire bench servers", description="Compare servers under the same client.", epilog=EPILOG)
    add_flags(parser, ServersFlags)
    (flags,) = load(parser.parse_args(argv), ServersFlags)
    path = Path(flags.output_json or f"out/bench/servers-{time.strftime('%Y%m%d-%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = Comparison(flags, path, time.time() + (flags.time_limit or float("inf"))).run()
    print(table(result))
    print(f"saved {path} and {path.with_suffix('.md')}")
    return 1 if result["failures"] else 0


def server_command(job: Job, port: int) -> list[str]:
    """The command that serves the job's model by the job's name."""
    if job.engine == llama_cpp.NAME:
        return llama_cpp.server_command(**job.settings, port=port, name=job.model)
    common = {"host": "127.0.0.1", "port": port, "served_model_name": job.model, "disable_uvicorn_access_log": True}
    options = as_options({**common, **job.settings})
    if job.engine == "vllm":
        return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(job.folder), *options]
    return [sys.executable, "-P", "-m", "quire", "serve", str(job.folder), *options]


def vocab_size_of(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["vocab_size"])


def as_options(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def speeds(result: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """(model, engine) → median output tokens a second: served, and offline where that was measured."""
    tokens = result["settings"]["num_prompts"] * result["settings"]["output_len"]
    seconds = {(row["model"], row["engine"]): row["seconds"] for row in result["offline"]}
    found = {}
    for key in dict.fromkeys((row["model"], row["engine"]) for row in result["served"]):
        runs = _runs([row for row in result["served"] if (row["model"], row["engine"]) == key])
        offline = tokens / statistics.median(seconds[key]) if seconds.get(key) else None
        found[key] = (statistics.median(run["output_throughput"] for run in runs), offline)
    return found


def _runs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for row in rows for run in row.get("runs", [row])]


def _of_cache(runs: list[dict[str, Any]]) -> list[str]:
    """The median hit rate of the prefix cache, and the largest load of an engine over their mean."""
    rates = [run["prefix_cache_hit_rate"] for run in runs if "prefix_cache_hit_rate" in run]
    loads = [run["busiest_engine"] for run in runs if "busiest_engine" in run]
    return [f"{statistics.median(rates):.1%}" if rates else "–", f"{max(loads):.2f} x mean" if loads else "–"]


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    flags, machine = result["settings"], result["environment"]
    where = machine.get("gpu", f"{machine['cpu_cores']} CPU cores")
    work = f"{flags['num_prompts']} requests, {flags['max_concurrency']} at a time, "
    work += f"{flags['input_len']} in, {flags['output_len']} out"
    lines = [f"{where} · {' '.join(as_options(flags.get('client_args') or {})) or work}"]
    has_cache = any("prefix_cache_hit_rate" in run for run in _runs(result["served"]))
    head = ["model", "server", "output tok/s", "offline tok/s", "share", "p50 TTFT ms", "p99 TTFT ms", "mean TPOT ms"]
    head += ["ready after s", "client's core", *(["prompt tok/s", "hit rate", "busiest"] if has_cache else [])]
    lines += ["", "| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    found = speeds(result)
    for (model, engine), (speed, offline) in found.items():
        rows = [row for row in result["served"] if (row["model"], row["engine"]) == (model, engine)]
        runs = _runs(rows)

        def median(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return float(statistics.median(run[key] for run in runs))

        beside = ["–", "–"] if offline is None else [f"{offline:,.0f}", f"**{speed / offline:.1%}**"]
        cells = [
            f"{speed:,.0f}",
            *beside,
            *(f"{median(k):.1f}" for k in ("p50_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")),
        ]
        cells += [" ".join(f"{row['startup_seconds']:.1f}" for row in rows)]
        cells += [f"{max(run['client']['cpu_share'] for run in runs):.0%}"]
        if has_cache:
            cells += [f"{median('input_throughput'):,.0f}", *_of_cache(runs)]
        lines.append("| " + " | ".join([model, engine, *cells]) + " |")
    ratios = [
        f"{model}: quire is **{speed / found[model, other][0]:.2f}** times as fast as {other}"
        for (model, engine), (speed, _) in found.items()
        for other in ("vllm", llama_cpp.NAME)
        if engine == "quire" and (model, other) in found
    ]
    lines += ["", *ratios] if ratios else []
    for title, items in (("Failures", result["failures"]), ("Left out", result["left_out"])):
        if items:
            lines += ["", f"{title}:", "", *(f"- {item}" for item in items)]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
