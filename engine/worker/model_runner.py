"""Runs scheduled steps on the device: updates rows, prepares step tensors, runs the model, samples.

`launch` queues a step and returns at once; `StepHandle.read` waits for its tokens. The newest token of each request
stays on the device, so the next step can be launched before this one is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.core.batch import SchedulerOutput, StepResult
from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.spec import AttentionSpec, LatentSpec, ModelSpec
from engine.worker.attention.fp8_prefill import CacheWidener
from engine.worker.attention.latent import LatentExpander
from engine.worker.block_store.block_copier import BlockCopier
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions, NoPeers, Peers, open_block_file
from engine.worker.captured_steps import RecordedSteps
from engine.worker.cuda_graphs import PREFILL_SIZES, DecodeGraphs, PrefillGraphs, PrefillShape, graph_sizes
from engine.worker.device import Event
from engine.worker.expert_load import ExpertCounts, ExpertLoad
from engine.worker.input_batch import InputBatch, PackedStep, segment_of
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from engine.worker.parallel.communicator import StageLink
from engine.worker.pooler import Embeddings, Pooler
from engine.worker.sampling.logprobs import PromptLogprobs, SampledLogprobs
from engine.worker.sampling.sampler import Sampler, SamplingPlan
from kernels.data.layout import StepTensors


@dataclass(slots=True)
class StepHandle:
    """A launched step. Call `read` once, after `sample` if there are `guided` requests."""

    output: SchedulerOutput
    num_sampled: list[int] = field(default_factory=list)  # tokens sampled for each request
    unsampled: list[int] = field(default_factory=list)  # indices of requests without a token, in descending order
    # Indices of requests that wait for grammar masks before they are sampled.
    guided: list[int] = field(default_factory=list)
    # [len(guided), words], filled by the caller.
    masks: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int32))
    device_waited: bool = False  # the previous step had guided requests and finished before this one was launched
    wait_seconds: float = 0.0  # time that `read` waited for the device
    prompt_logprobs: PromptLogprobs | None = None
    expert_counts: ExpertCounts | None = None
    embeddings: Embeddings | None = None
    logprobs: SampledLogprobs | None = None
    tokens: Tensor | None = None  # [B] int64 on the CPU, valid after `done`
    done: Event | None = None
    finish: Callable[[Sequence[int]], None] | None = None  # the work of `sample`; keeps the step's logits alive

    @property
    def has_ended(self) -> bool:
        """Whether the step has run: on a CPU, once it is sampled."""
        return self.done is None and self.tokens is not None

    def sample(self, deferred: Sequence[int] = ()) -> None:
        """Sample the `guided` requests, before the next step is launched.

        Before this call, the caller reads the previous step and fills `masks`, [len(guided), (vocabulary + 31) // 32]
        int32: one bit for each token, the lowest bit first, set if the token is allowed. The `deferred` indices, whose
        masks are not filled, get no token: their requests compute their newest token again in the next step.
        """
        assert self.finish is not None
        self.finish(deferred)
        self.finish = None

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        assert self.tokens is not None, "guided requests are sampled first"
        if self.done is not None:
            start = time.perf_counter()
            self.done.synchronize()
            self.wait_seconds = time.perf_counter() - start
        token_ids = self.tokens.tolist()
        for index in self.unsampled:
            del token_ids[index]
        result = StepResult(token_ids, self.num_sampled)
        if self.logprobs is not None:
            result.logprobs.update(self.logprobs.read())
        if self.prompt_logprobs is not None:
            result.prompt_logprobs.update(self.prompt_logprobs.read())
        if self.embeddings is not None:
            result.embeddings.update(self.embeddings.read())
        if self.expert_counts is not None:
            result.expert_tokens.update(self.expert_counts.read())
        return self.output, result


class ModelRunner:
    """Owns the weights, the KV cache, the device rows and the CUDA graphs. Not thread-safe.

    Use `startup.build_runner` to get a runner that is ready to step: it allocates the KV cache, captures the graphs and
    may reduce `max_model_len` to what the KV cache holds.
    """

    num_blocks: int = 0
    cache_bound: str = ""  # what limits `num_blocks`, for display
    graphs: DecodeGraphs | None = None
    prefill_graphs: PrefillGraphs | None = None
    recorded: RecordedSteps | None = None

    def __init__(self, model: Decoder, spec: ModelSpec, options: RunnerOptions, link: StageLink | None = None) -> None:
        """`link`: the connection to the other stages of a pipeline."""
        self.model, self.spec, self.options, self._link = model, spec, options, link
        self.device, self.block_size, self.max_model_len = options.device, options.block_size, options.max_model_len
        max_seqs, max_blocks = options.max_num_seqs, -(-options.max_model_len // options.block_size)
        device = options.device.torch_device
        self.kv_layout = KVCacheLayout.of_model(model.spec, options, model.stage)
        self.cache_groups = self.kv_layout.groups
        num_groups, max_tokens = len(self.cache_groups), max(options.max_num_batched_tokens, max_seqs)
        self.batch = InputBatch(max_seqs, num_groups, max_blocks, self.device, options.num_step_buffers)
        self._step = StepTensors.allocate(max_seqs + 2, max_tokens, num_groups, device)  # see `PrefillShape`
        self._ordinals = torch.arange(1, max_seqs + 1, dtype=torch.int32, device=device)
        self._sampler = Sampler(
            self.batch, self._step, spec.eos_token_ids, spec.vocab_size, options.max_model_len, options.num_stages
        )
        self._pooler = Pooler(self.batch, model.norm, spec.hidden_size)
        self.kv_cache: list[Tensor] = []
        # For each cache group, decode plans in ascending order of the number of sequences that they fit.
        self._plans: list[list[kernels.DecodePlan]] = [[] for _ in self.cache_groups]
        self._sparse_plans: list[kernels.DecodePlan] = []  # the same for block-sparse layers
        self._tile_queries, self._sparse_tile_queries = [0] * num_groups, 0  # of each group
        if self.device.is_accelerator and model.stage.is_last:
            # Shared by all graphs: the logits of one are read before the next one runs.
            new_logits = partial(torch.empty, graph_sizes(max_seqs)[-1], dtype=options.dtype, device=device)
            self._logits, head = new_logits(spec.vocab_size), model.lm_head
            self._own_logits = self._logits if head.shard.size == 1 else new_logits(head.num_rows)  # this rank's
            self._host_tokens = [
                self.device.pinned(max_seqs, dtype=torch.int64) for _ in range(options.num_step_buffers)
            ]
        limits = sorted({min(n, max_seqs) for n in (*kernels.FEW_SEQS, max_seqs)})
        allocate = partial(kernels.DecodePlan.allocate, device=device, kv_dtype=options.kv_dtype)
        mixers = dict(zip(self.kv_layout.group_of, (layer.mixer for layer in model.spec.layers), strict=True))
        for group, mixer in mixers.items():
            if isinstance(mixer, LatentSpec):
                self._tile_queries[group] = kernels.latent_tile_queries(mixer.num_heads, options.dtype)
                if self.device.is_accelerator:
                    of_latents = partial(kernels.latent_decode_plan, device=device)
                    self._plans[group] = [of_latents(n, mixer.num_heads, mixer.latent_dim) for n in limits]
            elif self.device.is_accelerator:
                heads = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
                window = self.cache_groups[group].window
                self._plans[group] = [allocate(n, *heads, window=window) for n in limits]
                self._tile_queries[group] = kernels.prefill_tile_queries(*heads, options.dtype)
        self.expander = LatentExpander.of_model(model.spec, options)
        self.widener = CacheWidener.of_model(model.spec, self.kv_layout, options)
        attentions = (layer.mixer for layer in model.spec.layers if isinstance(layer.mixer, AttentionSpec))
        if self.device.is_accelerator and (sparse := next((each for each in attentions if each.sparse), None)):
            heads = (sparse.num_heads, sparse.num_kv_heads, sparse.head_dim)
            self._sparse_plans = [allocate(n, *heads, sparse=sparse.sparse) for n in limits]
            alone = (sparse.num_heads, sparse.num_heads, sparse.head_dim)  # each query head has its own tiles
            self._sparse_tile_queries = kernels.prefill_tile_queries(*alone, options.dtype)
        self._expert_load: ExpertLoad | None = None
        if options.expert_load_interval:
            self._expert_load = ExpertLoad(model, options.expert_load_interval, self.device)
        self._num_launched = 0
        self._last_guided: Event | None = None  # end of the last step, if it ran a graph and had guided requests

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.kv_layout.block_bytes

    @property
    def device_name(self) -> str:
        """The device, for display."""
        count = kernels.num_threads(self.device.torch_device)
        return self.device.name + (f", {count} thread{'s' if count > 1 else ''}" if count else "")

    @property
    def attention_backend(self) -> str:
        """The attention implementation, for display."""
        return kernels.attention_backend(self.device.torch_device)

    def open_block_file(self, options: BlockFileOptions, peers: Peers | None = None) -> BlockFile | None:
        """A file of KV blocks, as `block_file.open_block_file`. `peers`: the other ranks' files, if there are any."""
        max_blocks = max(options.buffer_bytes // self.kv_layout.block_bytes, 1)
        copier = BlockCopier(self.kv_cache, self.kv_layout, self.device, max_blocks)
        return open_block_file(options, copier, peers or NoPeers())

    def close(self) -> None:
        """Release the device's memory."""
        self.graphs = self.prefill_graphs = self.recorded = None
        self.kv_cache = []

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all rows and all steps in flight after a failed step. Raises if the device itself has failed."""
        self.device.synchronize()
        self.batch.clear()
        self._sampler.clear()
        self._last_guided = None
        self.device.reset_peak_memory()

    def update_rows(self, output: SchedulerOutput) -> None:
        """Free the rows of removed requests and give rows to new ones."""
        removed, added = self.batch.apply(output)
        if removed or added:
            self._sampler.update_rows(removed, added)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> StepHandle:
        """Queue a step. Does not wait for the device."""
        self.update_rows(output)
        handle, size, n = StepHandle(output), 0, len(output.batch)
        scored, pooled = PromptLogprobs.indices(output, self.batch), self._pooler.indices(output)
        if self.graphs is not None and not scored and not pooled and output.batch.num_decodes == n:
            size = self.graphs.padded_size(n)
        shape = self._prefill_shape(output)
        packed = (
            self.batch.pack(output, size)
            if shape is None
            else self.batch.pack(output, shape.num_seqs, shape.num_tokens)
        )
        if self._link is not None:
            self._link.receive(packed.num_tokens)
        if self.graphs is not None and size and self.graphs.fits(packed.packed):
            outputs = self.graphs.run(size, packed.packed)
            handle.device_waited = self._last_guided is not None and self._last_guided.query()
        else:
            size = 0  # eager launches keep the device waiting anyway
            outputs = self._run_eagerly(handle, packed, shape, scored, pooled)
        if not self.model.stage.is_last:
            assert self._link is not None
            self._link.send(*outputs)
            return self._unsampled(handle, packed)
        logits, tokens = outputs
        plan = self._sampler.plan(packed)
        handle.num_sampled, handle.unsampled = plan.num_sampled, plan.unsampled
        if plan.guided:
            masks = self._sampler.masks(plan)
            handle.guided, handle.masks = plan.guided, masks.numpy()
            handle.finish = partial(self._finish, handle, packed, plan, logits, tokens, size, masks)
        else:
            self._finish(handle, packed, plan, logits, tokens, size, None)
        return handle

    def _unsampled(self, handle: StepHandle, packed: PackedStep) -> StepHandle:
        """Complete the handle of a step whose tokens another stage, the last one, samples."""
        n = len(handle.output.batch)
        handle.tokens, handle.num_sampled = torch.empty(0, dtype=torch.int64), [1] * n
        handle.finish = partial(self._defer, handle, packed)
        return handle

    def learn(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Take the new tokens of these requests, sampled by the last stage, at least one each. Only the first stage needs
        them: its rows hold the newest.
        """
        known = [
            (row.index, tokens[-1])
            for name, tokens in token_ids.items()
            if (row := self.batch.rows.get(name)) is not None
        ]
        if known and self.model.stage.is_first:
            rows, tokens = self.device.upload(torch.tensor(known)).T
            self.batch.state.last_token[rows] = tokens.to(self.batch.state.last_token.dtype)

    def _prefill_shape(self, output: SchedulerOutput) -> PrefillShape | None:
        """Return the shape of the graph for a step with prefill; None if the step runs eagerly or only decodes."""
        if self.prefill_graphs is None or output.batch.num_decodes == len(output.batch):
            return None
        return self.prefill_graphs.shape_for(output)

    def _run_eagerly(
        self, handle: StepHandle, packed: PackedStep, shape: PrefillShape | None, scored: list[int], pooled: list[int]
    ) -> tuple[Tensor, ...]:
        """Return logits [B, V] and tokens [B] of any step; a stage before the last one returns `_hidden` alone. `handle` gets
        prompt log-probabilities of the indices `scored` and embeddings of the indices `pooled`.

        For a step packed for a `shape`, the forward pass is that shape's graph.
        """
        batch = handle.output.batch
        n, num_seqs = batch.num_decodes, len(batch)
        only_decodes = n == num_seqs and not scored and not pooled
        if only_decodes and self.recorded is not None and self.recorded.fits(packed.packed, n):
            logits = self.recorded.run(packed.packed, n)
            return logits, self._sampler.sample_unfiltered(logits, greedy=packed.members.greedy)
        load = self._expert_load if n < num_seqs else None
        is_watched = load is not None and load.begin()
        every_token, to_device = bool(scored or pooled or is_watched), self.device.upload
        hidden = self._hidden(packed, None if is_watched else shape, every_token)
        if load is not None and is_watched:
            handle.expert_counts = load.end()
        if not self.model.stage.is_last:
            return (hidden,)
        if scored:
            handle.prompt_logprobs = PromptLogprobs.of(
                packed, scored, hidden, self.model.logits, self.spec.vocab_size, to_device
            )
        if pooled:
            handle.embeddings = self._pooler.pool(packed, pooled, hidden)
            if len(pooled) == num_seqs:  # nothing to sample
                return hidden[:0], torch.full((num_seqs,), -1, device=self.device.torch_device)
        if len(hidden) > num_seqs:
            hidden = hidden[self._step.samples.token_index[:num_seqs]]
        logits = self.model.logits(hidden)
        return logits, self._sampler.sample_unfiltered(logits, greedy=packed.members.greedy)

    def _hidden(self, packed: PackedStep, shape: PrefillShape | None, every_token: bool) -> Tensor:
        """Return the hidden states of each sequence's last token, or of `every_token` of the step, without padding. A stage
        before the last one returns every token's, with padding.
        """
        batch, context_lens, is_last = packed.members.batch, packed.context_lens.tolist(), self.model.stage.is_last
        n, num_tokens = batch.num_decodes, batch.total_num_tokens if is_last else packed.num_tokens
        every_token = every_token or num_tokens == len(batch) or not is_last
        indices = (
            None if every_token else self._step.samples.token_index[: len(batch)]
        )  # which the step's first kernel writes
        if shape is not None and self.prefill_graphs is not None and self.prefill_graphs.fits(packed.packed):
            hidden = self.prefill_graphs.run(shape, packed.packed, n, batch.num_tokens, context_lens)
            return hidden[:num_tokens] if indices is None else hidden[indices]
        on_device = packed.packed.to(self.device.torch_device, non_blocking=True)
        prefill_lens = batch.num_tokens[n:], context_lens[n:]
        expander = self.expander if self.expander is not None and self.expander.expands(*prefill_lens) else None
        tiles: dict[int, Tensor] = {}  # prefill tiles, by queries per tile
        if self.device.is_accelerator and n < len(batch) and expander is None:
            for queries in self._all_tile_queries:
                grid = kernels.make_prefill_tiles(*prefill_lens, queries)
                tiles[queries] = self.device.upload(torch.tensor(grid, dtype=torch.int32))
        groups = self._prepare(on_device, packed.segment, packed.num_seqs, packed.num_tokens, packed.num_decodes, tiles)
        if expander is not None:
            groups = [expander.prepared(group, *prefill_lens) for group in groups]
        if self.widener is not None and n < len(batch):
            groups = self.widener.prepared(groups, *prefill_lens)
        return self._forward(packed.num_tokens, groups, indices)[:num_tokens]

    @property
    def _all_tile_queries(self) -> set[int]:
        return {*self._tile_queries, self._sparse_tile_queries} - {0}

    def prefill_shapes(self) -> list[PrefillShape]:
        """Return the shapes of steps with prefill that are worth a graph."""
        options = self.options
        most = min(options.max_num_batched_tokens, options.max_model_len)
        # The decode kernel for latent attention splits contexts by the number of sequences, which is unknown at
        # capture.
        decodes = not any(isinstance(layer.mixer, LatentSpec) for layer in self.model.spec.layers)
        return [
            PrefillShape.of_size(size, options.max_num_seqs, decodes, self._all_tile_queries)
            for size in PREFILL_SIZES
            if size <= most
        ]

    @torch.inference_mode()
    def run_prefill(self, packed: Tensor, shape: PrefillShape, tiles: Mapping[int, Tensor]) -> Tensor:
        """Return the hidden states [T, hidden] of a packed step of this shape. Captured in a graph."""
        segment = segment_of(shape.num_seqs)
        groups = self._prepare(
            packed, segment, shape.num_seqs, shape.num_tokens, shape.num_decodes, tiles, may_decode=True
        )
        return self._forward(shape.num_tokens, groups)

    @torch.inference_mode()
    def run_decode(self, packed: Tensor, size: int) -> tuple[Tensor, ...]:
        """Run a decode step of `size` sequences and return its own logits, see `decode`, and unfiltered tokens; on a stage before
        the last one, hidden states [size, hidden]. Captured in a graph.
        """
        if not self.model.stage.is_last:
            return (self._decode_hidden(packed, size),)
        own_logits, head = self.decode(packed, size, out=self._own_logits[:size]), self.model.lm_head
        if head.shard.size == 1:
            return own_logits, self._sampler.sample_unfiltered(own_logits)
        return own_logits, self._sampler.sample_own(own_logits, head.first_id, head.gather_keys)

    @torch.inference_mode()
    def decode(self, packed: Tensor, size: int, out: Tensor | None = None) -> Tensor:
        """Return this rank's logits [size, n] of a packed decode step of `size` sequences, in `out` if given. A single rank's are
        all.
        """
        return self.model.own_logits(self._decode_hidden(packed, size), out)

    def _decode_hidden(self, packed: Tensor, size: int) -> Tensor:
        return self._forward(size, self._prepare(packed, segment_of(size), size, size, size, {}))

    @torch.inference_mode()
    def run_filtered(self, own_logits: Tensor, tokens: Tensor) -> None:
        """Sample filtered requests from the results of `run_decode`. Captured in a second graph. Leaves all logits, in rows with
        masks the masked ones, in `_logits`.
        """
        self._sampler.sample_filtered(self._gathered(own_logits), tokens)

    def _gathered(self, own_logits: Tensor) -> Tensor:
        """Return all logits [size, V], in `_logits`, of what `run_decode` has left of them on each rank."""
        head = self.model.lm_head
        return own_logits if head.shard.size == 1 else head.gather(own_logits, self._logits[: len(own_logits)])

    def _prepare(
        self,
        packed: Tensor,
        segment: int,
        num_seqs: int,
        num_tokens: int,
        num_decodes: int,
        tiles: Mapping[int, Tensor],
        *,
        may_decode: bool = False,
    ) -> list[AttentionMetadata]:
        """Unpack a step and return the attention metadata of each cache group. `tiles`: prefill tiles, by queries per
        tile.

        `may_decode`: of the first `num_decodes` sequences, only the leading ones with one token each decode.
        """
        step, state = self._step, self.batch.state
        kernels.prepare_step(packed, segment, num_seqs, num_tokens, self.block_size, state, step)
        context_lens, rows = step.context_lens[:num_seqs], packed[:num_seqs]
        lens, decode_lens, groups = context_lens[:num_decodes], None, []
        if may_decode:
            ends = packed[segment + 1 : segment + 1 + num_decodes]
            lens = decode_lens = torch.where(ends == self._ordinals[:num_decodes], lens, 0)
            context_lens = context_lens.clamp(min=1)

        def planned(plans: list[kernels.DecodePlan]) -> kernels.DecodePlan | None:
            plan = next((p for p in plans if num_decodes <= p.max_seqs), None)
            if plan is not None and num_decodes:
                kernels.plan_decode(lens, rows[:num_decodes], plan)
            return plan

        sparse_plan = planned(self._sparse_plans)
        for group, plans in enumerate(self._plans):
            groups.append(
                AttentionMetadata(
                    num_decodes=num_decodes,
                    rows=rows,
                    block_tables=state.block_tables[group],
                    query_start=packed[segment : segment + num_seqs + 1],
                    context_lens=context_lens,
                    slot_mapping=step.slot_mapping[group, :num_tokens],
                    decode_plan=planned(plans),
                    prefill_tiles=tiles.get(self._tile_queries[group]),
                    sparse_plan=sparse_plan,
                    sparse_tiles=tiles.get(self._sparse_tile_queries),
                    decode_lens=decode_lens,
                )
            )
        return groups

    def _forward(self, num_tokens: int, groups: list[AttentionMetadata], indices: Tensor | None = None) -> Tensor:
        step, layout = self._step, self.kv_layout
        attention = [groups[layout.group_of[layer]] for layer in layout.own_layers]
        hidden = None if self._link is None else self._link.received(num_tokens)
        ids, positions = step.input_ids[:num_tokens], step.positions[:num_tokens]
        return self.model(ids, positions, self.kv_cache, attention, hidden, indices)

    @torch.inference_mode()
    def _finish(
        self, handle: StepHandle, packed: PackedStep, plan: SamplingPlan, logits: Tensor, tokens: Tensor, size: int,
        masks: Tensor | None, deferred: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Sample the requests that need more than unfiltered sampling, and copy all tokens to the CPU. `size`: of the
        graph that ran, which has left its own logits; 0: none did, and `logits` are all. `masks`: of guided requests.

        The plan is the same on all ranks, so all gather logits or none does.
        """
        if plan.filtered and self.graphs is not None and size:
            self.graphs.run_filtered(size)
            logits = self._logits[:size]
        elif plan.filtered:
            self._sampler.sample_filtered(logits, tokens)
        elif size and (plan.groups or plan.with_logprobs):
            logits = self._gathered(logits)
        self._sampler.sample_groups(plan, masks, logits, tokens)
        self._defer(handle, packed, deferred)
        if plan.with_logprobs:
            handle.logprobs = SampledLogprobs.of(packed.members, plan.with_logprobs, logits, tokens, self.device.upload)
        n = len(handle.output.batch)
        handle.tokens = tokens[:n]
        if self.device.is_accelerator:
            self._num_launched += 1
            handle.tokens = self._host_tokens[self._num_launched % len(self._host_tokens)][:n]
            handle.tokens.copy_(tokens[:n], non_blocking=True)
            handle.done = self.device.record_event()
        self._last_guided = handle.done if size and plan.guided else None

    def _defer(self, handle: StepHandle, packed: PackedStep, indices: Sequence[int]) -> None:
        """Drop the tokens sampled at these indices: their rows keep the token before."""
        if not indices:
            return
        handle.unsampled = sorted({*handle.unsampled, *indices}, reverse=True)
        handle.num_sampled = [int(i not in handle.unsampled) for i in range(len(handle.num_sampled))]
        self.batch.defer(packed, self._step, list(indices))
