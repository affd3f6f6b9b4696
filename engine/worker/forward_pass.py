"""Runs packed steps through this rank's layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder, ImageTokens
from engine.models.mixers import LayerCache
from engine.worker.adapter_slots import AdapterSlots
from engine.worker.attention.group_attention import AttentionStep, CapturedPrefills, GroupAttention, Prefills
from engine.worker.attention.layer_attention import layer_attention
from engine.worker.executor import Computed, Padding, StepRequest
from engine.worker.images import ImageReader, StepImages
from engine.worker.input_batch import PackedStep, segment_of
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from engine.worker.parallel.communicator import StageLink
from engine.worker.proposers.proposer import HiddenStates
from kernels.data.layout import RowState, StepTensors


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a packed step, with padding."""

    num_seqs: int
    num_tokens: int
    num_decodes: int
    # Of the first `num_decodes` sequences, only the leading ones with one token decode: a graph does not know how many.
    may_decode: bool = False
    has_adapters: bool = False  # some sequences may use LoRA adapters
    has_common_prefix: bool = False  # some decodes may begin with the same prefix, which is read once


class ForwardPass:
    """Unpacks steps, gives each cache group its attention data, and runs the layers. Owns the KV cache.

    All steps use the same `StepTensors`: a step overwrites the previous one's in the device's queue.
    """

    def __init__(
        self,
        model: Decoder,
        layout: KVCacheLayout,
        options: RunnerOptions,
        state: RowState,
        link: StageLink | None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`state`: the device rows. `link`: the connection to the other stages of a pipeline."""
        self.adapters = adapters
        if adapters is not None:
            adapters.reserve_tokens(max(options.max_num_batched_tokens, options.max_decodes))
        self.model, self.device = model, options.device
        self.kv_cache: list[LayerCache] = []  # of each layer of this stage
        device, max_seqs = options.device.torch_device, options.max_num_seqs
        max_decodes = options.max_decodes
        max_tokens = max(options.max_num_batched_tokens, max_decodes)
        # Two more sequences than there are rows: see `PrefillShape`.
        num_samples = max_seqs + max(options.max_step_drafts, 2)
        self.step = StepTensors.allocate(max_decodes + 2, max_tokens, len(layout.groups), device, num_samples)
        self._state, self._link, self._block_size = state, link, options.block_size
        self._dtype, self._repeats = options.dtype, options.splits_drafts
        self._ordinals = torch.arange(1, max_seqs + 1, dtype=torch.int32, device=device)
        layers = layer_attention(model.spec, layout, options)
        self.attentions: Sequence[GroupAttention] = list(dict.fromkeys(layers))  # of all stages
        self._own = [layers[index] for index in layout.own_layers]
        is_alone = link is None and options.num_ranks_per_stage == 1  # ranks talk to each other in between
        self._run_layers: Callable[[Callable[[], Tensor]], Tensor] = (
            kernels.call_batches(device) if is_alone else lambda layers: layers()
        )
        self.hidden: HiddenStates | None = None  # memory for those that a drafter reads

    def keep_hidden(self, layers: Sequence[int]) -> HiddenStates:
        """Keep the hidden states of all tokens of each step from now on: of the last layer, and after these layers."""
        num_tokens, hidden_size = len(self.step.input_ids), self.model.spec.hidden_size
        memory = HiddenStates.allocate(num_tokens, hidden_size, layers, self._dtype, self.device.torch_device)
        self.hidden, self.model.taps = memory, memory.layers
        return memory

    def run(
        self,
        packed: Tensor,
        size: StepSize,
        prefills: Prefills | CapturedPrefills | None = None,
        indices: Tensor | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Return the hidden states of a packed step on the device: [T, hidden], or those at `indices` [N].

        `prefills` None: all sequences decode, or have a few tokens on a device without tiles.
        """
        metadata = self._metadata(packed, size, prefills)
        adapters = None
        if size.has_adapters:
            assert self.adapters is not None
            adapters = self.adapters.tokens(
                packed, segment_of(size.num_seqs), size.num_seqs, size.num_tokens, self._state
            )
        if images is not None:
            images.place(self.step.positions)
        return self._layers(size.num_tokens, metadata, indices, adapters, None if images is None else images.tokens)

    def last_tokens(self, step: StepRequest, packed: PackedStep) -> Tensor | None:
        """Return the indices of the tokens whose hidden states this stage returns; None: all."""
        return None if not self.model.stage.is_last or step.needs_every_token else self.sampled_tokens(packed)

    def sampled_tokens(self, packed: PackedStep) -> Tensor | None:
        """Return the indices of the tokens before samples; None: all. Without drafts, `run` writes them."""
        samples = packed.members.samples
        if packed.members.batch.total_num_tokens == len(samples):
            return None
        if samples.has_drafts:
            return self.device.upload(torch.tensor(samples.token_index))
        return self.step.samples.token_index[: len(samples)]

    def head_adapters(self, has_adapters: bool, tokens: slice | Tensor) -> kernels.AdapterTokens | None:
        """Return the adapters with which the output head reads some tokens of the step that was run last; None: none
        changes the head. `has_adapters`: see `StepSize`.
        """
        return self.adapters.of_newest(tokens) if has_adapters and self.adapters is not None else None

    def logits_of(self, hidden: Tensor, has_adapters: bool) -> Callable[[slice], Tensor]:
        """Return a function of the logits of some tokens of the step that was run last: hidden [T, hidden]."""
        return lambda tokens: self.model.logits(hidden[tokens], self.head_adapters(has_adapters, tokens))

    def sampled_adapters(self, step: StepRequest, packed: PackedStep) -> kernels.AdapterTokens | None:
        """Return those of the tokens before samples, see `sampled_tokens`."""
        if not step.has_adapters or not self.model.lm_head.has_adapters:
            return None
        indices = self.sampled_tokens(packed)
        return self.head_adapters(True, slice(len(packed.members.samples)) if indices is None else indices)

    def _metadata(
        self, packed: Tensor, size: StepSize, prefills: Prefills | CapturedPrefills | None
    ) -> dict[GroupAttention, AttentionMetadata]:
        num_seqs, num_tokens, num_decodes = size.num_seqs, size.num_tokens, size.num_decodes
        step, segment = self.step, segment_of(num_seqs)
        repeats = self._repeats and num_seqs == num_tokens == num_decodes
        kernels.prepare_step(packed, segment, num_seqs, num_tokens, self._block_size, self._state, step, repeats)
        query_start, context_lens = packed[segment : segment + num_seqs + 1], step.context_lens[:num_seqs]
        decode_lens = None
        if size.may_decode:
            ends = query_start[1 : 1 + num_decodes]
            decode_lens = torch.where(ends == self._ordinals[:num_decodes], context_lens[:num_decodes], 0)
            context_lens = context_lens.clamp(min=1)
        tensors = AttentionStep(
            num_decodes=num_decodes,
            rows=packed[:num_seqs],
            query_start=query_start,
            context_lens=context_lens,
            decode_lens=decode_lens,
            block_tables=self._state.block_tables,
            slot_mapping=step.slot_mapping[:, :num_tokens],
            has_common_prefix=size.has_common_prefix,
        )
        return {each: each.metadata(tensors, prefills) for each in self.attentions}

    def _layers(
        self,
        num_tokens: int,
        metadata: dict[GroupAttention, AttentionMetadata],
        indices: Tensor | None,
        adapters: kernels.AdapterTokens | None,
        images: ImageTokens | None,
    ) -> Tensor:
        hidden = None if self._link is None else self._link.received(num_tokens)
        ids, positions = self.step.input_ids[:num_tokens], self.step.positions[:num_tokens]
        attention = [metadata[each] for each in self._own]
        wanted = indices if self.hidden is None else None
        layers = partial(self.model, ids, positions, self.kv_cache, attention, hidden, wanted, adapters, images)
        hidden = self._run_layers(layers)
        if self.hidden is None:
            return hidden
        self.hidden.last[:num_tokens].copy_(hidden)
        return hidden if indices is None else hidden[indices]


class EagerSteps:
    """Runs any step, one kernel launch after another."""

    max_words = sys.maxsize

    def __init__(self, forward: ForwardPass, images: ImageReader | None = None) -> None:
        self._forward, self._images = forward, images

    def fits(self, step: StepRequest) -> Padding:
        return Padding()

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        forward, n = self._forward, packed.num_decodes
        on_device = packed.packed.to(forward.device.torch_device, non_blocking=True)
        prefills = None
        if not step.only_decodes:
            lens = step.batch.num_tokens[n:], packed.context_lens[n:].tolist()
            prefills = Prefills(*lens, forward.device.upload)
        size = StepSize(packed.num_seqs, packed.num_tokens, n, False, step.has_adapters, step.batch.has_common_prefix)
        images = None
        if step.has_images:
            assert self._images is not None
            images = self._images.step(packed)
        return Computed(hidden=forward.run(on_device, size, prefills, forward.last_tokens(step, packed), images))
