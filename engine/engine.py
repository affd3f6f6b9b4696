"""Where policy meets mechanism: one loop, one thread, one process. Knows no text and no HTTP."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.batch import EngineOutput, ScheduledBatch, SchedulerOutput, SchedulerStats, StepOutputs, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError, EngineError
from engine.input_processor import context_length, load_tokenizer, vocabulary_of
from engine.models.families import read_spec
from engine.models.hub import resolve_model
from engine.models.spec import ModelSpec
from engine.structured.grammar import Compiler, Vocabulary
from engine.structured.grammar_manager import GrammarManager
from engine.worker.kv_cache import KVCacheTooSmallError
from engine.worker.model_runner import ModelRunner, RunnerOptions

_log = logging.getLogger(__name__)

IDLE_SECONDS = 0.02  # to wait for a grammar when there is nothing else to do
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Handle(Protocol):
    """A launched step. Requests in `guided` get their tokens by `constrain` from filled `masks`, the others at once.

    `deferred`: the shares of those that were late for that. `device_waited`: the step before had guided requests, and
    came too late to keep the device busy.
    """

    guided: list[str]
    masks: np.ndarray
    deferred: frozenset[int]
    device_waited: bool

    def constrain(self, late: Sequence[int] = ()) -> None: ...
    def read(self) -> tuple[SchedulerOutput, StepResult]: ...


class Runner(Protocol):
    """The mechanism, as the engine uses it."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def device_name(self) -> str: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    def launch(self, output: SchedulerOutput) -> Handle: ...
    def close(self) -> None: ...


BuildRunner = Callable[..., Runner]  # (folder, spec, options, *, progress) as ModelRunner.build


class Engine:
    """A model, its scheduler and its runner. `add_request`, then `step` until `has_work` is false.

    After an exception from `step` the engine is to be given up.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        offline: bool = False,
        progress: bool = True,
        build_runner: BuildRunner = ModelRunner.build,
    ) -> None:
        """`eos_token_ids`: ends of text beyond those in the model's configuration. `offline`: tuned for throughput.

        Raises `ModelError`, `ConfigError`, and `EngineError` when the device's memory does not suffice.
        """
        folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
        spec = read_spec(folder)
        spec = replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *eos_token_ids))))
        self.spec = spec
        self.options = runner_options(config, spec, offline)
        self.runner = _build(build_runner, folder, spec, self.options, progress)
        self.scheduler = Scheduler(
            self.runner.num_blocks,
            self.runner.block_size,
            self.options.max_num_seqs,
            self.options.max_num_batched_tokens,
            self.runner.max_model_len,
            config.enable_prefix_caching,
        )
        self.in_flight: Handle | None = None
        self._debug_checks = config.debug_checks
        self._grammars = GrammarManager(Compiler(partial(_load_vocabulary, config, folder, spec)))
        self._seconds_left = 0.0  # for which the device was still busy when the last step was to be read
        self._held: dict[str, Request] = {}  # their grammars are being compiled
        self._eos_token_ids = frozenset(spec.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._name = config.served_model_name[0] if config.served_model_name else folder.name
        gc.collect()
        gc.freeze()

    def summary(self) -> str:
        """What was started, in one line."""
        runner, num_tokens = self.runner, self.runner.num_blocks * self.runner.block_size
        size, unit = runner.kv_cache_bytes / 2**30, "GiB"
        if size < 1:
            size, unit = size * 1024, "MiB"
        quantised = "" if self.options.kv_dtype == self.options.dtype else ", fp8"
        return (
            f"{self._name} · {str(self.options.dtype).removeprefix('torch.')} · {runner.device_name} · "
            f"KV cache {num_tokens:,} tokens ({runner.num_blocks:,} blocks, {size:.1f} {unit}{quantised}) · "
            f"context {runner.max_model_len:,}"
        )

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request; `ValueError` when its id is in use or it can never run."""
        request_id, sampling = engine_request.request_id, engine_request.sampling
        if request_id in self._held:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        request = Request(engine_request, self._eos_token_ids, seed)
        if (structured := sampling.structured_outputs) is None:
            self.scheduler.add(request)
        else:
            self.scheduler.check_new(request)
            assert structured.compiled is not None, "front ends check grammars"
            self._grammars.add(request_id, structured.compiled)
            self._held[request_id] = request

    def abort(self, request_id: str) -> bool:
        """End a request; nothing more is heard of it. False when there is none of this id."""
        self._grammars.forget(request_id)
        return self._held.pop(request_id, None) is not None or self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._held)

    def step(self) -> StepOutputs:
        """Launch the next step, then read the one before it, so that the device never waits for the CPU."""
        failed = self._take_compiled() if self._held else []
        output = self.scheduler.schedule()
        launched = self.runner.launch(output) if output else None
        outputs = StepOutputs()
        if self.in_flight:
            start = perf_counter()
            read = self.in_flight.read()
            self._seconds_left = perf_counter() - start
            outputs = self.scheduler.update(*read)
        outputs.outputs += failed
        if self._grammars:
            outputs.outputs += self._constrain(launched, output.batch, outputs.outputs)
        self.in_flight = launched
        if self._debug_checks:
            self.scheduler.check()
        return outputs

    def _take_compiled(self) -> list[EngineOutput]:
        """Queue the requests whose grammars are ready; the news of those whose never will be."""
        if not self.scheduler.has_work():
            self._grammars.wait(IDLE_SECONDS)
        failed = []
        for request_id, error in self._grammars.take_ready():
            request = self._held.pop(request_id)
            if error:
                _log.error("request %s: its grammar cannot be compiled: %s", request_id, error)
                failed.append(EngineOutput(request_id, [], "error"))
            else:
                self.scheduler.add(request)
        return failed

    def _constrain(
        self, launched: Handle | None, shares: ScheduledBatch, news: list[EngineOutput]
    ) -> list[EngineOutput]:
        """Follow grammars by what was read, and say what may come next to the step that waits for it on the device.

        All tokens of requests with grammars are news. Where other requests share the step, grammars have the time that the
        device needs for it, and who is not ready by then waits for the next one. Returns the news of those whose grammar
        has become too complex to go on with.
        """
        for output in news:
            if output.finish_reason is None:
                self._grammars.advance(output.request_id, output.new_token_ids)
            else:
                self._grammars.forget(output.request_id)
        if launched is None or not launched.guided:
            return []
        if self.in_flight is not None and self.in_flight.guided:
            self._grammars.keep_pace(launched.device_waited, self._seconds_left)
        hurry = len(launched.guided) < len(shares)
        late, errors = self._grammars.fill(launched.guided, launched.masks, hurry)
        launched.constrain(late)
        self.scheduler.defer(launched.deferred)
        for request_id, error in errors.items():
            _log.error("request %s: its grammar cannot be followed any further: %s", request_id, error)
            self.abort(request_id)
        return [EngineOutput(request_id, [], "error") for request_id in errors]

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; false, and nothing is forgotten, while requests are running."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Give the device's memory back."""
        self.in_flight = None
        self._grammars.close()
        self.runner.close()
        gc.unfreeze()


def runner_options(config: EngineConfig, spec: ModelSpec, offline: bool) -> RunnerOptions:
    """Every choice left open in `config`, made for this model, this device and this use."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device must be cpu (PyTorch sees no CUDA GPU here), got 'cuda'")
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if config.dtype != "auto":
        dtype = DTYPES[config.dtype]
    elif on_gpu:
        dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
    else:
        dtype = torch.float32
    fp8 = config.kv_cache_dtype != "auto"
    if fp8 and on_gpu and (capability := torch.cuda.get_device_capability()) < (8, 9):
        raise ConfigError(
            f"kv_cache_dtype must be auto on this GPU, got {config.kv_cache_dtype!r}: its compute capability is "
            f"{capability[0]}.{capability[1]}, fp8 needs 8.9 (Ada, Hopper and later)"
        )
    return RunnerOptions(
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        dtype=dtype,
        kv_dtype=torch.float8_e4m3fn if fp8 else dtype,
        calculate_kv_scales=config.calculate_kv_scales,
        max_model_len=context_length(config, spec),
        max_num_seqs=config.max_num_seqs or (1024 if _is_large_gpu(on_gpu) else 256),
        max_num_batched_tokens=config.max_num_batched_tokens or (2048 if not on_gpu else 16384 if offline else 8192),
        block_size=config.block_size,
        load_format=config.load_format,
        seed=config.seed,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        enforce_eager=config.enforce_eager,
    )


def _is_large_gpu(on_gpu: bool) -> bool:
    """Whether the GPU's memory holds the contexts of a thousand requests."""
    return on_gpu and torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >= 64 << 30


def _load_vocabulary(config: EngineConfig, folder: Path, spec: ModelSpec) -> Vocabulary:
    return vocabulary_of(load_tokenizer(config, folder), spec.vocab_size, spec.eos_token_ids)


def _build(build: BuildRunner, folder: Path, spec: ModelSpec, options: RunnerOptions, progress: bool) -> Runner:
    try:
        return build(folder, spec, options, progress=progress)
    except KVCacheTooSmallError as error:
        raise EngineError(str(error)) from None
    except torch.OutOfMemoryError:
        raise EngineError(
            f"{options.device}: out of memory while starting; use a lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs, or a smaller model"
        ) from None
