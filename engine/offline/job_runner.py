"""Runs offline requests on an engine until they finish, with a progress bar."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from engine.core.batch import StepOutputs, TokenLogprobs
from engine.core.engine_request import EngineRequest
from engine.engine import Engine
from engine.errors import EngineDeadError, EngineError
from engine.offline.lost_rank import LostRank
from engine.processing.output_collector import OutputCollector, deliver

_BAR_SECONDS = 0.2
_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"
_OUTPUT_WEIGHT = 4  # a generated token takes about as long as this many prompt tokens


@dataclass(slots=True)
class Answer:
    """One of the answers to a prompt, as far as it has been generated."""

    request: EngineRequest
    collector: OutputCollector
    max_tokens: int  # upper bound of generated tokens
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""
    error: str = ""

    def take(self) -> bool:
        """Take the collector's new output. Returns whether the answer is complete."""
        update = self.collector.take()
        self.text.append(update.text)
        self.token_ids += update.token_ids
        if self.logprobs is None:
            self.logprobs = update.logprobs
        elif update.logprobs is not None:
            self.logprobs += update.logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.embedding, self.error = update.embedding or b"", update.error
        return update.finish_reason is not None


@dataclass(slots=True)
class Job:
    """A prompt and its answers."""

    request_id: str
    text: str | None
    token_ids: list[int]
    answers: list[Answer]

    @property
    def work(self) -> int:
        """Upper bound of what the answers cost, in prompt tokens."""
        return sum(len(self.token_ids) + _OUTPUT_WEIGHT * answer.max_tokens for answer in self.answers)


class JobRunner:
    """Runs jobs on an engine. Not thread-safe."""

    def __init__(self, engine: Engine, lost: LostRank) -> None:
        self._engine, self._lost = engine, lost
        self._broken = False
        self._process = os.getpid()

    def run(self, jobs: list[Job], use_tqdm: bool | Callable[..., Any], title: str) -> None:
        """Complete all jobs. `use_tqdm`: whether to show a progress bar, or a function that makes one; `title`: its
        label.

        Raises `EngineDeadError` after `close`, after a failed step, in a forked process and if a rank is lost. Ctrl-C
        aborts all jobs and raises `KeyboardInterrupt`; the runner stays usable.
        """
        if self._broken:
            raise EngineDeadError("this LLM was closed, or a step of it failed: make a new one")
        if os.getpid() != self._process:  # neither the device nor PyTorch's threads came along
            raise EngineDeadError("this process was forked from the process that made the LLM: make another LLM here")
        bar = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else tqdm
            bar = make(total=sum(job.work for job in jobs), desc=title, bar_format=_BAR_FORMAT, dynamic_ncols=True)
        try:
            with _interrupt_later() as interrupted:
                self._run(jobs, _Progress(bar, self._engine, len(jobs)), interrupted)
        finally:
            if bar is not None:
                bar.close()

    def close(self) -> None:
        """Release the device's memory. No job can run afterwards."""
        self._broken = True
        self._engine.close()

    def _run(self, jobs: list[Job], progress: _Progress, interrupted: list[int]) -> None:
        """Complete all jobs. After an exception none of their requests is left in the engine."""
        engine = self._engine
        running: dict[str, tuple[Job, Answer]] = {}
        collectors: dict[str, OutputCollector] = {}  # of `running`
        with_stops: dict[str, OutputCollector] = {}  # of requests whose text is searched for stop strings each step
        generates = not any(answer.request.pooling for job in jobs for answer in job.answers)
        try:
            for job in jobs:
                for answer in job.answers:
                    request_id = answer.request.request_id
                    engine.add_request(answer.request)
                    running[request_id], collectors[request_id] = (job, answer), answer.collector
                    if answer.request.sampling.stop_strings:
                        with_stops[request_id] = answer.collector
            while running:
                outputs = self._step()
                now = time.monotonic()
                deliver(outputs, collectors, now)
                finished = [output.request_id for output in outputs.outputs if output.finish_reason is not None]
                looked_at = [request_id for request_id, collector in with_stops.items() if collector.has_output]
                for request_id in dict.fromkeys(finished + looked_at):
                    job, answer = running[request_id]
                    if answer.take():
                        del running[request_id], collectors[request_id]
                        with_stops.pop(request_id, None)
                        if not answer.collector.finished:
                            engine.abort(request_id)
                        progress.finish_one(job, answer)
                progress.output_tokens += len(outputs.token_ids) + len(outputs.outputs) if generates else 0
                progress.show(now)
                if interrupted:
                    raise KeyboardInterrupt
        finally:
            progress.show(None)
            for request_id in running:
                engine.abort(request_id)
            while not self._broken and engine.has_work():
                self._step()  # reads the steps in flight

    def _step(self) -> StepOutputs:
        try:
            with self._lost.raised():
                return self._engine.step()
        except BaseException:
            self._broken = True
            raise


def check_all(jobs: Iterable[Job]) -> None:
    """Raise `EngineError` if one of the answers failed."""
    for error in (answer.error for job in jobs for answer in job.answers if answer.finish_reason == "error"):
        raise EngineError(error)


class _Progress:
    """The progress bar: the fraction of the work that is done, prefill included, finished requests and tokens per
    second.
    """

    def __init__(self, bar: Any, engine: Engine, num_requests: int) -> None:
        self._bar, self._engine, self._num_requests = bar, engine, num_requests
        self._finished = 0
        self._spared = 0  # work that finished answers did not need: prefix-cache hits, and tokens after an early end
        self.output_tokens = 0
        self._before = engine.stats().prompt_tokens
        self._start = self._shown = time.monotonic()

    def finish_one(self, job: Job, answer: Answer) -> None:
        """Count another complete answer of `job`; the job is finished when all its answers are."""
        self._spared += answer.num_cached_tokens + _OUTPUT_WEIGHT * (answer.max_tokens - len(answer.token_ids))
        self._finished += all(answer.finish_reason is not None for answer in job.answers)

    def show(self, now: float | None) -> None:
        """Draw the bar, if it is due. `now`: monotonic seconds; None: the final state."""
        if self._bar is None or (now is not None and now - self._shown < _BAR_SECONDS):
            return
        complete = now is None and self._finished == self._num_requests
        now = now or time.monotonic()
        self._shown = now
        seconds = max(now - self._start, 1e-9)
        prompt_tokens = self._engine.stats().prompt_tokens - self._before
        done = prompt_tokens + _OUTPUT_WEIGHT * self.output_tokens + self._spared
        self._bar.set_postfix_str(
            f"{self._finished}/{self._num_requests} requests, in {prompt_tokens / seconds:,.0f} tokens/s, "
            f"out {self.output_tokens / seconds:,.0f} tokens/s",
            refresh=False,
        )
        # A preempted request is computed twice, so `done` may exceed the total.
        shown = self._bar.total if complete else max(self._bar.n, min(done, self._bar.total - 1))
        self._bar.update(shown - self._bar.n)
        self._bar.refresh()


@contextmanager
def _interrupt_later() -> Iterator[list[int]]:
    """Record Ctrl-C in the list instead of raising, so that a step is never interrupted. A second Ctrl-C raises at
    once.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(signum: int, frame: Any) -> None:
        noted.append(signum)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
