"""Builds a runner from a model's files: weights, compiled kernels, KV scales, KV cache, CUDA graphs."""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import kernels
from engine.core.batch import NewRequest, ScheduledBatch, SchedulerOutput
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import StructuredOutputs
from engine.models.attention import Attention
from engine.models.checkpoints import GGUFCheckpoint, open_checkpoint
from engine.models.decoder import DecoderLayer
from engine.models.errors import ModelError
from engine.models.files import Progress, silent
from engine.models.formats import log_compression, weight_formats
from engine.models.matrix import Scope
from engine.models.shard import SINGLE, WHOLE, Communicator, Shard, SingleRank, Stage
from engine.models.spec import ModelSpec
from engine.models.weights import load_model
from engine.worker.adapter_slots import DUMMY
from engine.worker.attention.group_attention import StepLens
from engine.worker.captured_steps import MAX_TOKENS, CapturedSteps
from engine.worker.cuda_graphs import DecodeGraphs, PrefillGraphs, graph_sizes, prefill_shapes, prefix_sizes
from engine.worker.device import CudaDevice
from engine.worker.executor import Executor
from engine.worker.images import own_rows
from engine.worker.input_batch import segment_of
from engine.worker.kv_cache import blocks_asked_for, blocks_that_fit, e4m3_scales, encoder_blocks
from engine.worker.mapped_memory import MappedMemory, mapped_memory, own_workspaces
from engine.worker.model_runner import ModelRunner
from engine.worker.options import RunnerOptions
from engine.worker.parallel.communicator import StageLink
from engine.worker.parallel.cores import num_cores
from engine.worker.proposers.draft_graphs import run_all
from engine.worker.proposers.loading import load_proposer

_log = logging.getLogger(__name__)
CALIBRATION_TOKENS = 2048
MAX_COMPILE_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's connections to the other ranks, and the options for its device."""

    options: RunnerOptions
    communicator: Communicator  # connects the ranks of a stage
    link: StageLink | None  # connects the stages


def build_runner(
    folder: Path,
    spec: ModelSpec,
    options: RunnerOptions,
    *,
    progress: Progress = silent,
    shard: Shard = SINGLE,
    stage: Stage = WHOLE,
    connect: Callable[[], Membership] | None = None,
) -> ModelRunner:
    """Build a runner, ready to step, for the part `shard` of `stage` of the model in `folder`.

    `connect`: connects this rank to the others; None: it is the only one.

    Raises `ModelError` for unsuitable files, and `KVCacheTooSmallError` for a context that does not fit.
    """
    _choose_kernels(options, progress)
    with _compile_processes(options) as processes:  # get ready while ranks connect and weights load
        member = Membership(options, SingleRank(), None) if connect is None else connect()
        options = member.options
        scope = Scope(
            options.dtype,
            options.device.torch_device,
            weight_formats(spec.quantization, compress_experts=options.compress_experts),
            shard,
            member.communicator,
            stage=stage,
        )
        mapped = _mapped(options) if connect is None else None
        if mapped is not None:
            assert isinstance(options.device, CudaDevice)
            options = replace(options, device=replace(options.device, graph_pool=mapped.graph_pool))
        overlays = [Path(each) for each in options.weight_overlays]
        checkpoint = open_checkpoint(folder, options.load_format, options.seed, spec.quantization, overlays)
        if isinstance(checkpoint, GGUFCheckpoint):
            checkpoint.log_decoding(options.dtype)
        rows, length = own_rows(spec.vision, options.max_num_batched_tokens), options.max_model_len
        with nullcontext() if mapped is None else mapped.kept():
            model = load_model(checkpoint, spec, scope, progress=progress, max_model_len=length, own_rows=rows)
            model.pack_weights()
        if options.compress_experts:
            log_compression(model)
        runner = ModelRunner(model, spec, options, member.link)
        kernels.FORMS.hold(runner)
        if options.drafter is not None:
            runner.use_proposer(load_proposer(options.drafter, runner, scope, progress))
        runner.mapped = mapped
        if runner.device.is_accelerator:
            progress("compiling", 0, 0)
            compile_kernels(runner, processes)
    if options.calculate_kv_scales:
        calibrate_kv_scales(runner)
    progress("profiling", 0, 0)
    _size_caches(runner, member.communicator.least)
    prepare_steps(runner, progress)
    _allocate_host(runner, member.communicator.least)
    return runner


def _choose_kernels(options: RunnerOptions, progress: Progress) -> None:
    """Choose this process's number of threads and its kernels. Raises `ModelError` if there are none."""
    if not options.device.is_accelerator and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), num_cores()))
    try:
        kernels.FORMS.choose(options.deterministic)
        kernels.choose_kernels(options.device.torch_device, partial(progress, "compiling"))
    except RuntimeError as error:
        raise ModelError(str(error)) from None


def _size_caches(runner: ModelRunner, least: Callable[[int], int]) -> None:
    """Set the numbers of blocks on the device. `least`: minimum over all ranks."""
    (num_blocks, num_states), runner.cache_bound = count_blocks(runner)
    runner.num_blocks, runner.num_states = map(least, (num_blocks, num_states))
    runner.max_model_len = runner.kv_layout.context_that_fits(runner.num_blocks, runner.options)


def _allocate_host(runner: ModelRunner, least: Callable[[int], int]) -> None:
    """Let host memory for blocks be taken from now on: the start does not wait for it. `least`: see `_size_caches`."""
    if runner.host is not None:
        num_bytes = runner.options.host_cache_bytes
        slots = runner.kv_layout.host_slots(num_bytes, runner.num_blocks, runner.num_states)
        runner.host.allocate([least(count) for count in slots])


def prepare_steps(runner: ModelRunner, progress: Progress) -> None:
    """Allocate the KV cache and capture steps: what is left to do once the weights are on the device."""
    options, mapped = runner.options, runner.mapped
    with nullcontext() if mapped is None else mapped.dropped():
        runner.allocate_cache(runner.num_blocks, runner.num_states)
    if runner.host is not None:
        runner.host.attach(runner.block_parts())
    if runner.device.is_accelerator:
        dummy_run(runner, tokens_each=1)
        if not options.enforce_eager and not runner.spec.is_encoder:
            with nullcontext() if mapped is None else own_workspaces():
                capture_graphs(runner, progress)
        runner.device.synchronize()
    elif options.num_ranks_per_stage == options.num_stages == 1 and not (
        options.enforce_eager or runner.spec.is_encoder
    ):
        runner.executors = [CapturedSteps(runner.decode_step, runner.sampler, _packed_steps(runner, MAX_TOKENS))]


def _mapped(options: RunnerOptions) -> MappedMemory | None:
    """Return memory for what an engine gives back while it sleeps; None: everything is allocated again then."""
    return mapped_memory(options.device) if options.sleeps_fast and isinstance(options.device, CudaDevice) else None


def _compile_processes(options: RunnerOptions) -> AbstractContextManager[Any]:
    """Start processes that compile kernels, on one rank's share of this host's cores, if that is worth it."""
    num = min(num_cores() // options.num_ranks_per_stage, MAX_COMPILE_PROCESSES)
    on_gpu = options.device.torch_device.type == "cuda"
    return kernels.compile_processes(num) if on_gpu and num >= 2 else nullcontext()


@torch.inference_mode()
def compile_kernels(runner: ModelRunner, processes: Any = None) -> None:
    """Compile the kernels of every kind of step in parallel: this is several times as fast as one after another.

    Large steps are first: their kernels take longest.
    """
    max_decodes = runner.options.max_decodes
    with _temporary_cache(runner, 1), kernels.compiling_only(processes):
        _fullest_steps(runner)
        dummy_run(runner, tokens_each=1)
        packed = _packed_steps(runner, max_decodes)
        for size in reversed(graph_sizes(max_decodes)):
            # Powers of two and the sizes halfway between: other sizes use the same kernels.
            if size // (size & -size) in (1, 3) or size in (*kernels.FEW_SEQS, max_decodes):
                for has_adapters in _kinds(runner):
                    outputs = runner.decode_step.run(packed, size, has_adapters)
                if runner.decode_step.is_last:
                    runner.decode_step.sample_filtered(*outputs)
        if any(each.reads_prefixes_once for each in runner.forward.attentions):
            for size in prefix_sizes(graph_sizes(max_decodes)):
                runner.decode_step.run(packed, size, has_common_prefix=True)
        if runner.proposer is not None and not runner.options.enforce_eager:
            run_all(runner.proposer.works(), runner.device, runner.options.dtype)
    runner.batch.state.last_token.zero_()  # remove what the dummy run has left there


def calibrate_kv_scales(runner: ModelRunner) -> None:
    """Set every layer's scales of the e4m3 cache from a prompt of random tokens, run with an unquantised cache."""
    options, name = runner.options, "calibration"
    num_tokens = min(CALIBRATION_TOKENS, options.max_model_len - 1, options.max_num_batched_tokens)
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(runner.spec.vocab_size, (num_tokens,), generator=generator).tolist()
    count, num_groups = -(-num_tokens // options.block_size), len(runner.cache_groups)
    blocks = [list(range(group * count, (group + 1) * count)) for group in range(num_groups)]
    if runner.kv_layout.states is not None:
        blocks[-1] = list(range(count))  # in a pool of their own
    prompt = NewRequest(EngineRequest(name, ids, SamplingParams(temperature=0)), 0, ids, 0, blocks)
    with _temporary_cache(runner, num_groups * count, options.dtype, num_states=count), torch.inference_mode():
        _run(runner, [prompt], ScheduledBatch([name], [num_tokens], num_tokens, 0, []))
        for layer, kv in zip(runner.model.own_layers, runner.forward.kv_cache, strict=True):
            if not isinstance(kv, Tensor):  # a recurrent layer
                continue
            group = runner.kv_layout.group_of[layer]
            own = kv[:, group * count : (group + 1) * count]
            attention = cast(DecoderLayer, runner.model.layers[layer]).attention
            assert isinstance(attention, Attention)
            attention.kv_scale.copy_(e4m3_scales(own))
    _remove(runner, [name])


def count_blocks(runner: ModelRunner) -> tuple[tuple[int, int], str]:
    """Return the numbers of KV blocks and states, as requested or as fit beside a full step, and what limits them, for
    display.
    """
    options, layout = runner.options, runner.kv_layout
    if (asked_for := blocks_asked_for(layout, options)) is not None:
        return asked_for
    if runner.spec.is_encoder:
        return (encoder_blocks(options), 0), "one layer of two steps, which all layers share"
    if not runner.device.is_accelerator:
        num_bytes, bound = layout.cpu_cache_bytes(options, runner.device.memory().free)
        return layout.divided(num_bytes, options), bound
    runner.device.reset_peak_memory()
    with _temporary_cache(runner, 1):
        if runner.images is not None:
            with torch.inference_mode():
                runner.images.reserve()
        _fullest_steps(runner)
        runner.device.synchronize()
        counts = blocks_that_fit(layout, runner.device.memory(), options)
    if runner.images is not None:
        runner.images.clear()
    runner.device.reset_peak_memory()
    return counts, f"what is left of {options.gpu_memory_utilization:.0%} of the memory"


def capture_graphs(runner: ModelRunner, progress: Progress) -> None:
    """Capture the decode step for every padded batch size, and small steps with prefill."""
    splits_drafts = runner.options.splits_drafts
    sizes, forward = graph_sizes(runner.options.max_decodes), runner.forward
    buffer = _packed_steps(runner, sizes[-1])
    decodes = [
        DecodeGraphs(runner.device, runner.decode_step, buffer, sizes, progress, has_adapters, splits_drafts)
        for has_adapters in _kinds(runner)
    ]
    executors: list[Executor] = [*_prefix_graphs(runner, buffer, progress), *decodes]
    if shapes := prefill_shapes(forward, runner.options):
        buffer = _packed_steps(runner, 2 * max(shapes[-1].num_seqs, shapes[-1].num_tokens))
        executors += [
            PrefillGraphs(runner.device, forward, buffer, shapes, progress, has_adapters)
            for has_adapters in _kinds(runner)
        ]
    runner.executors = executors
    if runner.proposer is not None:
        runner.proposer.capture()
    if splits_drafts:
        at = bisect.bisect_left(sizes, runner.options.max_drafted)
        runner.step_seconds = _measured(runner, decodes[0], sizes[: at + 1])
        found = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in runner.step_seconds.items())
        _log.debug("milliseconds of a step by its tokens, drafts among them: %s", found)


def _prefix_graphs(runner: ModelRunner, buffer: Tensor, progress: Progress) -> list[DecodeGraphs]:
    """Capture the decode step for prefixes that requests have in common."""
    sizes = prefix_sizes(graph_sizes(runner.options.max_decodes))
    if not sizes or not any(each.reads_prefixes_once for each in runner.forward.attentions):
        return []
    splits, work = runner.options.splits_drafts, runner.decode_step
    return [DecodeGraphs(runner.device, work, buffer, sizes, progress, False, splits, has_common_prefix=True)]


@torch.inference_mode()
def _measured(runner: ModelRunner, graphs: DecodeGraphs, sizes: Sequence[int]) -> dict[int, float]:
    """Measure captured steps of random tokens: seconds by size. All are on block 0, with a short context."""
    found, state = {}, runner.batch.state
    generator = torch.Generator().manual_seed(runner.options.seed)
    for size in sizes:
        segment, num_groups = segment_of(size), len(runner.cache_groups)
        words = torch.zeros((2 + 2 * num_groups) * segment + size + 1, dtype=torch.int32)
        words[:segment] = runner.batch.num_rows
        words[:size] = torch.arange(size) * min(size, runner.batch.num_rows) // size
        words[segment : segment + size + 1] = torch.arange(size + 1)
        ids = torch.randint(runner.spec.vocab_size, (size,), generator=generator)
        words[-size - 1 : -1] = ids
        found[size] = graphs.seconds(words.to(runner.device.torch_device), size)
        state.records.zero_()  # the rows have advanced
    return found


def _kinds(runner: ModelRunner) -> tuple[bool, ...]:
    """Return the kinds of steps: without LoRA adapters, and with them if there may be some."""
    return (False,) if runner.adapters is None else (False, True)


def _packed_steps(runner: ModelRunner, num_seqs: int) -> Tensor:
    """Return zeros of the size of a packed decode step of `num_seqs` sequences with new blocks, see
    `kernels.data.layout`. As a step, every sequence is row 0 and computes nothing.
    """
    per_seq = 5 + 4 * len(runner.cache_groups)  # two segments, two per group, a token; the rest is for blocks
    return torch.zeros(per_seq * (num_seqs + 8), dtype=torch.int32, device=runner.device.torch_device)


def _fullest_steps(runner: ModelRunner) -> None:
    """Run steps of as many tokens and requests as there may be, through the layers of `Decoder.few_layers`."""
    with runner.model.few_layers():
        dummy_run(runner, tokens_each=runner.options.max_num_batched_tokens // runner.options.max_num_seqs)


def dummy_run(runner: ModelRunner, tokens_each: int) -> None:
    """Run full steps by `launch`, all on block 0, to compile every kernel and reach the peak of memory use."""
    for has_adapters in _kinds(runner):
        _dummy_run(runner, tokens_each, DUMMY if has_adapters else None)


def _dummy_run(runner: ModelRunner, tokens_each: int, adapter: Adapter | None) -> None:
    options = runner.options
    tokens_each = max(min(tokens_each, options.max_model_len - 1), 2)
    num_seqs = max(min(options.max_num_seqs, options.max_num_batched_tokens // tokens_each), 1)
    blocks = [[0] * -(-(tokens_each + 1) // options.block_size) for _ in runner.cache_groups]
    sampling = SamplingParams(temperature=0.7, top_k=10, top_p=0.9, min_p=0.01)
    kinds = (
        sampling,
        sampling.clone(structured_outputs=StructuredOutputs(compiled="")),
        sampling.clone(min_tokens=9),
    )
    ids = [f"dummy-{i}" for i in range(num_seqs)]
    requests = [
        NewRequest(
            EngineRequest(name, [0] * tokens_each, kinds[i % len(kinds)], adapter=adapter),
            0,
            [0] * tokens_each,
            0,
            blocks,
        )
        for i, name in enumerate(ids)
    ]
    _run(runner, requests, ScheduledBatch(ids, [tokens_each] * num_seqs, num_seqs * tokens_each, 0, []))
    half = num_seqs // 2  # a mixed step: the first half decodes, the others are new again
    _remove(runner, ids[half:])
    lens = [1] * half + [tokens_each] * (num_seqs - half)
    _run(runner, requests[half:], ScheduledBatch(ids, lens, sum(lens), half, []))
    _remove(runner, ids)
    run: list[StepLens] = []
    for attention in runner.forward.attentions:
        for step_lens in attention.fullest_steps:
            if step_lens not in run:
                _run_chunks(runner, *step_lens)
                run.append(step_lens)


def _run_chunks(runner: ModelRunner, query_lens: list[int], context_lens: list[int]) -> None:
    """Run a step of the newest chunks of prompts, all on block 0."""
    ids = [f"dummy-{i}" for i in range(len(query_lens))]
    requests = []
    for name, query, context in zip(ids, query_lens, context_lens, strict=True):
        blocks = [[0] * -(-(context + 1) // runner.options.block_size) for _ in runner.cache_groups]
        prompt = EngineRequest(name, [0] * context, SamplingParams())
        requests.append(NewRequest(prompt, 0, [0] * context, context - query, blocks))
    _run(runner, requests, ScheduledBatch(ids, query_lens, sum(query_lens), 0, []))
    _remove(runner, ids)


def _run(runner: ModelRunner, requests: list[NewRequest], batch: ScheduledBatch) -> None:
    """Run a step with grammar masks that allow every token."""
    num_proposals = 0 if runner.proposer is None else runner.options.max_request_drafts
    handle = runner.launch(SchedulerOutput(0, requests, batch, {}, [], num_proposals=num_proposals))
    if handle.guided:
        handle.masks.fill(-1)
        handle.sample()
    handle.read()


def _remove(runner: ModelRunner, request_ids: list[str]) -> None:
    runner.update_rows(SchedulerOutput(0, [], ScheduledBatch([], [], 0, 0, []), {}, request_ids))


@contextmanager
def _temporary_cache(
    runner: ModelRunner, num_blocks: int, dtype: torch.dtype | None = None, num_states: int = 1
) -> Iterator[None]:
    """Provide a KV cache of `num_blocks` and `num_states` within the context. `dtype`: overrides the cache's dtype."""
    runner.allocate_cache(num_blocks, num_states, dtype)
    try:
        yield
    finally:
        runner.release_cache()
