"""Drafters that read the target's hidden state at a position together with the token after it."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from engine.worker.attention.group_attention import AttentionStep, Prefills
from engine.worker.proposers.model_proposer import DraftRows, FirstPass, ModelProposer
from engine.worker.proposers.proposer import HiddenStates, SampledStep


class FollowingProposer(ModelProposer):
    """Its entry at a position is of the target's hidden state there and of the token after it. So each step of the
    target is followed by one over the same positions, in the same slots.
    """

    @abstractmethod
    def states(self, hidden: HiddenStates, num_tokens: int) -> Tensor:
        """Return what the drafter reads of the target's first T tokens: [T, hidden]."""

    def first_pass(self, step: SampledStep) -> tuple[FirstPass, DraftRows] | None:
        """See `ModelProposer.first_pass`. It runs after each step: hidden states are not kept."""
        assert step.hidden is not None
        packed, rows = step.packed, self.rows_of(step)
        members, batch = packed.members, packed.members.batch
        n, num_tokens, num_decodes = len(batch), batch.total_num_tokens, batch.num_decodes
        starts = packed.context_lens - members.query_lens
        columns = np.stack((members.row_indices, members.query_start[:-1], starts)).astype(np.int64)
        _, query_start, first = self.upload(columns)
        # Of a request that gets no token, any will do.
        last = query_start + (rows.newest - 1 - first).clamp(min=0)
        whole = self.upload(members.query_start.astype(np.int32))
        prefills = None
        if num_decodes < n:
            lens = batch.num_tokens[num_decodes:], packed.context_lens[num_decodes:].tolist()
            prefills = Prefills(*lens, self.device.upload)
        attention = AttentionStep(
            num_decodes=num_decodes,
            rows=rows.rows.int(),
            query_start=whole,
            context_lens=self.upload(packed.context_lens),
            decode_lens=None,
            block_tables=self.block_tables,
            slot_mapping=step.step.slot_mapping[self._group : self._group + 1, :num_tokens],
        )
        hidden = self.forward(
            self._following_ids(step),
            self.states(step.hidden, num_tokens),
            step.step.positions[:num_tokens],
            self.metadata(attention, prefills, None if num_tokens == n else last),
        )
        return (FirstPass(hidden, rows.newest - 1), rows) if step.num_proposals else None

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
