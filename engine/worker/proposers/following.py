"""Drafters that read the target's hidden state at a position together with the token after it."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from engine.worker.attention.group_attention import AttentionStep, Prefills
from engine.worker.input_batch import Row
from engine.worker.proposers.draft_cache import DrafterSetup
from engine.worker.proposers.draft_sampler import DraftRows
from engine.worker.proposers.model_proposer import FirstPass, SuccessiveProposer
from engine.worker.proposers.pending import DraftTokens, PendingTokens, following_ids
from engine.worker.proposers.proposer import HiddenStates, SampledStep


class FollowingProposer(SuccessiveProposer):
    """Its entry at a position is of the target's hidden state there and of the token after it. So each step of the
    target is followed by one over the same positions, in the same slots.

    While nothing is to be proposed, steps that decode are left out: their hidden states are kept, and many tokens are
    computed in one pass once there is no more room or something is to be proposed.
    """

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self._pending: PendingTokens | None = None

    @property
    def input_width(self) -> int:
        """See `SuccessiveProposer.input_width`."""
        return self._target.spec.hidden_size

    @property
    def output_width(self) -> int:
        """See `SuccessiveProposer.output_width`."""
        return self._target.spec.hidden_size

    def allocate(self, num_blocks: int) -> None:
        """See `DeviceProposer.allocate`."""
        super().allocate(num_blocks)
        like = torch.empty(0, dtype=self._options.dtype, device=self.device.torch_device)
        self._pending = PendingTokens(self.max_split, self.input_width, self.layers or (), like)

    def release(self) -> None:
        """See `DeviceProposer.release`."""
        super().release()
        self._pending = None

    @abstractmethod
    def states(self, hidden: HiddenStates, num_tokens: int) -> Tensor:
        """Return what the drafter reads of the target's first T tokens: [T, hidden]."""

    def first_pass(self, step: SampledStep) -> tuple[FirstPass, DraftRows] | None:
        """See `SuccessiveProposer.first_pass`."""
        pending, batch = self._pending, step.packed.members.batch
        assert pending is not None
        num_tokens, is_wanted = batch.total_num_tokens, step.num_proposals > 0
        only_decodes = num_tokens == len(batch) + sum(batch.num_drafts)
        fits = only_decodes and len(pending) + num_tokens <= pending.size
        if len(pending) and not fits:
            self._run(pending.take(step.rows))
        if only_decodes and num_tokens <= pending.size:
            tokens = DraftTokens.of_decodes(step, self.upload)
            if len(pending) or not (is_wanted or batch.num_drafts):  # one pass has no rejected drafts but the last
                pending.add(_requests(step), tokens)
                if not is_wanted and not batch.num_drafts:
                    return None
                tokens = pending.take(step.rows)
            found = self._run(tokens)[-num_tokens:]
            if not is_wanted:
                return None
            rows = self.rows_of(step)
            hidden = found[self._last(step, rows)]
        else:
            rows = self.rows_of(step)
            hidden = self._prefilled(step, rows)
        return (FirstPass(hidden, rows.newest - 1), rows) if is_wanted else None

    def _last(self, step: SampledStep, rows: DraftRows) -> Tensor:
        """Return the last token that each request keeps, of the step's tokens: [n] int64; any if it keeps none."""
        packed = step.packed
        starts = packed.context_lens - packed.members.query_lens
        query_start, first = self.upload(np.stack((packed.members.query_start[:-1], starts)).astype(np.int64))
        return query_start + (rows.newest - 1 - first).clamp(min=0)

    def _run(self, tokens: DraftTokens) -> Tensor:
        """Run the drafter for tokens of requests that decode: [T, hidden]."""
        ids, rows, positions, is_kept, hidden = tokens
        if not len(ids):  # all requests have lost their rows
            return hidden.last[:0]
        return self.split_pass(ids, self.states(hidden, len(ids)), rows, positions, is_kept > 0)

    def _prefilled(self, step: SampledStep, rows: DraftRows) -> Tensor:
        """Run the drafter for all tokens of a step. Returns the results for each request's last token: [n, hidden]."""
        assert step.hidden is not None
        packed, batch = step.packed, step.packed.members.batch
        n, num_tokens = batch.num_decodes, batch.total_num_tokens
        ids, last = following_ids(step, self.upload), self._last(step, rows)
        states = self.states(step.hidden, num_tokens)
        lens = batch.num_tokens[n:], packed.context_lens[n:].tolist()
        attention = AttentionStep(
            num_decodes=n,
            rows=rows.rows.int(),
            query_start=self.upload(packed.members.query_start.astype(np.int32)),
            context_lens=self.upload(packed.context_lens),
            decode_lens=None,
            block_tables=self.cache.block_tables,
            slot_mapping=step.step.slot_mapping[self.cache.group : self.cache.group + 1, :num_tokens],
        )
        prefills = Prefills(*lens, self.device.upload) if n < len(batch) else None
        return self.forward(
            ids, states, step.step.positions[:num_tokens], self.cache.metadata(attention, prefills, last)
        )


def _requests(step: SampledStep) -> list[tuple[str, Row]]:
    """Return the id and the row of the request of each of a step's tokens."""
    batch = step.packed.members.batch
    counted = zip(batch.request_ids, step.packed.members.rows, batch.num_tokens, strict=True)
    return [(name, row) for name, row, count in counted for _ in range(count)]
