"""The engine: a scheduler and a runner in one loop, in one thread of one process."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from engine.adapted import AdaptedRequests
from engine.config import EngineConfig
from engine.core.batch import (
    FAULTS,
    NOT_FINITE,
    EngineOutput,
    SchedulerOutput,
    SchedulerStats,
    StepOutputs,
    StepResult,
)
from engine.core.drafts.policy import DraftLimits, DraftPolicy
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import EngineError
from engine.guided import GuidedProposer, GuidedRequests
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.files import Progress, silent
from engine.models.hub import resolve_model, short_name
from engine.models.spec import ModelSpec
from engine.options import device_of, quantization_in_memory, runner_options
from engine.prefix_cache_store import PrefixCacheStore, open_store
from engine.processing.input_processor import load_tokenizer, vocabulary_of
from engine.recovery import Recovery
from engine.speculative import SpeculativeConfig, speculative_config
from engine.stats import ExpertTokens
from engine.structured.grammar import Compiler, Vocabulary
from engine.structured.grammar_manager import GrammarManager
from engine.tiered_cache import TieredCache
from engine.version import __version__
from engine.worker.device import Device
from engine.worker.interface import Handle, Runner
from engine.worker.kv_cache import KVCacheTooSmallError
from engine.worker.model_runner import ModelRunner
from engine.worker.options import MAX_DRAFTED_SEQS, RunnerOptions
from engine.worker.parallel.launcher import Launcher, LaunchError
from engine.worker.parallel.ranks import build_runner
from engine.worker.parallel.ray_launcher import RayLauncher
from engine.worker.proposers.ngram import NgramProposer
from engine.worker.sleep import SleepingRunner, free_unused

_log = logging.getLogger(__name__)

SLEEP_LEVELS = (1, 2)


BuildRunner = Callable[..., Runner]  # (folder, spec, options, *, progress, launcher, lost), as `ranks.build_runner`


P = ParamSpec("P")
T = TypeVar("T")


class _StepFailedError(Exception):
    """A step failed on the device, possibly because of one of its requests."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Engine:
    """A model, its scheduler and its runner. Call `add_request`, then `step` until `has_work` is false.

    A request that fails alone finishes with the reason "error", and the others continue. If `step` raises an exception,
    the engine cannot be used any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        spec: ModelSpec | None = None,
        eos_token_ids: Iterable[int] = (),
        offline: bool = False,
        progress: Progress = silent,
        build_runner: BuildRunner = build_runner,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        """Load the model and allocate the KV cache.

        `spec`: the model's specification, if it has been read already. `eos_token_ids`: end-of-text tokens in addition
        to those of the specification. `offline`: tune for throughput. `progress`: called with the progress of the
        start. `lost`: called with the reason before this process ends because another rank was lost.

        Raises `ModelError`, `ConfigError`, or `EngineError` if the device has too little memory.
        """
        folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
        build = _with_ranks(build_runner, config, folder, lost)
        device = device_of(config)  # after Ray, if it starts the ranks, has assigned the GPUs
        self.spec = spec = _resolved(spec or read_spec(folder, config.hf_overrides), config, eos_token_ids, device)
        self.options = options = runner_options(config, spec, offline, device)
        self._runner: Runner | None = _build(build, folder, spec, options, progress)
        runner = self._runner
        self._asleep: SleepingRunner | Callable[[], Runner] | None = None  # how it wakes up; None: it is awake
        self._rebuild = partial(_rebuilt, build_runner, config, folder, lost, spec, options, progress)
        self._progress = progress
        grammars = GrammarManager[Request](Compiler(partial(_load_vocabulary, config, folder, spec)))
        speculative = speculative_config(config.speculative_config)
        self.scheduler = Scheduler(
            [runner.num_blocks, runner.num_states] if runner.num_states else runner.num_blocks,
            runner.block_size,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            runner.max_model_len,
            config.enable_prefix_caching,
            runner.cache_groups,
            num_batches=options.num_stages,
            drafts=_draft_policy(speculative, options, grammars, runner) if speculative else None,
            has_host_tier=options.host_cache_bytes > 0,
        )
        self._tiered = TieredCache(self.scheduler, lambda: self.runner)
        self.in_flight: deque[Handle] = deque()  # launched and not read, in launch order
        self._max_in_flight = max(options.num_stages - 1, 1)  # after each `step`
        self.expert_tokens = ExpertTokens()
        self._recovery = Recovery(self.scheduler, lambda: self.runner.reset())
        self._guided = GuidedRequests(grammars, self.scheduler, self._recovery)
        self._begin_adapted = partial(self._new_adapted, config)
        self._adapted = self._begin_adapted()
        self._in_doubt = False  # a step failed midway: the content of the KV cache is unknown
        self._open_store = partial(self._opened_store, config, folder, options)
        self._store = self._open_store()
        self._debug_checks = config.debug_checks
        self._eos_token_ids = frozenset(spec.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._name = config.served_model_name[0] if config.served_model_name else short_name(config.model)

    @property
    def runner(self) -> Runner:
        """The executor of steps. Raises `EngineError` while there is none: the engine sleeps at level 2."""
        if self._runner is None:
            raise EngineError("the engine is asleep")
        return self._runner

    def summary(self) -> str:
        """Describe the engine in a few lines."""
        runner, options, spec = self.runner, self.options, self.spec
        num_tokens = self.scheduler.blocks.capacity(runner.max_model_len)
        size, unit = runner.kv_cache_bytes / 2**30, "GiB"
        if size < 1:
            size, unit = size * 1024, "MiB"
        quantised = "" if options.kv_dtype == options.dtype else ", fp8"
        weights = f" · {spec.quantization.method} weights" if spec.quantization else ""
        own = "" if runner.max_model_len == spec.context_length else f", of the model's own {spec.context_length:,}"
        states = f" · {runner.num_states:,} states" if runner.num_states else ""
        return (
            f"Quire {__version__} · {self._name} · {str(options.dtype).removeprefix('torch.')}{weights} · "
            f"{runner.device_name} · attention by {runner.attention_backend}\n"
            f"  KV cache {num_tokens:,} tokens ({runner.num_blocks:,} blocks{states}, {size:.1f} {unit}{quantised}): "
            f"{runner.cache_bound}\n"
            f"  context {runner.max_model_len:,}{own} · up to {options.max_num_seqs:,} requests at once"
        )

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError` if its id is in use, it can never run or the engine is asleep."""
        request_id, sampling = engine_request.request_id, engine_request.sampling
        if self.is_sleeping:
            raise ValueError("the engine is asleep: wake it up first")
        adapted = self._adapted
        is_held = adapted is not None and adapted.holds(request_id)
        if is_held or self._guided.holds(request_id) or self._recovery.holds(request_id):
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        request = Request(engine_request, self._eos_token_ids, seed)
        if engine_request.adapter is None:
            self._queue(request)
            return
        if adapted is None:
            raise ValueError("adapters are not served: start the engine with enable_lora")
        self.scheduler.check_new(request)
        adapted.add(request)

    def _queue(self, request: Request) -> None:
        """Queue a request whose adapter, if it has one, is in a slot."""
        if request.sampling.structured_outputs is None:
            self._recovery.queue(request)
        else:
            self._guided.add(request)

    def _new_adapted(self, config: EngineConfig) -> AdaptedRequests | None:
        """Return what holds requests with adapters, without any loaded adapter. None: adapters are not served."""
        if not config.enable_lora:
            return None
        return AdaptedRequests(self.runner, config.max_loras, config.num_loaded_loras, self._queue)

    def load_adapter(self, name: str, path: str, version: str) -> Future[str]:
        """Begin to read an adapter into host memory. The result says why it cannot be used; empty: it can."""
        if self.is_sleeping:
            raise EngineError("the engine is asleep")
        if self._adapted is None:
            raise ValueError("adapters are not served: start the engine with enable_lora")
        reason: Future[str] = Future()

        def done(ready: Future[Any]) -> None:
            error = ready.exception()
            if error is None or isinstance(error, ModelError):
                reason.set_result("" if error is None else str(error))
            else:
                reason.set_exception(error)

        self._adapted.load(Adapter(name, path, version)).add_done_callback(done)
        return reason

    def abort(self, request_id: str) -> bool:
        """Abort a request without further output. Returns False if there is none with this id."""
        held = self._adapted is not None and self._adapted.remove(request_id)
        return self._guided.abort(request_id) or held

    def has_work(self) -> bool:
        held = self._num_held > 0
        return held or self.scheduler.has_work() or self._recovery.is_active

    @property
    def _num_held(self) -> int:
        """Requests that wait for their grammar or their adapter."""
        return self._guided.num_held + (0 if self._adapted is None else self._adapted.num_held)

    def step(self) -> StepOutputs:
        """Launch the next step, then read the previous one, so that the device never waits for the CPU. In a pipeline,
        read the oldest step once there is one in flight for each stage. A step that has finished when it is launched is
        read at once.

        If a step fails, its requests run again, fewer at a time, and requests that fail alone finish with an error.
        Raises only errors that no single request causes.
        """
        self._in_doubt = True
        outputs = StepOutputs(outputs=self._queue_ready())
        try:
            self._on_device(self._tiered.before_step)
            scheduled = self.scheduler.schedule()
            launched = self._launch(scheduled)
            oldest = self._oldest_if_full(launched)
            result = self._on_device(oldest.read) if oldest is not None else None
            outputs.outputs += self._take_late()
            outputs = self._update(result, outputs)
            if launched is not None and launched.guided:
                outputs.outputs += self._on_device(self._guided.sample, launched, scheduled, oldest)
            if launched is not None and launched.has_ended:
                outputs = self._update(self._on_device(launched.read), outputs)
            elif launched is not None:
                self.in_flight.append(launched)
            elif not self.in_flight:
                self._on_device(self._tiered.wait)
        except _StepFailedError as failed:
            outputs.outputs += self._recover(failed.error)
        else:
            self._after_step(outputs)
        if self._adapted is not None:
            self._adapted.remove_finished(outputs.outputs)
        self._in_doubt = False
        return outputs

    def _launch(self, scheduled: SchedulerOutput) -> Handle | None:
        """Launch a step, or only what is to be copied if it has no requests."""
        if scheduled:
            return self._on_device(self.runner.launch, scheduled)
        if scheduled.moves is not None:
            self._on_device(self.runner.move_blocks, scheduled.moves)
        return None

    def _queue_ready(self) -> list[EngineOutput]:
        """Queue held requests that wait no more. Returns the outputs of those that cannot run."""
        failed = []
        if self._adapted is not None:
            failed = self._adapted.queue_ready(idle=not self.scheduler.has_work() and not self._guided.num_held)
        return failed + self._guided.queue_compiled()

    @staticmethod
    def _on_device(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call what may fail because of one request. Other errors, such as those of the scheduler, end the engine."""
        try:
            return call(*args, **options)
        except Exception as error:
            raise _StepFailedError(error) from None

    def _oldest_if_full(self, launched: Handle | None) -> Handle | None:
        """Take the oldest step in flight, if no further one may stay unread or nothing was launched."""
        is_full = launched is None or len(self.in_flight) == self._max_in_flight
        return self.in_flight.popleft() if self.in_flight and is_full else None

    def _take_late(self) -> list[EngineOutput]:
        late = self.scheduler.take_late()
        self._guided.remove_all(late)
        return late

    def _update(self, result: tuple[SchedulerOutput, StepResult] | None, before: StepOutputs) -> StepOutputs:
        """Pass a step's result to the scheduler and the grammars. Returns its outputs, then those of `before`."""
        if result is None:
            return before
        num_corrupted = self.scheduler.num_corrupted
        outputs = self.scheduler.update(*result)
        self.expert_tokens.observe(result[1].expert_tokens)
        if self.scheduler.num_corrupted > num_corrupted:
            _log_corrupted(outputs)
        outputs.outputs += self._guided.advance(outputs.outputs)
        outputs.outputs += before.outputs
        return outputs

    def _recover(self, error: Exception) -> list[EngineOutput]:
        """Recover from a failed step: steps in flight are lost. Returns the output of a request that failed alone."""
        self.in_flight.clear()
        failed = self._recovery.step_failed(error)
        self._guided.remove_all(failed)
        return failed

    def _after_step(self, outputs: StepOutputs) -> None:
        if self._recovery.observe(outputs):
            self.in_flight.clear()
        if self._debug_checks:
            self.scheduler.check()
            if self._adapted is not None:
                self._adapted.check()

    def idle(self) -> bool:
        """Do some background work while there is no request. Returns whether there is more to do."""
        self._guided.grammars.idle()
        return self._store is not None and self._store.idle()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats(self._num_held + len(self._recovery))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, without any change, while requests are running."""
        was_reset = self.scheduler.reset_prefix_cache()
        if was_reset and self._store is not None:
            self._store.clear()
        return was_reset

    @property
    def is_sleeping(self) -> bool:
        return self._asleep is not None

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`. The KV cache and the prefix cache are dropped; a prefix cache file is saved.

        `level`: 1: the weights move to host memory, so waking up is fast; 2: they are dropped, too, and loaded again.
        Without effect while the engine is asleep. Raises `EngineError` while a request is unfinished, and for level 1
        with several ranks.
        """
        if self.is_sleeping:
            return
        if level not in SLEEP_LEVELS:
            raise EngineError(f"the level of sleep must be 1 or 2, got {level!r}")
        runner = self.runner
        if level == 1 and not isinstance(runner, ModelRunner):
            raise EngineError("level 1 of sleep needs a model on one device: use level 2")
        if self.scheduler.queues or self._num_held or self._recovery.is_active:
            raise EngineError("the engine cannot sleep: requests are running")
        while self.has_work():  # steps of aborted requests
            self.step()
        self._close_store()
        self.scheduler.drain()
        counts = runner.num_blocks, runner.num_states, runner.cache_bound
        if level == 1:
            assert isinstance(runner, ModelRunner)
            self._asleep = SleepingRunner(runner)
            return
        runner.close()
        # What refers to the weights. Adapters are read again.
        self._runner = self._adapted = runner = None  # type: ignore[assignment]
        free_unused(self.options.device.torch_device)
        self._asleep = partial(self._rebuild, *counts)

    def wake_up(self) -> None:
        """End `sleep`. Without effect while the engine is awake. Raises `EngineError` if memory is too low by now; the
        engine is still asleep then.
        """
        if self._asleep is None:
            return
        try:
            if isinstance(self._asleep, SleepingRunner):
                self._asleep.wake_up(self._progress)
            else:
                self._runner = self._asleep()
                self._adapted = self._begin_adapted()
        except torch.OutOfMemoryError:
            raise EngineError(f"{self.options.device}: too little free memory to wake up") from None
        self._asleep = None
        self._store = self._open_store()

    def _opened_store(self, config: EngineConfig, folder: Path, options: RunnerOptions) -> PrefixCacheStore | None:
        if config.prefix_cache_file is None:
            return None
        pool = self.scheduler.blocks.pools.pools[0]
        return open_store(config, folder, options, self.runner.open_block_file, pool)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close(save=not self._in_doubt)
            self._store = None

    def close(self) -> None:
        """Save the prefix cache, end other ranks, and release the device's memory."""
        self._close_store()
        self.in_flight.clear()
        self._guided.grammars.close()
        self._asleep = None
        if self._runner is not None:
            self._runner.close()


def _rebuilt(
    build_runner: BuildRunner,
    config: EngineConfig,
    folder: Path,
    lost: Callable[[str], None] | None,
    spec: ModelSpec,
    options: RunnerOptions,
    progress: Progress,
    num_blocks: int,
    num_states: int,
    cache_bound: str,
) -> Runner:
    """Build the runner again, with as many blocks and states as it had: the scheduler counts on them."""
    options = replace(options, num_gpu_blocks_override=num_blocks, num_states_override=num_states)
    runner = _build(_with_ranks(build_runner, config, folder, lost), folder, spec, options, progress)
    runner.cache_bound = cache_bound
    return runner


def _log_corrupted(outputs: StepOutputs) -> None:
    for output in outputs.outputs:
        if output.error == FAULTS[NOT_FINITE]:
            _log.error("request %s: %s", output.request_id, output.error)


def _draft_policy(
    config: SpeculativeConfig, options: RunnerOptions, grammars: GrammarManager[Request], runner: Runner
) -> DraftPolicy:
    """Return what chooses the drafts of each step."""
    proposer = GuidedProposer(grammars, NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
    limits = DraftLimits(config.num_speculative_tokens, options.max_step_drafts, MAX_DRAFTED_SEQS)
    return DraftPolicy(proposer, limits, config.enable_adaptive_verification, device_seconds=runner.step_seconds)


def _load_vocabulary(config: EngineConfig, folder: Path, spec: ModelSpec) -> Vocabulary:
    return vocabulary_of(load_tokenizer(config, folder), spec.vocab_size, spec.eos_token_ids)


def _resolved(spec: ModelSpec, config: EngineConfig, eos_token_ids: Iterable[int], device: Device) -> ModelSpec:
    """Return the specification with the caller's end-of-text tokens and the quantisation that the device uses."""
    ends = tuple(dict.fromkeys((*spec.eos_token_ids, *eos_token_ids)))
    quantization = quantization_in_memory(spec, config, device)
    return replace(spec, eos_token_ids=ends, quantization=quantization)


def _with_ranks(
    build: BuildRunner, config: EngineConfig, folder: Path, lost: Callable[[str], None] | None
) -> BuildRunner:
    """Return `build` with what starts other ranks, and what is called when one is lost."""
    if config.distributed_executor_backend == "ray":
        build = partial(build, launcher=_launcher(config, folder))
    return partial(build, lost=lost) if lost is not None and config.num_ranks > 1 else build


def _launcher(config: EngineConfig, folder: Path) -> Launcher:
    try:
        return RayLauncher(config.num_ranks, config.device, folder)
    except LaunchError as error:
        raise EngineError(str(error)) from None


def _build(build: BuildRunner, folder: Path, spec: ModelSpec, options: RunnerOptions, progress: Progress) -> Runner:
    try:
        return build(folder, spec, options, progress=progress)
    except KVCacheTooSmallError as error:
        raise EngineError(str(error)) from None
    except torch.OutOfMemoryError:
        raise EngineError(
            f"{options.device}: out of memory while starting; use a lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs, or a smaller model"
        ) from None
