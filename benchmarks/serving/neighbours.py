"""Speed on a CPU beside busy processes, as a share of the speed without: python -m benchmarks.serving.neighbours

Offline, as commands and served; quiet and busy runs take turns, so that a machine that slows down slows both. Some 3
minutes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep, time
from typing import Any

from benchmarks.model_shapes import SHAPES, add_tokenizer, model_folder
from benchmarks.processes import ROOT, free_port, last_line, process_group, wait_until_ready
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, run_command

NEIGHBOUR = [sys.executable, "-c", "while True: pass"]
CONTEXT, PROMPT = 1024, 32
READY_SECONDS = 300.0
LEAST_SECONDS = 1.0  # of measuring, before and after a neighbour comes
Measure = Callable[[], float]  # a run: tokens a second


@dataclass(frozen=True)
class NeighboursFlags:
    """Runs."""

    models: tuple[str, ...] = flag(
        (str(ROOT / "configs" / "demo"), "llama-100m"), "folders of models, or names of benchmarks/model_shapes.py"
    )
    ways: tuple[str, ...] = flag(("LLM", "serve", "generate", "bench"), "what is measured, of these")
    neighbours: int = flag(1, "busy processes", at_least=1)
    requests: int = flag(4, "at once; the command generate has one", at_least=1)
    output_len: int = flag(64, "tokens of each answer", at_least=2)
    rounds: int = flag(3, "quiet and busy runs of each", at_least=1)
    dtype: str = flag("auto", "of the weights")
    models_dir: str = flag("out/models", "where configurations of models are written", metavar="FOLDER")

    def __post_init__(self) -> None:
        check(self)
        if unknown := set(self.ways) - WAYS.keys():
            raise ConfigError(f"ways must be of {', '.join(WAYS)}, got {min(unknown)!r}")


@dataclass(frozen=True)
class Job:
    """A model, and what is asked of it."""

    folder: Path
    flags: NeighboursFlags
    settings: dict[str, Any]  # of the engine
    scratch: Path

    @property
    def options(self) -> list[str]:
        return [word for name, value in self.settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    @property
    def num_tokens(self) -> int:
        return self.flags.requests * self.flags.output_len

    @property
    def prompt(self) -> list[int]:
        return [3 + 7 * index % 200 for index in range(PROMPT)]


@contextlib.contextmanager
def offline(job: Job) -> Iterator[Measure]:
    """The class LLM, in a process that stays."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_offline, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()  # so that `recv` fails when the process has ended

    def measure() -> float:
        ours.send("run")
        return float(ours.recv())

    try:
        yield measure
    finally:
        process.kill()
        process.join()


def _serve_offline(connection: Connection, job: Job) -> None:
    from engine import LLM, SamplingParams

    llm = LLM(model=str(job.folder), enable_prefix_caching=False, **job.settings)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.flags.output_len)
    while True:
        connection.recv()
        begin = perf_counter()
        llm.generate([{"prompt_token_ids": job.prompt}] * job.flags.requests, params, use_tqdm=False)
        connection.send(job.num_tokens / (perf_counter() - begin))


@contextlib.contextmanager
def served(job: Job) -> Iterator[Measure]:
    """`quire serve`, and streams that are read here."""
    port, log = free_port(), job.scratch / "server.txt"
    command = [sys.executable, "-P", "-m", "quire", "serve", str(job.folder), "--port", str(port), *job.options]
    command += ["--host", "127.0.0.1", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    body = {"prompt": job.prompt, "max_tokens": job.flags.output_len, "temperature": 0}
    text = json.dumps(body | {"stream": True, "ignore_eos": True})

    def read_stream(_: int) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=READY_SECONDS)) as connection:
            connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                answer = response.read().rstrip()
                if not answer.endswith(b"[DONE]"):
                    end = answer[-300:].decode(errors="replace")
                    raise ConfigError(
                        f"the server's answer has status {response.status} and ends with {end!r}, not [DONE]"
                    )

    with process_group(command, "quire", log) as process, ThreadPoolExecutor(job.flags.requests) as clients:
        if not wait_until_ready(process, port, time() + READY_SECONDS):
            raise ConfigError(f"the server does not start: {last_line(log)}")

        def measure() -> float:
            begin = perf_counter()
            list(clients.map(read_stream, range(job.flags.requests)))
            return job.num_tokens / (perf_counter() - begin)

        yield measure


@contextlib.contextmanager
def generated(job: Job) -> Iterator[Measure]:
    """`quire generate`, from the first to the last piece of its text."""
    count = 4 * job.flags.output_len
    command = [sys.executable, "-m", "quire", "generate", "Once upon a time", "--model", str(job.folder)]
    command += [*job.options, "--max-tokens", str(count), "--temperature", "0", "--ignore-eos"]

    def measure() -> float:
        with (job.scratch / "generate.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)
        assert process.stdout is not None
        with process.stdout as text:
            os.read(text.fileno(), 1)
            begin = perf_counter()
            text.read()
        seconds = perf_counter() - begin
        if process.wait():
            raise ConfigError(f"quire generate failed: {last_line(job.scratch / 'generate.txt')}")
        return (count - 1) / seconds

    yield measure


@contextlib.contextmanager
def benched(job: Job) -> Iterator[Measure]:
    """`quire bench latency`: the median of its batches."""
    result = job.scratch / "latency.json"
    command = [sys.executable, "-m", "quire", "bench", "latency", "--model", str(job.folder), *job.options]
    command += [
        "--batch-size",
        str(job.flags.requests),
        "--output-len",
        str(job.flags.output_len),
        "--temperature",
        "0",
    ]
    command += ["--num-iters-warmup", "1", "--num-iters", "8", "--disable-detokenize", "--output-json", str(result)]

    def measure() -> float:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"quire bench latency failed: {done.stderr.strip()[-300:]}")
        return float(json.loads(result.read_text(encoding="utf-8"))["output_tokens_per_second"])

    yield measure


WAYS = {"LLM": offline, "serve": served, "generate": generated, "bench": benched}


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute all the time."""
    processes = [subprocess.Popen(NEIGHBOUR) for _ in range(count)]
    try:
        sleep(0.2)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(argv: list[str]) -> int:
    parser = Parser(prog="benchmarks.serving.neighbours", description=str(__doc__))
    add_flags(parser, NeighboursFlags)
    (flags,) = load(parser.parse_args(argv), NeighboursFlags)
    print("| model | what | quiet tok/s | busy tok/s | share |\n|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        for model in flags.models:
            for way in flags.ways:
                quiet, beside = compare(way, _job(model, flags, Path(scratch)))
                print(
                    f"| {Path(model).name} | {way} | {quiet:,.0f} | {beside:,.0f} | {beside / quiet:.0%} |", flush=True
                )
    return 0


def _job(model: str, flags: NeighboursFlags, scratch: Path) -> Job:
    folder = model_folder(model, Path(flags.models_dir))
    settings: dict[str, Any] = {"dtype": flags.dtype, "device": "cpu"}
    if model in SHAPES:
        add_tokenizer(folder)
        settings["load_format"] = "dummy"
    return Job(folder, flags, settings | {"max_model_len": CONTEXT, "max_num_seqs": 16}, scratch)


def compare(way: str, job: Job) -> tuple[float, float]:
    """Medians of tokens a second: quiet, and beside busy processes."""
    figures: dict[int, list[float]] = {0: [], job.flags.neighbours: []}
    with WAYS[way](job) as measure:
        measure()  # not counted
        for _ in range(job.flags.rounds):
            for count, found in figures.items():
                with busy(count):
                    end = perf_counter() + LEAST_SECONDS
                    runs = [measure()]
                    while perf_counter() < end:
                        runs.append(measure())
                    found.append(statistics.harmonic_mean(runs))
    quiet, beside = (statistics.median(found) for found in figures.values())
    return quiet, beside


if __name__ == "__main__":
    run_command(main)
