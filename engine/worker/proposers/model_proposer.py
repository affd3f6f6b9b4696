"""The common parts of drafters that run a model on the device: their KV cache, and drafts one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.attention import AttentionMetadata
from engine.worker.attention.group_attention import AttentionStep
from engine.worker.options import MAX_DRAFTED_SEQS
from engine.worker.proposers.draft_cache import DraftCache, DrafterSetup
from engine.worker.proposers.draft_graphs import SIZES, DraftGraphs, DraftWork
from engine.worker.proposers.draft_sampler import DraftRows, DraftSampler
from engine.worker.proposers.proposer import SampledStep
from engine.worker.sampling.rejection import DraftProbabilities

CAPTURES = True  # run what is captured on a GPU, unless there are several
SPLIT_TOKENS = SIZES[-1]  # up to so many tokens of decoding requests are computed as sequences of one token each


class FirstPass(NamedTuple):
    """The result of the tokens that a drafter had not seen."""

    hidden: Tensor  # [n, hidden]: of the last of them
    positions: Tensor  # [n] int64: where the drafter keeps the entry of that one


class ModelProposer(ABC):
    """Proposes the tokens that a drafter samples, with the seeds, temperatures and filters of the requests.

    The target samples with the same random numbers, so a drafter that gives the same logits is always right. It reads
    neither grammars nor penalties, nor adapters.
    """

    def __init__(self, setup: DrafterSetup) -> None:
        self._target, self._options, self.device = setup.target, setup.options, setup.options.device
        self.cache, self._sampler = DraftCache(setup), DraftSampler(setup)
        self._state, self._num = setup.state, setup.options.max_request_drafts
        self._graphs: list[DraftGraphs] = []  # of `works`, once they are captured

    layers: Sequence[int] | None = None  # see `DeviceProposer.layers`

    @property
    def probabilities(self) -> DraftProbabilities | None:
        """See `DeviceProposer.probabilities`."""
        return self._sampler.probabilities

    def allocate(self, num_blocks: int) -> None:
        """See `DeviceProposer.allocate`."""
        self.cache.allocate(num_blocks)

    def release(self) -> None:
        """See `DeviceProposer.release`."""
        self.cache.release()
        self._graphs = []

    @property
    def _captures(self) -> bool:
        # What ranks exchange for a drafter has not been captured on GPUs.
        return CAPTURES and self._options.num_ranks_per_stage == 1

    @abstractmethod
    def works(self) -> list[DraftWork]:
        """See `DeviceProposer.works`."""

    @torch.inference_mode()
    def capture(self) -> None:
        """See `DeviceProposer.capture`."""
        self._graphs = [DraftGraphs(self.device, work, self._options.dtype) for work in self.works()]

    @abstractmethod
    def propose(self, step: SampledStep) -> Tensor:
        """See `DeviceProposer.propose`."""

    def rows_of(self, step: SampledStep) -> DraftRows:
        """Return the requests of a step."""
        members, samples = step.packed.members, step.samples
        first = np.array([samples.of_request(i).start for i in range(samples.num_requests)])
        num_slots = step.num_blocks[self.cache.group].astype(np.int64) * self._options.block_size
        columns = np.stack((members.row_indices, step.packed.positions[first].astype(np.int64), num_slots))
        rows, next_positions, slots = self.upload(columns)
        newest = torch.where(step.counts > 0, next_positions + step.counts - 1, -1)
        if any(unknown := [row.is_unknown for row in members.rows]):
            newest.masked_fill_(self.upload(np.array(unknown)), -1)
        return DraftRows(rows, newest, slots, members.greedy)

    def upload(self, values: np.ndarray) -> Tensor:
        return self.device.upload(torch.from_numpy(values))


class SuccessiveProposer(ModelProposer):
    """Drafts one token after another: each is the input of a pass that gives the next one."""

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        options = setup.options
        self.max_split = min(SPLIT_TOKENS, options.max_decodes)
        each = torch.arange(max(options.max_num_seqs, self.max_split) + 1, dtype=torch.int32)
        self._each = each.to(options.device.torch_device)  # [n + 1]: starts of sequences of one token

    def works(self) -> list[DraftWork]:
        """Return passes over few tokens, and the drafts after them."""
        options, padding_row = self._options, len(self._state.records) - 1
        if not self._captures:
            return []
        passes, drafts = self.max_split, min(options.max_num_seqs, MAX_DRAFTED_SEQS)
        return [
            DraftWork.up_to(passes, self._split_pass, [0, padding_row, 0, 0], self.input_width),
            DraftWork.up_to(drafts, self._draft_sampled, [0, padding_row, -1, 0], self.output_width),
        ]

    @property
    @abstractmethod
    def input_width(self) -> int:
        """Size of the hidden states that `forward` reads; 0: it reads none."""

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Size of the results of `forward`."""

    def propose(self, step: SampledStep) -> Tensor:
        """See `DeviceProposer.propose`."""
        num, n = step.num_proposals, len(step.packed.members.rows)
        first = self.first_pass(step)
        if first is None:
            return torch.full((n, num), -1, dtype=torch.int64, device=self.device.torch_device)
        (hidden, positions), rows = first
        if self._graphs and num == self._num and self._graphs[1].fits(n):
            integers = torch.stack((positions, rows.rows, rows.newest, rows.num_slots))
            return self._graphs[1].run(integers, hidden)
        found = self._draft(hidden, positions, rows, num)
        self._sampler.keep(step.packed.members.rows, rows.newest, found)
        return found

    def _draft_sampled(self, integers: Tensor, hidden: Tensor) -> Tensor:
        """Return the drafts of requests that may sample, see `DraftGraphs`."""
        positions, rows, newest, num_slots = integers
        return self._draft(hidden, positions, DraftRows(rows, newest, num_slots, greedy=False), self._num)

    def _draft(self, hidden: Tensor, positions: Tensor, rows: DraftRows, num: int) -> Tensor:
        """Return `num` drafts of each request, [n, num] int64, after the first pass."""
        proposed = [self._sampler.sample(self.logits(hidden), rows, 1)]
        for i in range(1, num):
            positions = positions + 1
            is_kept = (positions < rows.num_slots) & (rows.newest >= 0)
            hidden = self._decode(proposed[-1].clamp(min=0), self.following(hidden), rows.rows, positions, is_kept)
            sampled = self._sampler.sample(self.logits(hidden), rows, i + 1)
            proposed.append(torch.where(is_kept & (proposed[-1] >= 0), sampled, -1))
        return torch.where((rows.newest >= 0).unsqueeze(1), torch.stack(proposed, 1), -1)

    def split_pass(self, ids: Tensor, hidden: Tensor, rows: Tensor, positions: Tensor, is_kept: Tensor) -> Tensor:
        """Run the drafter for at most `max_split` tokens of decoding requests, each as a sequence of its own: its
        request's earlier tokens are stored before it attends. All [T]; hidden [T, hidden] → [T, hidden].
        """
        if self._graphs and self._graphs[0].fits(len(ids)):
            return self._graphs[0].run(torch.stack((ids, rows, positions, is_kept.long())), hidden)
        return self._decode(ids, hidden, rows, positions, is_kept)

    def _split_pass(self, integers: Tensor, hidden: Tensor) -> Tensor:
        """See `split_pass` and `DraftGraphs`."""
        ids, rows, positions, is_kept = integers
        return self._decode(ids, hidden, rows, positions, is_kept > 0)

    def _decode(self, ids: Tensor, hidden: Tensor, rows: Tensor, positions: Tensor, is_kept: Tensor) -> Tensor:
        metadata = self._decode_metadata(rows, positions, is_kept)
        return self.forward(ids, hidden, positions.clamp(0, self._options.max_model_len - 1).int(), metadata)

    @abstractmethod
    def first_pass(self, step: SampledStep) -> tuple[FirstPass, DraftRows] | None:
        """Compute what the drafter has not seen of a step's tokens; None: nothing is proposed then."""

    @abstractmethod
    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """Run the drafter: ids [T] int64, positions [T] int32, and the hidden states that it reads, [T, hidden] →
        [T, hidden], or those at `logits_indices` of the last layer's metadata.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of all tokens, [n, vocab], on all ranks, given results of `forward`."""

    def following(self, hidden: Tensor) -> Tensor:
        """Return what `forward` reads for the next token, given its result for the one before."""
        return hidden

    def _decode_metadata(self, rows: Tensor, positions: Tensor, is_kept: Tensor) -> list[AttentionMetadata]:
        n = len(positions)
        context_lens = torch.where(is_kept, positions + 1, 1).int()
        step = AttentionStep(
            num_decodes=n,
            rows=rows.int(),
            query_start=self._each[: n + 1],
            context_lens=context_lens,
            decode_lens=None,
            block_tables=self.cache.block_tables,
            slot_mapping=self.cache.slots(rows, positions, is_kept).unsqueeze(0),
        )
        return self.cache.metadata(step, None)


def of_all_tokens(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return logits [n, vocab_size] of all tokens, given those of some [n, m]; the others have -inf."""
    found = logits.new_full((len(logits), vocab_size), -torch.inf)
    found[:, token_ids] = logits
    return found
