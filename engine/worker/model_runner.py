"""Runs scheduled steps on the device: rows, step tensors, the model, the sampler. Never knows why a request was chosen.

`launch` queues a step and returns at once; `StepHandle.read` waits for its tokens. The newest token of each request stays
on the device, so the next step can be launched before this one is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.core.batch import NewRequest, ScheduledBatch, SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.sampling_params import SamplingParams
from engine.core.structured_outputs import StructuredOutputs
from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.spec import ModelSpec
from engine.models.weights import load_model
from engine.worker.cuda_graphs import DecodeGraphs, graph_sizes
from engine.worker.input_batch import InputBatch, PackedStep, segment_of
from engine.worker.kv_cache import KVCacheShape, check_fits, cpu_cache_bytes, e4m3_scales, gpu_cache_bytes
from engine.worker.logits_processor import Chosen, LogitsProcessor
from engine.worker.pooler import Embeddings, Pooler
from engine.worker.sampler import LogprobsRequest, PromptLogprobs, sample
from kernels.step import StepTensors

SCORED_ELEMENTS = 1 << 24  # logits of prompt tokens held at once
CALIBRATION_TOKENS = 2048
GRAPH_RESERVE = 512 << 20  # bytes left free for what CUDA graphs hold


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What the runner needs to know, all resolved: no "auto" left."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # `dtype` or torch.float8_e4m3fn
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    load_format: str = "auto"
    seed: int = 0
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    calculate_kv_scales: bool = False
    enforce_eager: bool = False


@dataclass(slots=True)
class StepHandle:
    """A step on its way. `read` may be called once, and after `constrain` when that is due."""

    output: SchedulerOutput
    prompt_logprobs: PromptLogprobs | None = None
    embeddings: Embeddings | None = None
    guided: list[str] = field(default_factory=list)  # requests that are not sampled yet: a grammar has its say
    masks: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int32))  # [len(guided), words], to fill
    sample_guided: Callable[[Sequence[int]], None] | None = None
    deferred: frozenset[int] = frozenset()  # shares of those of them for whom it was too early
    device_waited: bool = False  # before it: it had done all of a step with guided requests
    tokens: Tensor | None = None  # [B] int64 on the CPU, filled when `done`
    done: torch.cuda.Event | None = None
    logprobs: LogprobsRequest | None = None

    def constrain(self, late: Sequence[int] = ()) -> None:
        """Sample the `guided` requests, before the next step is launched, but for the `late` ones of them.

        First the caller, once it has read the step before, fills `masks` [len(guided), (vocabulary + 31) // 32] int32:
        a bit for each token that may come next, the lowest first. Those that are late compute their newest token again in
        the next step.
        """
        assert self.sample_guided is not None
        self.sample_guided(late)

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        if self.done is not None:
            self.done.synchronize()
        assert self.tokens is not None, "guided requests are sampled first"
        logprobs = self.logprobs.read() if self.logprobs else {}
        prompt_logprobs = self.prompt_logprobs.read() if self.prompt_logprobs else {}
        embeddings = self.embeddings.read() if self.embeddings else {}
        return self.output, StepResult(self.tokens.tolist(), logprobs, prompt_logprobs, embeddings, self.deferred)


class ModelRunner:
    """Owns the weights, the KV cache, the device rows and the CUDA graphs. One caller, one thread."""

    num_blocks: int = 0
    weights_seconds: float = 0.0
    graphs_seconds: float = 0.0

    def __init__(self, model: Decoder, spec: ModelSpec, options: RunnerOptions) -> None:
        self.model, self.spec, self.options = model, spec, options
        self.device, self.block_size, self.max_model_len = options.device, options.block_size, options.max_model_len
        self._cuda = self.device.type == "cuda"
        max_blocks = -(-options.max_model_len // options.block_size)
        self._batch = InputBatch(
            options.max_num_seqs, max_blocks, options.max_model_len, self.device, pin_memory=self._cuda
        )
        max_tokens = max(options.max_num_batched_tokens, options.max_num_seqs)
        self._step = StepTensors.allocate(options.max_num_seqs, max_tokens, self.device)
        self._processor = LogitsProcessor(self._batch, self._step, spec.eos_token_ids, spec.vocab_size)
        # What grammars allow, a bit for each token: the CPU writes it, and the device reads it where it is. Who fills it has
        # read the step before, so the device is done with what that one had.
        words = -(-spec.vocab_size // 32)
        self._masks = torch.empty(options.max_num_seqs, words, dtype=torch.int32, pin_memory=self._cuda).fill_(-1)
        self._pooler = Pooler(self._batch, model.norm, spec.hidden_size)
        self._shape = KVCacheShape.of(spec, options.block_size, options.kv_dtype)
        self._plans: list[kernels.DecodePlan] = []  # for up to max_seqs sequences each, the smallest first
        self._tile_queries = 0
        if self._cuda:
            mixer = spec.layers[0].mixer
            heads = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
            limits = sorted({min(n, options.max_num_seqs) for n in (*kernels.FEW_SEQS, options.max_num_seqs)})
            self._plans = [
                kernels.DecodePlan.allocate(n, *heads, device=self.device, kv_dtype=options.kv_dtype) for n in limits
            ]
            self._tile_queries = kernels.prefill_tile_queries(*heads, options.dtype)
            self._logits = torch.empty(
                graph_sizes(options.max_num_seqs)[-1], spec.vocab_size, dtype=options.dtype, device=self.device
            )  # of all graphs: each is read before the next one runs
            self._results = [torch.empty(options.max_num_seqs, dtype=torch.int64, pin_memory=True) for _ in range(3)]
        self._launched = 0
        self._last_guided: torch.cuda.Event | None = None  # end of the last step, if a graph of guided requests
        self._graphs: DecodeGraphs | None = None
        self._kv_cache: list[Tensor] = []

    @classmethod
    def build(cls, folder: Path, spec: ModelSpec, options: RunnerOptions, *, progress: bool = True) -> ModelRunner:
        """Load the weights, size the KV cache from a profiling run, warm up and capture the graphs.

        Raises `ModelError` for files that do not fit and `KVCacheTooSmallError` for a context that does not.
        """
        start = time.perf_counter()
        model = load_model(
            folder, spec, dtype=options.dtype, device=options.device, load_format=options.load_format, seed=options.seed,
            progress=progress, max_model_len=options.max_model_len,
        )  # fmt: skip
        runner = cls(model, spec, options)
        if not runner._cuda:
            model.pack_weights()
        runner.weights_seconds = time.perf_counter() - start
        start = time.perf_counter()
        if runner._cuda:
            runner._compile()
        if options.calculate_kv_scales:
            runner._calibrate()
        runner.num_blocks = runner._count_blocks()
        check_fits(runner.num_blocks, options.block_size, options.max_model_len)
        runner._kv_cache = runner._shape.allocate(runner.num_blocks, options.device)
        if runner._cuda:
            runner._rehearse(1)
            if not options.enforce_eager:
                sizes = graph_sizes(options.max_num_seqs)
                buffer = torch.zeros(8 * (sizes[-1] + 8), dtype=torch.int32, device=options.device)
                runner._graphs = DecodeGraphs(runner._decode_on_device, runner._sample_rest, buffer, sizes, progress)
            torch.cuda.synchronize()
        runner.graphs_seconds = time.perf_counter() - start
        return runner

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self._shape.block_bytes

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self._cuda else "CPU"

    def close(self) -> None:
        """Let go of the device's memory."""
        self._graphs = None
        self._kv_cache = []

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> StepHandle:
        """Queue one step; nothing waits for the device."""
        self._batch.apply(output)
        size, shares = 0, output.batch
        scored, pooled = PromptLogprobs.shares(output, self._batch), self._pooler.shares(output)
        if self._graphs is not None and not scored and not pooled and shares.num_decodes == len(shares):
            size = self._graphs.padded_size(len(shares))
        packed = self._batch.pack(output, size)
        handle = StepHandle(output)
        if self._graphs is not None and size and self._graphs.fits(packed.packed):
            logits, tokens = self._graphs.run(size, packed.packed)
            handle.device_waited = self._last_guided is not None and self._last_guided.query()
        else:
            size = 0  # kernels launched one by one keep the device waiting anyway
            logits, tokens = self._compute(handle, packed, scored, pooled)
        chosen = self._processor.choose(packed)
        if chosen.guided:
            handle.guided = [shares.request_ids[i] for i in chosen.guided]
            handle.masks = self._masks[: len(handle.guided)].numpy()
            handle.sample_guided = partial(self._sample_again, handle, packed, logits, tokens, chosen, size)
        else:
            self._sample_again(handle, packed, logits, tokens, chosen, size)
        return handle

    @torch.inference_mode()
    def _sample_again(
        self,
        handle: StepHandle,
        packed: PackedStep,
        logits: Tensor,
        tokens: Tensor,
        chosen: Chosen,
        size: int,
        late: Sequence[int] = (),
    ) -> None:
        """Sample those that the first go left out, and send all to the CPU.

        size: of the graph that ran; 0: none did. late: of those who wait for masks, the ones for whom it is too early.
        """
        if chosen.num_masked or packed.members.filtered:
            if self._graphs is not None and size:
                self._graphs.run_rest(size)
            else:
                self._sample_rest(logits, tokens)
        for group, masks in chosen.groups(self._masks):
            self._processor.sample(logits, tokens, group, masks)
        if late:
            self._defer(handle, packed, [chosen.guided[i] for i in late])
        self._finish(handle, packed, logits, tokens)
        self._last_guided = handle.done if size and chosen.guided else None

    def _defer(self, handle: StepHandle, packed: PackedStep, places: list[int]) -> None:
        """Whatever was sampled at these places of the step is not to count."""
        handle.deferred = frozenset(places)
        self._batch.defer(packed, places)
        step, at = self._step, self._batch.to_device(torch.tensor(places))
        newest = step.input_ids[step.last_index[at]]
        self._batch.state.last_token.scatter_(0, step.rows[at], newest)

    def _finish(self, handle: StepHandle, packed: PackedStep, logits: Tensor, tokens: Tensor) -> None:
        """All is sampled: send it to the CPU."""
        real = len(handle.output.batch)
        handle.logprobs = LogprobsRequest.make(packed, logits, tokens)
        handle.tokens = tokens[:real]
        if self._cuda:
            self._launched += 1
            handle.tokens = self._results[self._launched % len(self._results)][:real]
            handle.tokens.copy_(tokens[:real], non_blocking=True)
            handle.done = torch.cuda.Event()
            handle.done.record()

    def _compute(
        self, handle: StepHandle, packed: PackedStep, scored: list[int], pooled: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, V] and sampled tokens [B] of any step, eagerly.

        Prompt log-probabilities of `scored` shares and embeddings of `pooled` ones go to `handle`.
        """
        on_device = packed.packed.to(self.device, non_blocking=True)
        n, members = packed.num_decodes, packed.members
        tiles = None
        if self._cuda and n < packed.num_seqs:
            lens = members.batch.num_tokens[n:], packed.context_lens[n:].tolist()
            grid = kernels.make_prefill_tiles(*lens, self._tile_queries)
            tiles = torch.tensor(grid, dtype=torch.int32).pin_memory().to(self.device, non_blocking=True)
        step, num_seqs = self._step, packed.num_seqs
        metadata = self._prepare(on_device, packed.segment, num_seqs, packed.num_tokens, n, tiles)
        hidden = self._forward(packed.num_tokens, metadata)
        if scored:
            handle.prompt_logprobs = self._score(packed, scored, hidden)
        if pooled:
            handle.embeddings = self._pooler.pool(packed, pooled, hidden)
            if len(pooled) == num_seqs:  # nothing is to be sampled
                return hidden[:0], torch.full((num_seqs,), -1, device=self.device)
        if packed.num_tokens > num_seqs:
            hidden = hidden[step.last_index[:num_seqs]]
        logits = self.model.logits(hidden)
        return logits, self._sample(logits, greedy=members.greedy)

    def _score(self, packed: PackedStep, scored: list[int], hidden: Tensor) -> PromptLogprobs:
        prompt_logprobs, members = PromptLogprobs(self._batch), packed.members
        num_rows = max(SCORED_ELEMENTS // self.spec.vocab_size, 1)
        for i in scored:
            own = hidden[members.query_start[i] : members.query_start[i + 1]]
            end = int(packed.context_lens[i])
            prompt_logprobs.add(i, end, members.rows[i], own, self.model.logits, num_rows)
        return prompt_logprobs

    def _decode_on_device(self, packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The whole decode step of `size` sequences, from the packed step to sampled tokens; captured in a graph."""
        with torch.inference_mode():
            metadata = self._prepare(packed, segment_of(size), size, size, size, None)
            logits = self.model.logits(self._forward(size, metadata), out=self._logits[:size])
            return logits, self._sample(logits)

    def _prepare(
        self, packed: Tensor, segment: int, num_seqs: int, num_tokens: int, num_decodes: int, tiles: Tensor | None
    ) -> AttentionMetadata:
        kernels.prepare_step(packed, segment, num_seqs, num_tokens, self.block_size, self._batch.state, self._step)
        context_lens = packed[segment : segment + num_seqs]
        plan = next((p for p in self._plans if num_decodes <= p.max_seqs), None)
        if plan is not None and num_decodes:
            kernels.plan_decode(context_lens[:num_decodes], packed[:num_decodes], plan)
        return AttentionMetadata(
            num_decodes=num_decodes,
            rows=packed[:num_seqs],
            block_tables=self._batch.state.block_tables,
            query_start=packed[2 * segment : 2 * segment + num_seqs + 1],
            context_lens=context_lens,
            slot_mapping=self._step.slot_mapping[:num_tokens],
            decode_plan=plan,
            prefill_tiles=tiles,
        )

    def _forward(self, num_tokens: int, metadata: AttentionMetadata) -> Tensor:
        step = self._step
        attention = [metadata] * self.spec.num_layers
        return self.model(step.input_ids[:num_tokens], step.positions[:num_tokens], self._kv_cache, attention)

    def _sample(self, logits: Tensor, greedy: bool = False) -> Tensor:
        """Sample the next token of each sequence that nothing filters, and leave it in its row, where the next step finds it."""
        tokens = logits.argmax(-1) if greedy else sample(logits, self._step, kernels.Part.PLAIN)
        self._batch.state.last_token.scatter_(0, self._step.rows[: len(tokens)], tokens)
        return tokens

    def _sample_rest(self, logits: Tensor, tokens: Tensor) -> None:
        """Sample the others among the tokens [B], masking the logits [B, V] of those that have a mask and need nothing else."""
        with torch.inference_mode():
            mask_of = self._processor.mask_of[: len(logits)]
            kernels.mask_logits(logits, self._masks, mask_of)
            sample(logits, self._step, kernels.Part.REST, mask_of, out=tokens)
            self._batch.state.last_token.scatter_(0, self._step.rows[: len(tokens)], tokens)

    def _count_blocks(self) -> int:
        """Blocks of the KV cache: as asked for, or what fits into memory beside a full step."""
        options, block_bytes = self.options, self._shape.block_bytes
        if options.num_gpu_blocks_override is not None:
            return options.num_gpu_blocks_override
        if options.kv_cache_memory_bytes is not None:
            return options.kv_cache_memory_bytes // block_bytes
        if not self._cuda:
            room = cpu_cache_bytes(block_bytes, options.block_size, options.max_num_seqs, options.max_model_len)
            return room // block_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._kv_cache = self._shape.allocate(1, self.device)
        self._rehearse(max(options.max_num_batched_tokens // options.max_num_seqs, 1))
        torch.cuda.synchronize()
        room = gpu_cache_bytes(self.device, options.gpu_memory_utilization, GRAPH_RESERVE)
        self._kv_cache = []
        torch.cuda.empty_cache()
        return max(room // block_bytes, 0)

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile the kernels of every kind of step side by side: one after another takes several times as long."""
        self._kv_cache = self._shape.allocate(1, self.device)
        max_num_seqs = self.options.max_num_seqs
        with kernels.compiling_only():
            self._rehearse(1)
            packed = torch.zeros(8 * (max_num_seqs + 8), dtype=torch.int32, device=self.device)
            for size in {1, *kernels.FEW_SEQS, max_num_seqs}:
                self._decode_on_device(packed, min(size, max_num_seqs))
        self._batch.state.last_token.zero_()  # nothing was sampled, whatever stands there
        self._kv_cache = []

    @torch.inference_mode()
    def _calibrate(self) -> None:
        """Set every layer's scales of the e4m3 cache by a prompt of random tokens, whose K and V a wider cache takes."""
        options, name = self.options, "calibration"
        num_tokens = min(CALIBRATION_TOKENS, options.max_model_len - 1, options.max_num_batched_tokens)
        generator = torch.Generator().manual_seed(options.seed)
        ids = torch.randint(self.spec.vocab_size, (num_tokens,), generator=generator).tolist()
        blocks = list(range(-(-num_tokens // options.block_size)))
        self._kv_cache = replace(self._shape, dtype=options.dtype).allocate(len(blocks), self.device)
        prompt = NewRequest(EngineRequest(name, ids, SamplingParams(temperature=0)), 0, ids, 0, blocks)
        self.launch(
            SchedulerOutput(0, [prompt], ScheduledBatch([name], [num_tokens], num_tokens, 0, []), {}, [])
        ).read()
        self._batch.apply(SchedulerOutput(1, [], ScheduledBatch([], [], 0, 0, []), {}, [name]))
        for layer, kv in zip(self.model.layers, self._kv_cache, strict=True):
            cast(DecoderLayer, layer).attention.kv_scale.copy_(e4m3_scales(kv))
        self._kv_cache = []

    def _rehearse(self, tokens_each: int) -> None:
        """Run full steps through the real path, all on block 0: it compiles every kernel and shows the memory's peak."""
        options = self.options
        tokens_each = max(min(tokens_each, options.max_model_len - 1), 2)
        num_seqs = max(min(options.max_num_seqs, options.max_num_batched_tokens // tokens_each), 1)
        blocks = [0] * -(-(tokens_each + 1) // options.block_size)
        sampling = SamplingParams(temperature=0.7, top_k=10, top_p=0.9, min_p=0.01)
        kinds = (
            sampling,
            sampling.clone(structured_outputs=StructuredOutputs(compiled="")),
            sampling.clone(min_tokens=9),
        )
        ids = [f"rehearsal-{i}" for i in range(num_seqs)]
        admitted = [
            NewRequest(EngineRequest(name, [0] * tokens_each, kinds[i % len(kinds)]), 0, [0] * tokens_each, 0, blocks)
            for i, name in enumerate(ids)
        ]
        prefill = ScheduledBatch(ids, [tokens_each] * num_seqs, num_seqs * tokens_each, 0, [])
        self._launch_unguided(SchedulerOutput(0, admitted, prefill, {}, []))
        half = num_seqs // 2  # a mixed step: the first half decode, the rest come anew
        lens = [1] * half + [tokens_each] * (num_seqs - half)
        mixed = ScheduledBatch(ids, lens, sum(lens), half, [])
        self._launch_unguided(SchedulerOutput(1, admitted[half:], mixed, {}, ids[half:]))
        self._batch.apply(SchedulerOutput(2, [], ScheduledBatch([], [], 0, 0, []), {}, ids))

    def _launch_unguided(self, output: SchedulerOutput) -> None:
        """Run a step whose grammars allow everything."""
        handle = self.launch(output)
        if handle.guided:
            handle.masks.fill(-1)
            handle.constrain()
        handle.read()
