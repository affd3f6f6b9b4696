"""The sampler: from a step's logits to its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.core.params.sampling import SamplingParams
from engine.worker.input_batch import MOST_RECENT, BatchSamples, InputBatch, Members, PackedStep, Row
from engine.worker.sampling.processors import (
    FOREVER,
    PROCESSORS,
    Context,
    GrammarMask,
    KernelParams,
    ProcessedRow,
    Processor,
    RowGroup,
)
from engine.worker.sampling.token_history import TokenHistory
from kernels.data.layout import Samples, StepTensors

MAX_ELEMENTS = 1 << 24  # most logits processed at a time


@dataclass(slots=True)
class Group:
    """n samples that are processed together. Only `longest` changes from step to step."""

    indices: list[int]  # of samples
    members: list[ProcessedRow]
    at: Tensor  # [n] int64: `indices`
    rows: Tensor  # [n] int64: device rows
    seeds: Tensor  # [n] int64
    kernel_params: KernelParams
    processors: list[Processor]
    slots: Tensor  # [h] int64: in the token history
    slots_of: Tensor  # [h] int64: index in the group of each slot's sample
    longest: int = 0  # tokens of the longest context in the current step


class Processed(NamedTuple):
    """Logits of n samples after their processors, and the filters that are left to apply."""

    at: Tensor  # [n] int64: the samples
    logits: Tensor  # [n, V]
    params: kernels.SamplingRows


@dataclass(slots=True)
class SamplingPlan:
    """Plan of the drawing of each sample of a batch. Valid for all steps of the batch until a processor is no longer
    needed.

    Indices are of samples, see `BatchSamples`. `guided` ones wait for masks, in the order of the masks. First come the
    `num_masked` samples that need nothing else, which `Sampler.sample_filtered` draws, then those of the groups with
    masks.
    """

    members: Members | None = None
    greedy: bool = True  # whether all samples are greedy
    filtered: bool = False  # whether some samples need `Sampler.sample_filtered`
    guided: list[int] = field(default_factory=list)
    num_masked: int = 0
    groups: list[tuple[Group, int]] = field(default_factory=list)  # group, index of its first mask; -1: it has none
    unsampled: list[int] = field(default_factory=list)  # of unfinished chunks and pooling requests, in descending order
    num_sampled: list[int] = field(default_factory=list)  # samples of each request, without the `unsampled` ones
    with_logprobs: list[int] = field(default_factory=list)
    lapsing: list[int] = field(default_factory=list)  # samples that need a processor only up to some length
    lapse_at: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # these lengths

    def is_valid(self, packed: PackedStep) -> bool:
        if self.members is not packed.members:
            return False
        return not self.lapsing or bool((packed.positions[self.lapsing] < self.lapse_at).all())


class Sampler:
    """Draws each sample of a step with its request's parameters and seed, independent of the rest of the batch. A
    sample is a row and a position, see `kernels.data.layout.Samples`; S counts them.

    There are three passes, and a step runs those that it needs. Random numbers depend only on seed and position, so a
    later pass replaces the tokens of an earlier one:

    1. `sample_unfiltered`, or with several ranks `sample_own`, in the step's CUDA graph: for samples that use only
       temperature;
    2. `sample_filtered`, in a separate graph: for samples with top_k, top_p or min_p, or with only a grammar mask;
    3. `sample_groups`: for samples with processors, from copies of their logits.
    """

    def __init__(
        self,
        batch: InputBatch,
        step: StepTensors,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        max_len: int,
        num_stages: int = 1,
    ) -> None:
        """max_len: the maximum length of a sequence, in tokens. num_stages: of the pipeline."""
        self._batch, self._step = batch, step
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        # The CPU writes masks, and the device reads them from the CPU's memory. When a step's masks are written, the
        # device may not have read those of the `num_stages - 1` steps before it, so there is an area for each.
        self._num_areas, self._area = num_stages, 0
        self._max_samples = batch.max_samples
        num_masks = num_stages * self._max_samples
        self._masks = batch.device.pinned(num_masks, -(-vocab_size // 32), dtype=torch.int32).fill_(-1)
        # [S]: index of each sample's mask in `_masks`; -1: none.
        self._mask_of = torch.full((self._max_samples,), -1, dtype=torch.int32, device=batch.device.torch_device)
        self.keeps_processed = False  # keep the logits of groups until the next step
        self.processed: list[Processed] = []
        self._new_history = partial(TokenHistory, batch.num_rows, max_len, batch.device)
        self.clear()

    def clear(self) -> None:
        """Forget all rows, as the input batch does."""
        self._mask_of.fill_(-1)
        self._history = self._new_history()
        self._processed: dict[int, ProcessedRow] = {}  # by device row
        self._plan = SamplingPlan()
        self._plain: dict[Members, SamplingPlan] = {}  # plans without processors, until rows change

    def update_rows(self, removed: list[Row], added: list[Row]) -> None:
        """Update the state for rows that the input batch has freed, then for rows that it has assigned."""
        self._plain.clear()
        for row in removed:
            found = self._processed.pop(row.index, None)
            if found is not None and found.slot >= 0:
                self._history.release(found.slot)
        for row in added:
            needed = [processor for processor in PROCESSORS if processor.needed(row.sampling)]
            if needed:
                num_prompt = row.num_prompt_tokens
                untils = [p.needed_until(row.sampling, num_prompt) for p in needed if p is not GrammarMask]
                slot = self._history.take(row.token_ids) if any(p.reads_history for p in needed) else -1
                self._processed[row.index] = ProcessedRow(row, max(untils, default=0), GrammarMask in needed, slot)

    @property
    def has_processed(self) -> bool:
        """Return whether some row has processors."""
        return bool(self._processed)

    def add_drafts(self, packed: PackedStep, drafts: Mapping[str, Sequence[int]]) -> None:
        """Store drafts in the histories that processors read. A sample is processed with its own length, so it sees
        only those before it.
        """
        members = packed.members
        for request_id, token_ids in drafts.items():
            i = members.indices[request_id]
            found = self._processed.get(members.rows[i].index)
            if found is not None and found.slot >= 0:
                tokens = np.array(token_ids, dtype=np.int32)
                self._history.put(found.slot, int(packed.context_lens[i]) - len(tokens), tokens)

    def sample_unfiltered(self, logits: Tensor, greedy: bool = False, stores: bool = True) -> Tensor:
        """Sample logits [S, V] → tokens [S] int64. Tokens of samples that need another pass are not valid yet.

        `stores`: rows get their newest tokens.
        """
        if greedy:
            tokens = kernels.greedy_sample(logits)
        else:
            tokens = self._sample(logits, kernels.Part.PLAIN)
        if stores:
            self._store(tokens, self._step.samples.rows[: len(tokens)])
        return tokens

    def store_undrafted(self, tokens: Tensor, samples: BatchSamples) -> None:
        """Store the tokens [S] of requests without drafts in a step that has some. The others' rows are set once their
        drafts have been compared.
        """
        rows, at = self._batch.device.upload(samples.undrafted)
        self._store(tokens[at], rows)

    def sample_own(self, own_logits: Tensor, first_id: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Sample as `sample_unfiltered` does, from this rank's logits [S, n], those of the tokens from `first_id` on.

        `gather`: returns the columns of all ranks, given this one's.
        """
        keys = kernels.best_keys(own_logits, self._params(len(own_logits)), first_id, self._vocab_size)
        tokens = kernels.best_tokens(gather(keys))
        self._store(tokens, self._step.samples.rows[: len(tokens)])
        return tokens

    def sample_filtered(self, logits: Tensor, tokens: Tensor) -> None:
        """Draw filtered and masked samples into tokens [S]. Applies masks to the logits [S, V] in place."""
        mask_of = self._mask_of[: len(logits)]
        kernels.mask_logits(logits, self._masks, mask_of)
        self._sample(logits, kernels.Part.REST, mask_of, tokens)
        self._store(tokens, self._step.samples.rows[: len(tokens)])

    def sample_groups(self, plan: SamplingPlan, masks: Tensor | None, logits: Tensor, tokens: Tensor) -> None:
        """Sample the groups of `plan` from logits [S, V], which are not changed, into tokens [S]. masks: by `masks`."""
        for group, first in plan.groups:
            own = None if masks is None or first < 0 else masks[first : first + len(group.indices)]
            self._sample_group(group, own, logits, tokens)

    def _sample(
        self, logits: Tensor, part: kernels.Part, mask_of: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return kernels.sample(logits, self._params(len(logits)), part, mask_of, out)

    def _params(self, n: int) -> kernels.SamplingRows:
        """Return the parameters of the first n samples."""
        samples = self._step.samples
        params = samples.temperature[:n], samples.top_k[:n], samples.top_p[:n], samples.min_p[:n]
        return kernels.SamplingRows(*params, samples.seed[:n], samples.next_position[:n])

    def _store(self, tokens: Tensor, rows: Tensor) -> None:
        """Store the tokens in their rows, where the next step reads them: tokens, rows [n] int64.

        Rows with drafts get one of their tokens; `InputBatch.rewind` sets these to the newest before the next step.
        """
        kernels.store_tokens(self._batch.state.last_token, rows, tokens)

    def _sample_group(self, group: Group, masks: Tensor | None, logits: Tensor, tokens: Tensor) -> None:
        lengths, params = self._step.samples.next_position.index_select(0, group.at), group.kernel_params
        context = Context(lengths, group.longest, group.seeds, masks, lambda: logits[group.at].float())
        own = context.raw()
        is_finite = own.amax(-1) < math.inf
        for processor in group.processors:
            processor.apply(own, context)
        filters = params.temperature, params.top_k, params.top_p, params.min_p
        rows = kernels.SamplingRows(*filters, group.seeds, lengths)
        sampled = kernels.sample(own, rows)
        if self.keeps_processed:
            self.processed.append(Processed(group.at, own, rows))
        # Processors give undefined results for NaN. If logits are finite, an empty set of tokens is the request's
        # fault.
        sampled.masked_fill_(sampled < 0, kernels.NOTHING_ALLOWED).masked_fill_(~is_finite, kernels.NOT_FINITE)
        tokens.scatter_(0, group.at, sampled)
        self._store(sampled, group.rows)
        if len(group.slots):
            self._history.append(group.slots, lengths[group.slots_of], sampled[group.slots_of].clamp(min=0))

    @property
    def step_samples(self) -> Samples:
        """The samples of the current step."""
        return self._step.samples

    def store_again(self, tokens: Tensor) -> None:
        """Store tokens [S] in the histories that processors read, after samples of the current step got others."""
        for group, _ in self._plan.groups:
            if len(group.slots):
                lengths = self._step.samples.next_position.index_select(0, group.at)
                found = tokens[group.at][group.slots_of].clamp(min=0)
                self._history.append(group.slots, lengths[group.slots_of], found)

    def plan(self, packed: PackedStep) -> SamplingPlan:
        """Return the plan of the step packed last."""
        self.processed.clear()
        was_masked, is_new = self._plan.num_masked > 0, not self._plan.is_valid(packed)
        if is_new:
            self._plan = self._plain.get(packed.members) or self._make_plan(packed)
        plan = self._plan
        for group, _ in plan.groups:
            group.longest = int(packed.positions[group.indices].max())
        if plan.guided:
            self._area = (self._area + 1) % self._num_areas
        if (is_new and (was_masked or plan.num_masked)) or (plan.num_masked and self._num_areas > 1):
            mask_of = torch.full((self._max_samples,), -1, dtype=torch.int32)
            first = self._area * self._max_samples
            mask_of[plan.guided[: plan.num_masked]] = torch.arange(first, first + plan.num_masked, dtype=torch.int32)
            self._mask_of.copy_(self._batch.device.upload(mask_of))
        return plan

    def masks(self, plan: SamplingPlan) -> Tensor:
        """Return the CPU's memory for the masks of the step planned last, one for each of `plan.guided`, to be filled
        before it is sampled: [n, (V + 31) // 32] int32, a bit for each token, the lowest first, set if it is allowed.
        """
        first = self._area * self._max_samples
        return self._masks[first : first + len(plan.guided)]

    def _make_plan(self, packed: PackedStep) -> SamplingPlan:
        members, samples = packed.members, packed.members.samples
        rows, unwanted = samples.rows, samples.unwanted
        plan = SamplingPlan(members, members.greedy, any(is_filtered(row.sampling) for row in members.rows))
        plan.num_sampled = [len(samples.of_request(i)) for i in range(samples.num_requests)]
        plan.unsampled = list(reversed(unwanted))
        if self._batch.num_pooled:
            pooled = [i for i, row in enumerate(rows) if row.pooling is not None]
            plan.unsampled = sorted({*unwanted, *pooled}, reverse=True)
        for i in plan.unsampled:
            plan.num_sampled[samples.request_of(i)] -= 1
        plan.with_logprobs = [
            i for i, row in enumerate(rows) if row.sampling.logprobs is not None and i not in unwanted
        ]
        if self._processed:
            self._plan_processed(plan, packed)
        else:
            if len(self._plain) == MOST_RECENT:
                self._plain.clear()
            self._plain[members] = plan
        return plan

    def _plan_processed(self, plan: SamplingPlan, packed: PackedStep) -> None:
        """Plan the samples that need processors."""
        lengths, samples = packed.positions.tolist(), packed.members.samples
        masked: list[int] = []
        guided: list[int] = []
        free: list[int] = []
        for i, row in enumerate(samples.rows):
            found = self._processed.get(row.index)
            if found is None or i in samples.unwanted:
                continue
            is_processed = lengths[i] < found.until
            if is_processed and found.until < FOREVER:
                plan.lapsing.append(i)
            if found.guided:
                # Log-probabilities need raw logits, but `sample_filtered` masks logits in place.
                (guided if is_processed or row.sampling.logprobs is not None else masked).append(i)
            elif is_processed:
                free.append(i)
        untils = [self._processed[samples.rows[i].index].until for i in plan.lapsing]
        plan.lapse_at = np.array(untils, dtype=np.int32)
        plan.guided, plan.num_masked = masked + guided, len(masked)
        plan.filtered |= bool(masked)
        plan.groups = [(group, -1) for group in self._groups(free, packed)]
        start = len(masked)
        for group in self._groups(guided, packed):
            plan.groups.append((group, start))
            start += len(group.indices)

    def _groups(self, indices: list[int], packed: PackedStep) -> list[Group]:
        size, rows = max(MAX_ELEMENTS // self._vocab_size, 1), packed.members.samples.rows
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [self._group(part, [self._processed[rows[i].index] for i in part]) for part in parts]

    def _group(self, indices: list[int], members: list[ProcessedRow]) -> Group:
        """Return a group of these samples, the last plan's if it has one."""
        for group, _ in self._plan.groups:
            if group.indices == indices and group.members == members:
                return group
        batch = self._batch
        own = RowGroup(members, self._history, self._vocab_size, self._eos_token_ids, batch.device)
        kinds = [kind for kind in PROCESSORS if any(kind.needed(row.sampling) for row in members)]
        unfiltered = [i for kind in kinds if kind.filters_itself for i in own.where(kind.needed)]
        with_history = [i for i, row in enumerate(members) if row.slot >= 0]
        rows = own.ints(row.row.index for row in members)
        return Group(
            indices=indices,
            members=members,
            at=own.ints(indices),
            rows=rows,
            seeds=batch.state.seed[rows],
            kernel_params=KernelParams.of(own, range(len(members)), unfiltered),
            processors=[kind(own) for kind in kinds],
            slots=own.slots(with_history),
            slots_of=own.ints(with_history),
        )


def is_filtered(params: SamplingParams) -> bool:
    """Return whether top_k, top_p or min_p may exclude tokens."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
