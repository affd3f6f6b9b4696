"""Drafters that read the target's hidden state at a position together with the token after it."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from engine.worker.attention.group_attention import AttentionStep, Prefills
from engine.worker.proposers.model_proposer import DraftRows, FirstPass, SuccessiveProposer
from engine.worker.proposers.proposer import HiddenStates, SampledStep


class FollowingProposer(SuccessiveProposer):
    """Its entry at a position is of the target's hidden state there and of the token after it. So each step of the
    target is followed by one over the same positions, in the same slots.
    """

    @property
    def input_width(self) -> int:
        """See `SuccessiveProposer.input_width`."""
        return self._target.spec.hidden_size

    @property
    def output_width(self) -> int:
        """See `SuccessiveProposer.output_width`."""
        return self._target.spec.hidden_size

    @abstractmethod
    def states(self, hidden: HiddenStates, num_tokens: int) -> Tensor:
        """Return what the drafter reads of the target's first T tokens: [T, hidden]."""

    def first_pass(self, step: SampledStep) -> tuple[FirstPass, DraftRows] | None:
        """See `SuccessiveProposer.first_pass`. It runs after each step: hidden states are not kept."""
        assert step.hidden is not None
        packed, rows, num_tokens = step.packed, self.rows_of(step), step.packed.members.batch.total_num_tokens
        ids, states = self._following_ids(step), self.states(step.hidden, num_tokens)
        members = packed.members
        starts = packed.context_lens - members.query_lens
        query_start, first = self.upload(np.stack((members.query_start[:-1], starts)).astype(np.int64))
        # Of a request that gets no token, any will do.
        last = query_start + (rows.newest - 1 - first).clamp(min=0)
        only_decodes = num_tokens == len(members.batch) + sum(members.batch.num_drafts)
        if only_decodes and num_tokens <= self.max_split:
            hidden = self._decoded(step, rows, ids, states)[last]
        else:
            hidden = self._prefilled(step, rows, ids, states, last)
        return (FirstPass(hidden, rows.newest - 1), rows) if step.num_proposals else None

    def _decoded(self, step: SampledStep, rows: DraftRows, ids: Tensor, states: Tensor) -> Tensor:
        """Run the drafter for the tokens of requests that decode: [T, hidden]."""
        of_tokens, num_tokens = rows.rows, len(ids)
        if num_tokens > len(of_tokens):
            counts = self.upload(step.packed.members.query_lens.astype(np.int64))
            of_tokens = torch.repeat_interleave(of_tokens, counts, output_size=num_tokens)
        positions = step.step.positions[:num_tokens].long()
        return self.split_pass(ids, states, of_tokens, positions, torch.ones_like(ids, dtype=torch.bool))

    def _prefilled(self, step: SampledStep, rows: DraftRows, ids: Tensor, states: Tensor, last: Tensor) -> Tensor:
        """Run the drafter for all tokens of a step. Returns the results at `last` [n]: [n, hidden]."""
        packed, num_tokens = step.packed, len(ids)
        batch, n = packed.members.batch, packed.members.batch.num_decodes
        lens = batch.num_tokens[n:], packed.context_lens[n:].tolist()
        attention = AttentionStep(
            num_decodes=n,
            rows=rows.rows.int(),
            query_start=self.upload(packed.members.query_start.astype(np.int32)),
            context_lens=self.upload(packed.context_lens),
            decode_lens=None,
            block_tables=self.block_tables,
            slot_mapping=step.step.slot_mapping[self._group : self._group + 1, :num_tokens],
        )
        prefills = Prefills(*lens, self.device.upload) if n < len(batch) else None
        return self.forward(ids, states, step.step.positions[:num_tokens], self.metadata(attention, prefills, last))

    def _following_ids(self, step: SampledStep) -> Tensor:
        """Return the token after each of the step's tokens: sampled, or the next of the prompt. [T] int64."""
        packed, samples = step.packed, step.samples
        members = packed.members
        num_tokens = members.batch.total_num_tokens
        ids = step.step.input_ids[:num_tokens].roll(-1)
        last = members.query_start[1:].astype(np.int64) - 1
        at = np.array(samples.token_index, dtype=np.int64) if samples.has_drafts else last
        known = np.full(len(at), -1, dtype=np.int64)
        for sample in samples.unwanted:  # of an unfinished chunk
            index = samples.request_of(sample)
            known[sample] = members.rows[index].token_ids[packed.context_lens[index]]
        where, given = self.upload(np.stack((at, known)))
        ids[where] = torch.where(given >= 0, given, step.tokens).clamp(min=0)
        return ids
