"""CPU time of a decode step beside the device's own work: every part of the loop, with no model and no device.

    python -m benchmarks.micro.step_cost                 # 1, 32, 256 and 1024 requests
    python -m benchmarks.micro.step_cost --batch 256 --no-prefix-caching --save-result step.json

Scheduler, rows, packed steps, engine loop, messages and `LLM` are the real ones; only the model's forward pass is left
out, as it is with CUDA graphs, where it costs the CPU one copy and one launch. What is counted is CPU time of the
thread, so a busy machine shows in the medians and hardly in the minima.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import zmq

from benchmarks.model_shapes import model_folder
from benchmarks.result_files import save
from engine.config import EngineConfig
from engine.core.batch import SchedulerOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.models.shard import WHOLE
from engine.models.spec import ModelSpec
from engine.offline.llm import LLM
from engine.replicas.process import EngineLoop
from engine.setup.machine import environment
from engine.worker.executor import Computed, Padding, StepRequest, WholeLogits
from engine.worker.input_batch import PackedStep
from engine.worker.model_runner import ModelRunner
from engine.worker.options import RunnerOptions

BLOCK_SIZE, PROMPT = 16, 100
WARM_UP = 40  # steps that do not count
NOW = time.thread_time_ns


class NoForwardPass:
    """In place of other executors: logits and tokens without a model."""

    max_words = sys.maxsize

    def __init__(self, runner: ModelRunner) -> None:
        max_num_seqs = runner.options.max_num_seqs
        self._logits = torch.zeros(max_num_seqs, 1)
        self._tokens = torch.arange(max_num_seqs) + 1000
        self._sampler = runner.sampler

    def fits(self, step: StepRequest) -> Padding:
        return Padding()

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        n = packed.num_seqs
        return Computed(logits=WholeLogits(self._logits[:n], self._sampler), tokens=self._tokens[:n])


class NoDevice(ModelRunner):
    """A runner that does all but the forward pass."""

    def __init__(self, spec: ModelSpec, options: RunnerOptions) -> None:
        super().__init__(SimpleNamespace(norm=None, head=None, spec=spec, stage=WHOLE), spec, options)  # type: ignore[arg-type]
        self.num_blocks = options.max_num_seqs * options.max_model_len // options.block_size
        self.executors = [NoForwardPass(self)]

    @classmethod
    def build(cls, folder: Path, spec: ModelSpec, options: RunnerOptions, *, progress: bool = True) -> NoDevice:
        return cls(spec, options)


class Times:
    """CPU time of functions, none inside another, and of the rest, by step; without the time of reading the clock."""

    def __init__(self) -> None:
        self._now: dict[str, int] = defaultdict(int)
        self._start = 0
        self._steps: list[dict[str, int]] = []
        timed, own, whole = self.timed(int, "nothing"), [], []
        for _ in range(1000):
            self.begin_step()
            timed()
            self.end_step()
            own.append(self._steps[-1]["nothing"])
            whole.append(self._steps[-1]["rest"])
        self._steps.clear()
        self._inside, self._outside = int(statistics.median(own)), int(statistics.median(whole))

    def watch(self, owner: Any, method: str, name: str) -> None:
        setattr(owner, method, self.timed(getattr(owner, method), name))

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = NOW()
            result = function(*args)
            self._now[name] += NOW() - start
            return result

        return run

    def begin_step(self) -> None:
        self._start = NOW()

    def end_step(self) -> None:
        self._now["rest"] = NOW() - self._start - sum(self._now.values())
        self._steps.append(dict(self._now))
        self._now.clear()

    def summary(self, batch: int) -> list[dict[str, Any]]:
        steps = self._steps[WARM_UP:-WARM_UP]
        cost = dict.fromkeys(steps[0], self._inside) | {"rest": self._outside * (len(steps[0]) - 1)}
        steps = [{name: step.get(name, 0) - cost[name] for name in steps[0]} for step in steps]
        rows = [_row(batch, name, [step[name] for step in steps]) for name in steps[0]]
        return [*rows, _row(batch, "all", [sum(step.values()) for step in steps])]


def _row(batch: int, name: str, nanoseconds: list[int]) -> dict[str, Any]:
    # A step in which blocks are taken costs more than one in which none are: the least mean of a whole turn of them.
    windows = [nanoseconds[i : i + BLOCK_SIZE] for i in range(0, len(nanoseconds) - BLOCK_SIZE + 1, BLOCK_SIZE)]
    means = [statistics.mean(window) / 1e3 for window in windows]
    return {"batch": batch, "piece": name, "min_us": min(means), "median_us": statistics.median(means)}


def settings(folder: Path, batch: int, num_steps: int, prefix_caching: bool) -> dict[str, Any]:
    return {
        "model": str(folder),
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": PROMPT + num_steps + BLOCK_SIZE,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(16384, batch * (PROMPT + BLOCK_SIZE)),
        "enable_prefix_caching": prefix_caching,
        "speculative_config": {"num_speculative_tokens": 0},
    }


def prompts(batch: int) -> list[list[int]]:
    """All different, and of different lengths, so that every step takes blocks for a few."""
    return [[i + 1] * (PROMPT + i % BLOCK_SIZE) for i in range(batch)]


def in_engine_process(folder: Path, batch: int, num_steps: int, prefix_caching: bool) -> Times:
    """The loop of the engine process, messages included."""
    config = EngineConfig(**settings(folder, batch, num_steps, prefix_caching))
    engine = Engine(config, build_runner=NoDevice.build)
    sampling = SamplingParams(temperature=0.6, max_tokens=num_steps, stop_token_ids=[7])
    times = Times()
    times.watch(engine.scheduler, "schedule", "schedule")
    times.watch(engine.scheduler, "update", "update")
    watch_launch(times, engine)
    with zmq.Context() as context:
        sockets = commands, front, events, reader = [
            context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH, zmq.PULL)
        ]
        commands.bind("inproc://commands")
        front.connect("inproc://commands")
        reader.bind("inproc://events")
        events.connect("inproc://events")
        loop = EngineLoop(engine, commands, events, lambda: None)
        times.watch(loop, "_publish", "publish")
        for i, prompt in enumerate(prompts(batch)):
            request_id = f"chatcmpl-{i:032x}"
            engine.add_request(EngineRequest(request_id, prompt, sampling))
        while engine.has_work():
            times.begin_step()
            loop.run_once()
            times.end_step()
            reader.recv()
        for socket in sockets:
            socket.close(linger=0)
    engine.close()
    return times


def watch_launch(times: Times, engine: Engine) -> None:
    launch = times.timed(engine.runner.launch, "launch")

    def launch_and_watch(output: SchedulerOutput) -> Any:
        handle = launch(output)
        return Reader(handle, times)

    setattr(engine.runner, "launch", launch_and_watch)  # noqa: B010


class Reader:
    """A handle whose reading is timed."""

    has_ended = False

    def __init__(self, handle: Any, times: Times) -> None:
        self.read = times.timed(handle.read, "read back")
        self.guided: list[int] = []


def offline(folder: Path, batch: int, num_steps: int, prefix_caching: bool) -> Times:
    """`LLM.generate`: what comes on top of the engine's steps."""
    with patch("engine.offline.llm.Engine", partial(Engine, build_runner=NoDevice.build)):
        llm = LLM(**settings(folder, batch, num_steps, prefix_caching))
    times = Times()
    step = times.timed(llm._engine.step, "engine")

    def next_step() -> Any:
        times.end_step()
        times.begin_step()
        return step()

    setattr(llm._engine, "step", next_step)  # noqa: B010
    sampling = SamplingParams(temperature=0.6, max_tokens=num_steps, stop_token_ids=[7], detokenize=False)
    llm.generate(prompts(batch), sampling, use_tqdm=False)
    llm.close()
    return times


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256, 1024], help="requests that run")
    parser.add_argument("--steps", type=int, default=600, help="of each batch")
    parser.add_argument("--no-prefix-caching", action="store_true", help="full blocks are not published")
    parser.add_argument("--save-result", type=Path, help="where to save the figures as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder("llama-100m", Path(scratch))
        for batch in args.batch:
            for loop in (in_engine_process, offline):
                times = loop(folder, batch, args.steps, not args.no_prefix_caching)
                rows += [{"loop": loop.__name__, **row} for row in times.summary(batch)]
                gc.collect()
    print(table(rows))
    if args.save_result:
        result = {"environment": environment(), "prefix_caching": not args.no_prefix_caching, "rows": rows}
        save(result, args.save_result)
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    lines = ["µs a step, least (median)".ljust(36) + "".join(f"{batch:>16,}" for batch in batches)]
    for loop, piece in dict.fromkeys((row["loop"], row["piece"]) for row in rows):
        found = {row["batch"]: row for row in rows if (row["loop"], row["piece"]) == (loop, piece)}
        cells = [f"{found[b]['min_us']:.1f} ({found[b]['median_us']:.1f})" if b in found else "–" for b in batches]
        lines.append(f"{loop}: {piece}".ljust(36) + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
