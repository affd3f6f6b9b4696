"""The engine: a scheduler and a runner in one loop, in one thread of one process."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from engine.core.drafts.proposer import NoProposer, Proposer
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import EngineError
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.files import Progress, silent
from engine.models.hub import resolve_model, short_name
from engine.models.spec import ModelSpec
from engine.processing.grammars import vocabulary_of
from engine.processing.input_processor import load_tokenizer
from engine.setup.drafter import with_drafter
from engine.setup.options import device_of, drafts_of, quantization_in_memory, runner_options
from engine.setup.speculative import SpeculativeConfig
from engine.setup.weight_source import WeightSource
from engine.stats import ExpertTokens
from engine.stepping.adapted import AdaptedRequests
from engine.stepping.engine_runner import BuildRunner, EngineRunner, RunnerBuilder
from engine.stepping.guided import GuidedProposer, GuidedRequests
from engine.stepping.intake import Intake
from engine.stepping.prefix_cache_store import Store, open_store
from engine.stepping.recovery import Recovery
from engine.stepping.tiered_cache import TieredCache
from engine.stepping.unread_steps import StepFailedError, UnreadSteps, on_device
from engine.structured.grammar import Compiler, Vocabulary
from engine.structured.grammar_manager import GrammarManager
from engine.version import __version__
from engine.worker.attention.group_attention import common_prefixes
from engine.worker.device import Device
from engine.worker.interface import Handle, Runner
from engine.worker.options import MAX_DRAFTED_SEQS, RunnerOptions
from engine.worker.parallel.launcher import Lost
from engine.worker.parallel.ranks import build_runner
from engine.worker.proposers.ngram import NgramProposer
from engine.worker.proposers.repeating import RepeatingProposer
from engine.worker.proposers.suffix import SuffixProposer

_log = logging.getLogger(__name__)


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
        lost: Lost | None = None,
    ) -> None:
        """Load the model and allocate the KV cache.

        `spec`: the model's specification, if it has been read already. `eos_token_ids`: end-of-text tokens in addition
        to those of the specification. `offline`: tune for throughput. `progress`: called with the progress of the
        start. `lost`: called with the reason when another rank was lost; if it returns True, steps raise
        `RankLostError`, otherwise this process ends.

        Raises `ModelError`, `ConfigError`, or `EngineError` if the device has too little memory.
        """
        folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
        self._builder = builder = RunnerBuilder(build_runner, config, folder, progress, lost)
        device = device_of(config)  # after Ray, if it starts the ranks, has assigned the GPUs
        self._hf_overrides = config.hf_overrides
        self._resolve = partial(_resolved, config=config, eos_token_ids=tuple(eos_token_ids), device=device)
        self.spec = spec = self._resolve(spec or read_spec(folder, config.hf_overrides))
        self.options = options = with_drafter(runner_options(config, spec, offline, device), config, spec)
        self._runner = EngineRunner(builder, spec, options)
        grammars = GrammarManager[Request](Compiler(partial(_load_vocabulary, config, folder, spec)))
        self.scheduler = _new_scheduler(config, spec, options, self.runner, grammars)
        self._tiered = TieredCache(
            self.scheduler, lambda: self.runner, lambda: self._store, has_host=options.host_cache_bytes > 0
        )
        self.in_flight = UnreadSteps(options.num_stages)
        self.expert_tokens = ExpertTokens()
        self._recovery = Recovery(self.scheduler, lambda: self.runner.reset())
        self._guided = GuidedRequests(grammars, self.scheduler, self._recovery)
        num_slots = config.max_loras if config.enable_lora else 0
        self._adapted = AdaptedRequests(lambda: self.runner, num_slots, config.num_loaded_loras, self._guided.queue)
        self._intake = Intake(self._adapted, self._guided, self._recovery, self.scheduler)
        self._in_doubt = False  # a step failed midway: the content of the KV cache is unknown
        self._open_store = partial(_opened_store, config, options)
        self._store = self._open_store(builder, self.runner, self.scheduler)
        self._debug_checks = config.debug_checks
        self._eos_token_ids = frozenset(spec.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._name = config.served_model_name[0] if config.served_model_name else short_name(config.model)

    @property
    def runner(self) -> Runner:
        """The executor of steps. Raises `EngineError` while there is none: the engine sleeps at level 2."""
        return self._runner.awake

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
        reads = "" if spec.vision is None else " · reads text and images"
        return (
            f"Quire {__version__} · {self._name} · {str(options.dtype).removeprefix('torch.')}{weights} · "
            f"{runner.device_name} · attention by {runner.attention_backend}\n"
            f"  KV cache {num_tokens:,} tokens ({runner.num_blocks:,} blocks{states}, {size:.1f} {unit}{quantised}): "
            f"{runner.cache_bound}\n"
            f"  context {runner.max_model_len:,}{own} · up to {options.max_num_seqs:,} requests at once{reads}"
        )

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError` if its id is in use, it can never run or the engine is asleep."""
        if self.is_sleeping:
            raise ValueError("the engine is asleep: wake it up first")
        seed = engine_request.sampling.seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        self._intake.add(Request(engine_request, self._eos_token_ids, seed))

    def load_adapter(self, name: str, path: str, version: str) -> Future[str]:
        """Begin to read an adapter into host memory. The result says why it cannot be used; empty: it can."""
        if self.is_sleeping:
            raise EngineError("the engine is asleep")
        return self._adapted.usable(Adapter(name, path, version))

    def abort(self, request_id: str) -> bool:
        """Abort a request without further output. Returns False if there is none with this id."""
        return self._intake.abort(request_id)

    def has_work(self) -> bool:
        return self._intake.has_work()

    def step(self) -> StepOutputs:
        """Launch the next step, then read the previous one, so that the device never waits for the CPU. In a pipeline,
        read the oldest step once there is one in flight for each stage. A step that has finished when it is launched is
        read at once.

        If a step fails, its requests run again, fewer at a time, and requests that fail alone finish with an error.
        Raises only errors that no single request causes.
        """
        self._in_doubt = True
        outputs = StepOutputs(outputs=self._intake.queue_ready())
        try:
            self._step(outputs)
        except StepFailedError as failed:
            outputs.outputs += self._recover(failed.error)
        else:
            self._after_step(outputs)
        self._adapted.remove_finished(outputs.outputs)
        self._in_doubt = False
        return outputs

    def _step(self, outputs: StepOutputs) -> None:
        scheduled, launched = self._launch_next()
        oldest = self.in_flight.take_oldest(launched)
        result = on_device(oldest.read) if oldest is not None else None
        outputs.outputs += self._take_late()
        if result is not None:
            self._update(*result, outputs)
            if launched is None:  # the next step waited for these tokens: it runs while they are sent
                scheduled, launched = self._launch_next()
                outputs.outputs += self._take_late()
        if launched is None:
            if not self.in_flight:
                on_device(self._tiered.wait)
            return
        if launched.guided:
            outputs.outputs += on_device(self._guided.sample, launched, scheduled, oldest)
        if launched.has_ended and result is None:
            self._update(*on_device(launched.read), outputs)
        else:
            self.in_flight.append(launched)

    def _launch_next(self) -> tuple[SchedulerOutput, Handle | None]:
        """Schedule and launch the next step, if there is one."""
        on_device(self._tiered.before_step)
        scheduled = self.scheduler.schedule()
        launched = self._launch(scheduled)
        self._tiered.after_launch()
        return scheduled, launched

    def _launch(self, scheduled: SchedulerOutput) -> Handle | None:
        """Launch a step, or only what is to be copied if it has no requests."""
        if scheduled:
            return on_device(self.runner.launch, scheduled)
        if scheduled.moves is not None:
            on_device(self.runner.move_blocks, scheduled.moves)
        return None

    def _take_late(self) -> list[EngineOutput]:
        late = self.scheduler.take_late()
        self._guided.remove_all(late)
        return late

    def _update(self, scheduled: SchedulerOutput, result: StepResult, outputs: StepOutputs) -> None:
        """Pass a step's result to the scheduler and the grammars. Its outputs come before the others in `outputs`."""
        num_corrupted = self.scheduler.num_corrupted
        updated = self.scheduler.update(scheduled, result)
        self.expert_tokens.observe(result.expert_tokens)
        if self.scheduler.num_corrupted > num_corrupted:
            _log_corrupted(updated)
        updated.outputs += self._guided.advance(updated.outputs)
        outputs.put_before(updated)

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
            self._adapted.check()

    def idle(self) -> bool:
        """Do some background work while there is no request. Returns whether there is more to do."""
        self._guided.grammars.idle()
        if not self.is_sleeping:
            self._tiered.before_step()
        return self._store is not None and self._store.idle()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats(self._intake.num_waiting)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, without any change, while requests are running."""
        was_reset = self.scheduler.reset_prefix_cache()
        if was_reset and self._store is not None:
            self._store.clear()
        return was_reset

    @property
    def is_sleeping(self) -> bool:
        return self._runner.is_asleep

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`. The KV cache and the prefix cache are dropped; a prefix cache file is saved.

        `level`: 1: the weights move to host memory, so waking up is fast; 2: they are dropped, too, and loaded again.
        Without effect while the engine is asleep. Raises `EngineError` while a request is unfinished, and for level 1
        with several ranks.
        """
        if self.is_sleeping:
            return
        self._runner.check_sleep(level)
        if not self._intake.is_empty():
            raise EngineError("the engine cannot sleep: requests are running")
        while self.has_work():  # steps of aborted requests
            self.step()
        self._close_store()
        self.scheduler.drain()
        if level == 2:
            self._adapted.forget_adapters()  # they are read again
        self._runner.sleep(level)

    def wake_up(self) -> None:
        """End `sleep`. Without effect while the engine is awake. Raises `EngineError` if memory is too low by now; the
        engine is still asleep then.
        """
        if self.is_sleeping:
            self._runner.wake_up()
            self._store = self._open_store(self._builder, self.runner, self.scheduler)

    def update_weights(self, path: str, overlays: Sequence[str] = ()) -> None:
        """Replace the weights by those of another folder, in the same format, and some tensors by those of `overlays`,
        see `WeightSource`. The prefix cache is emptied.

        Raises `EngineError` while a request is unfinished or the engine sleeps, and if the folder cannot be used: the
        weights are those of before then.
        """
        if self.is_sleeping:
            raise EngineError("the engine is asleep: wake it up first")
        builder, folder = self._builder, Path(path).expanduser().absolute()
        before = builder.folder, builder.overlays
        self._check_weights(folder)
        self.sleep(level=2)
        builder.folder, builder.overlays = folder, tuple(overlays)
        self.scheduler.blocks.weights_replaced(1)
        try:
            self.wake_up()
        except (ModelError, EngineError) as error:
            builder.folder, builder.overlays = before
            self.scheduler.blocks.weights_replaced(-1)
            self.wake_up()
            source = overlays[-1] if overlays else folder
            raise EngineError(f"the weights in {source} cannot be used, those of before stay: {error}") from None

    @property
    def weights(self) -> WeightSource:
        """The source of the weights."""
        return WeightSource(str(self._builder.folder), self._builder.overlays)

    def _check_weights(self, folder: Path) -> None:
        """Raise `EngineError` unless the folder has weights of this model."""
        if not folder.is_dir():
            raise EngineError(f"there is no folder {folder}")
        if self.options.drafter is not None:
            raise EngineError(
                'weights cannot be replaced while a model drafts: set speculative_config {"num_speculative_tokens": 0}'
            )
        try:
            spec = self._resolve(read_spec(folder, self._hf_overrides))
        except ModelError as error:
            raise EngineError(str(error)) from None
        if spec != self.spec:
            raise EngineError(f"{folder} holds another model: its config.json differs from that of the one served")

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close(save=not self._in_doubt)
            self._store = None

    def close(self) -> None:
        """Save the prefix cache, end other ranks, and release the device's memory."""
        self._close_store()
        self.in_flight.clear()
        self._guided.grammars.close()
        self._runner.close()


def _new_scheduler(
    config: EngineConfig, spec: ModelSpec, options: RunnerOptions, runner: Runner, grammars: GrammarManager[Request]
) -> Scheduler:
    drafts = drafts_of(config, spec, options.device)
    scheduler = Scheduler(
        [runner.num_blocks, runner.num_states] if runner.num_states else runner.num_blocks,
        runner.block_size,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        runner.max_model_len,
        config.enable_prefix_caching and not options.whole_prompts,
        runner.cache_groups,
        num_batches=options.num_stages,
        drafts=_draft_policy(drafts, options, grammars, runner) if drafts is not None else None,
        has_tiers=options.host_cache_bytes > 0 or (config.prefix_cache_file is not None and config.num_ranks == 1),
        whole_prompts=options.whole_prompts,
    )
    scheduler.common_prefixes = common_prefixes(runner.cache_groups, options)
    return scheduler


def _opened_store(
    config: EngineConfig, options: RunnerOptions, builder: RunnerBuilder, runner: Runner, scheduler: Scheduler
) -> Store | None:
    if config.prefix_cache_file is None:
        return None
    options = replace(options, weight_overlays=builder.overlays)
    return open_store(config, builder.folder, options, runner.open_block_file, scheduler.blocks)


def _log_corrupted(outputs: StepOutputs) -> None:
    for output in outputs.outputs:
        if output.error == FAULTS[NOT_FINITE]:
            _log.error("request %s: %s", output.request_id, output.error)


def _draft_policy(
    config: SpeculativeConfig, options: RunnerOptions, grammars: GrammarManager[Request], runner: Runner
) -> DraftPolicy:
    """Return what chooses the drafts of each step."""
    lookup: Proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    finished = None
    if (suffix_limits := config.suffix_limits) is not None:
        lookup = suffix = SuffixProposer(suffix_limits, lookup)
        finished = suffix.finish
    elif config.rejects:
        lookup = NoProposer()  # a lookup's choice beside a drafter's would change the distribution of its drafts
    elif config.imposed is not None and options.drafter is None:
        lookup = RepeatingProposer()
    proposer = GuidedProposer(grammars, lookup)
    limits = DraftLimits(config.num_speculative_tokens, options.max_step_drafts, MAX_DRAFTED_SEQS)
    adaptive, num_by_model = config.enable_adaptive_verification, 0
    if options.drafter is not None:
        num_by_model = options.max_request_drafts
    return DraftPolicy(proposer, limits, adaptive, num_by_model, runner.step_seconds, finished)


def _load_vocabulary(config: EngineConfig, folder: Path, spec: ModelSpec) -> Vocabulary:
    return vocabulary_of(load_tokenizer(config, folder), spec.vocab_size, spec.eos_token_ids)


def _resolved(spec: ModelSpec, config: EngineConfig, eos_token_ids: Iterable[int], device: Device) -> ModelSpec:
    """Return the specification with the caller's end-of-text tokens and the quantisation that the device uses."""
    ends = tuple(dict.fromkeys((*spec.eos_token_ids, *eos_token_ids)))
    quantization = quantization_in_memory(spec, config, device)
    return replace(spec, eos_token_ids=ends, quantization=quantization)
