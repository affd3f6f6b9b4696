"""The engine: a scheduler and a runner in one loop, in one thread of one process."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine import __version__
from engine.config import EngineConfig
from engine.core.batch import (
    FAULTS,
    NOT_FINITE,
    EngineOutput,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerStats,
    StepOutputs,
    StepResult,
)
from engine.core.engine_request import EngineRequest
from engine.core.kv.cache_groups import CacheGroup
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import EngineError
from engine.models.families import read_spec
from engine.models.files import Progress, silent
from engine.models.hub import resolve_model
from engine.models.quantization import choose_quantization
from engine.models.spec import ModelSpec
from engine.options import device_of, runner_options
from engine.prefix_cache_store import PrefixCacheStore, open_store
from engine.processing.input_processor import load_tokenizer, vocabulary_of
from engine.recovery import Recovery, client_reason, failed_output, refused_output
from engine.stats import ExpertTokens
from engine.structured.grammar import Compiler, Vocabulary
from engine.structured.grammar_manager import GrammarManager
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions
from engine.worker.kv_cache import KVCacheTooSmallError
from engine.worker.options import RunnerOptions
from engine.worker.parallel.launcher import Launcher, LaunchError
from engine.worker.parallel.ranks import build_runner
from engine.worker.parallel.ray_launcher import RayLauncher

_log = logging.getLogger(__name__)


class Handle(Protocol):
    """A launched step. Requests at the `guided` indices of its batch are sampled once their `masks` are filled, all
    others at once.
    """

    @property
    def guided(self) -> list[int]:
        """Indices of requests that wait for grammar masks before they are sampled."""

    @property
    def masks(self) -> np.ndarray:
        """[len(guided), (vocabulary + 31) // 32] int32: one bit for each token, the lowest bit first."""

    @property
    def device_waited(self) -> bool:
        """Whether the previous step had guided requests and finished before this one was launched."""

    @property
    def wait_seconds(self) -> float:
        """Time that `read` waited for the device."""

    @property
    def has_ended(self) -> bool:
        """On a CPU, whether the step is sampled; elsewhere always False."""

    def sample(self, deferred: Sequence[int] = ()) -> None:
        """Sample the guided requests. `deferred`: indices without a filled mask."""

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        """Wait for the step and return its result."""


class Runner(Protocol):
    """The engine's view of what executes steps: a model runner, or one with follower ranks."""

    num_blocks: int
    block_size: int
    max_model_len: int
    cache_bound: str  # what limits `num_blocks`, for display

    @property
    def attention_backend(self) -> str: ...
    @property
    def cache_groups(self) -> Sequence[CacheGroup]: ...
    @property
    def device_name(self) -> str: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    def launch(self, output: SchedulerOutput) -> Handle: ...
    def reset(self) -> None: ...
    def open_block_file(self, options: BlockFileOptions) -> BlockFile | None: ...  # None: it cannot be used
    def close(self) -> None: ...


BuildRunner = Callable[..., Runner]  # (folder, spec, options, *, progress, launcher, lost), as `ranks.build_runner`


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
        spec = read_spec(folder, config.hf_overrides) if spec is None else spec
        if config.distributed_executor_backend == "ray":  # Ray assigns the GPUs, before the device is opened
            build_runner = partial(build_runner, launcher=_launcher(config, folder))
        if lost is not None and config.num_ranks > 1:
            build_runner = partial(build_runner, lost=lost)
        device = device_of(config)
        spec = replace(
            spec,
            eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *eos_token_ids))),
            quantization=choose_quantization(
                spec.quantization, config.quantization, rounds_head=not device.is_accelerator
            ),
        )
        self.spec = spec
        self.options = runner_options(config, spec, offline, device)
        self.runner = _build(build_runner, folder, spec, self.options, progress)
        self.scheduler = Scheduler(
            self.runner.num_blocks,
            self.runner.block_size,
            self.options.max_num_seqs,
            self.options.max_num_batched_tokens,
            self.runner.max_model_len,
            config.enable_prefix_caching,
            self.runner.cache_groups,
            num_batches=self.options.num_stages,
        )
        self.in_flight: deque[Handle] = deque()  # launched and not read, in launch order
        self._max_in_flight = max(self.options.num_stages - 1, 1)  # after each `step`
        self.expert_tokens = ExpertTokens()
        self._recovery = Recovery(self.scheduler, self.runner.reset)
        self._in_doubt = False  # a step failed midway: the content of the KV cache is unknown
        self._store: PrefixCacheStore | None = None
        if config.prefix_cache_file is not None:
            self._store = open_store(
                config, folder, self.options, self.runner.open_block_file, self.scheduler.blocks.pool
            )
        self._debug_checks = config.debug_checks
        self._grammars = GrammarManager[Request](Compiler(partial(_load_vocabulary, config, folder, spec)))
        self._eos_token_ids = frozenset(spec.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._name = config.served_model_name[0] if config.served_model_name else folder.name

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
        return (
            f"Quire {__version__} · {self._name} · {str(options.dtype).removeprefix('torch.')}{weights} · "
            f"{runner.device_name} · attention by {runner.attention_backend}\n"
            f"  KV cache {num_tokens:,} tokens ({runner.num_blocks:,} blocks, {size:.1f} {unit}{quantised}): "
            f"{runner.cache_bound}\n"
            f"  context {runner.max_model_len:,}{own} · up to {options.max_num_seqs:,} requests at once"
        )

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError` if its id is in use or it can never run."""
        request_id, sampling = engine_request.request_id, engine_request.sampling
        if self._grammars.holds(request_id) or self._recovery.holds(request_id):
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        request = Request(engine_request, self._eos_token_ids, seed)
        if (structured := sampling.structured_outputs) is None:
            self._recovery.queue(request)
        else:
            self.scheduler.check_new(request)
            assert structured.compiled is not None, "the input processor checks grammars"
            self._grammars.add(request_id, structured.compiled, request, engine_request.owner)

    def abort(self, request_id: str) -> bool:
        """Abort a request without further output. Returns False if there is none with this id."""
        held = self._grammars.remove(request_id)
        return self._recovery.remove(request_id) or held or self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or self._grammars.num_held > 0 or self._recovery.is_active

    def step(self) -> StepOutputs:
        """Launch the next step, then read the previous one, so that the device never waits for the CPU. In a pipeline,
        read the oldest step once there is one in flight for each stage. A step that has finished when it is launched is
        read at once.

        If a step fails, its requests run again, fewer at a time, and requests that fail alone finish with an error.
        Raises only errors that no single request causes.
        """
        self._in_doubt = True
        outputs = self._step()
        self._in_doubt = False
        return outputs

    def _step(self) -> StepOutputs:
        failed = self._add_compiled() if self._grammars.num_held else []
        output = self.scheduler.schedule()
        try:
            launched = self.runner.launch(output) if output else None
            is_full = launched is None or len(self.in_flight) == self._max_in_flight
            oldest = self.in_flight.popleft() if self.in_flight and is_full else None
            read = oldest.read() if oldest is not None else None
        except Exception as error:
            return self._step_failed(error, StepOutputs(outputs=failed))
        if expired := self.scheduler.expire():
            failed += expired
            for each in expired:
                self._grammars.remove(each.request_id)
        outputs = self._update(read) if read is not None else StepOutputs()
        outputs.outputs += failed
        try:
            if launched is not None and launched.guided:
                outputs.outputs += self._sample_guided(launched, output.batch, oldest)
            read = launched.read() if launched is not None and launched.has_ended else None
        except Exception as error:
            return self._step_failed(error, outputs)
        if read is not None:
            before = outputs.outputs
            outputs = self._update(read)
            outputs.outputs += before
        elif launched is not None:
            self.in_flight.append(launched)
        if self._recovery.is_active and self._recovery.see(outputs):
            self.in_flight.clear()
        if self._debug_checks:
            self.scheduler.check()
        return outputs

    def idle(self) -> bool:
        """Do some background work while there is no request. Returns whether there is more to do."""
        self._grammars.idle()
        return self._store is not None and self._store.idle()

    def _update(self, read: tuple[SchedulerOutput, StepResult]) -> StepOutputs:
        """Pass a step's result to the scheduler and the grammars. Returns the outputs."""
        num_corrupted = self.scheduler.num_corrupted
        outputs = self.scheduler.update(*read)
        self.expert_tokens.see(read[1].expert_tokens)
        if self.scheduler.num_corrupted > num_corrupted:
            _log_corrupted(outputs)
        if self._grammars.num_followed:
            outputs.outputs += self._advance_grammars(outputs.outputs)
        return outputs

    def _step_failed(self, error: Exception, outputs: StepOutputs) -> StepOutputs:
        """Recover from a failed step: steps in flight are lost. `outputs`: of earlier steps, to be completed."""
        self.in_flight.clear()
        for output in self._recovery.step_failed(error):
            self._grammars.remove(output.request_id)
            outputs.outputs.append(output)
        return outputs

    def _add_compiled(self) -> list[EngineOutput]:
        """Queue the requests with compiled grammars. Returns the outputs of requests with failed compilations."""
        ready, errors = self._grammars.take_compiled(idle=not self.scheduler.has_work())
        outputs = [
            refused_output(request_id, "its grammar cannot be compiled", error) for request_id, error in errors.items()
        ]
        for request in ready:
            try:
                self._recovery.queue(request)
            except Exception as error:
                self.abort(request.request_id)
                outputs.append(failed_output(request.request_id, client_reason(error), exc_info=True))
        return outputs

    def _advance_grammars(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Advance grammars by their requests' new tokens. Returns the outputs of requests whose grammars failed."""
        errors = {}
        for output in outputs:
            if output.finish_reason is not None:
                self._grammars.remove(output.request_id)
            elif error := self._grammars.advance(output.request_id, output.new_token_ids):
                errors[output.request_id] = error
        return self._grammar_failed(errors)

    def _grammar_failed(self, errors: dict[str, str]) -> list[EngineOutput]:
        for request_id in errors:
            self.abort(request_id)
        return [
            refused_output(request_id, "its grammar cannot be followed any further", error)
            for request_id, error in errors.items()
        ]

    def _sample_guided(self, launched: Handle, batch: ScheduledBatch, before: Handle | None) -> list[EngineOutput]:
        """Sample the requests that wait for masks. If the batch has other requests too, masks have a deadline, and
        requests whose masks miss it are deferred. `before`: the step that was read last. Returns the outputs of
        requests whose grammars failed.
        """
        if before is not None and before.guided:
            self._grammars.learn_deadline(launched.device_waited, before.wait_seconds)
        guided = launched.guided
        request_ids = [batch.request_ids[index] for index in guided]
        late, errors = self._grammars.fill(request_ids, launched.masks, by_deadline=len(guided) < len(batch))
        deferred = [guided[i] for i in late]
        launched.sample(deferred)
        self.scheduler.defer(deferred)
        return self._grammar_failed(errors)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats(self._grammars.num_held + len(self._recovery))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, without any change, while requests are running."""
        was_reset = self.scheduler.reset_prefix_cache()
        if was_reset and self._store is not None:
            self._store.clear()
        return was_reset

    def close(self) -> None:
        """Save the prefix cache, end other ranks, and release the device's memory."""
        if self._store is not None:
            self._store.close(save=not self._in_doubt)
            self._store = None
        self.in_flight.clear()
        self._grammars.close()
        self.runner.close()


def _log_corrupted(outputs: StepOutputs) -> None:
    for output in outputs.outputs:
        if output.error == FAULTS[NOT_FINITE]:
            _log.error("request %s: %s", output.request_id, output.error)


def _load_vocabulary(config: EngineConfig, folder: Path, spec: ModelSpec) -> Vocabulary:
    return vocabulary_of(load_tokenizer(config, folder), spec.vocab_size, spec.eos_token_ids)


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
