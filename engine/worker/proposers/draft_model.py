"""Proposes with a smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.worker.attention.group_attention import AttentionStep, Prefills
from engine.worker.input_batch import PackedStep, Row
from engine.worker.proposers.draft_cache import DrafterSetup
from engine.worker.proposers.draft_sampler import DraftRows
from engine.worker.proposers.model_proposer import FirstPass, SuccessiveProposer
from engine.worker.proposers.proposer import SampledStep

# Tokens that a request's draft model catches up on. After more, drafts did not pay for long, and what it would cost
# may be more than they gain: the request gets no more of them.
MAX_LAG = 96


class DraftModelProposer(SuccessiveProposer):
    """Computes prompts in the steps in which the target does. While nothing is to be proposed, it leaves out the steps
    that decode, and computes their tokens later.

    So it records all tokens on the device: 4 bytes for each position of each row.
    """

    def __init__(self, model: Decoder, setup: DrafterSetup) -> None:
        super().__init__(setup)
        options = setup.options
        self._model = model
        self._max_tokens = options.max_num_batched_tokens + options.max_num_seqs  # of a pass
        size = options.max_num_seqs + 1, options.max_model_len + 1
        self._tokens = torch.zeros(size, dtype=torch.int32, device=options.device.torch_device)
        self._no_states = torch.zeros(self.max_split, 0, dtype=options.dtype, device=options.device.torch_device)
        # Row index → the request in it, and the first position that the draft model has not computed; -1: it has
        # computed all before the step.
        self._missing: dict[int, tuple[Row, int]] = {}

    @property
    def input_width(self) -> int:
        """See `SuccessiveProposer.input_width`."""
        return 0

    @property
    def output_width(self) -> int:
        """See `SuccessiveProposer.output_width`."""
        return self._model.spec.hidden_size

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """See `SuccessiveProposer.forward`. It reads no hidden states."""
        indices = metadata[-1].logits_indices
        return self._model(ids, positions, self.cache.layers, metadata, None, indices)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `SuccessiveProposer.logits`."""
        return self._model.logits(hidden)

    def first_pass(self, step: SampledStep) -> tuple[FirstPass, DraftRows] | None:
        """See `SuccessiveProposer.first_pass`."""
        self._record(step)
        starts, lens = self._plan(step.packed, only_prompts=not step.num_proposals)
        if not lens.any():
            return None
        rows = self.rows_of(step)
        hidden = self._compute(rows, starts, lens)
        if not step.num_proposals:
            return None
        first, ends = self.upload(np.stack((starts, starts + lens)))
        is_complete = (first <= rows.newest) & (rows.newest < ends) & (rows.newest < rows.num_slots)
        newest = torch.where(is_complete, rows.newest, -1)
        return FirstPass(hidden, newest), DraftRows(rows.rows, newest, rows.num_slots, rows.greedy)

    def _compute(self, rows: DraftRows, starts: np.ndarray, lens: np.ndarray) -> Tensor:
        """Compute `lens` [n] tokens of each request from the positions `starts` [n] on.

        Returns the result for each one's newest token, [n, hidden]; if that is not among them, for any.
        """
        at = lens.nonzero()[0]
        query_start = np.zeros(len(at) + 1, dtype=np.int64)
        np.cumsum(lens[at], out=query_start[1:])
        num_tokens = int(query_start[-1])
        of_tokens = np.repeat(at, lens[at])
        positions_of = np.arange(num_tokens) - np.repeat(query_start[:-1] - starts[at], lens[at])
        index, positions = self.upload(np.stack((of_tokens, positions_of)))
        chosen, first, begins, ends = self.upload(np.stack((at, starts[at], query_start[:-1], query_start[1:])))
        row, is_kept = rows.rows[index], positions < rows.num_slots[index]
        ids = self._tokens[row, positions].long()
        last = torch.minimum(begins + (rows.newest[chosen] - first).clamp(min=0), ends - 1)
        if num_tokens <= self.max_split:
            found = self.split_pass(ids, self._no_states[:num_tokens], row, positions, is_kept)[last]
        else:
            context_lens = (starts[at] + lens[at]).tolist()
            attention = AttentionStep(
                num_decodes=0,
                rows=rows.rows[chosen].int(),
                query_start=self.upload(query_start.astype(np.int32)),
                context_lens=self.upload(np.array(context_lens, dtype=np.int32)),
                decode_lens=None,
                block_tables=self.cache.block_tables,
                slot_mapping=self.cache.slots(row, positions, is_kept).unsqueeze(0),
            )
            prefills = Prefills(lens[at].tolist(), context_lens, self.device.upload)
            clamped = positions.clamp(max=self._options.max_model_len - 1).int()
            found = self.forward(ids, ids, clamped, self.cache.metadata(attention, prefills, last))
        if len(at) == len(lens):
            return found
        whole = found.new_zeros(len(lens), found.shape[1])
        whole[chosen] = found
        return whole

    def _record(self, step: SampledStep) -> None:
        """Record the step's tokens, and those that it sampled."""
        packed, samples = step.packed, step.samples
        members, num_tokens = packed.members, packed.members.batch.total_num_tokens
        rows, lens = self.upload(np.stack((members.row_indices, members.query_lens.astype(np.int64))))
        of_tokens = torch.repeat_interleave(rows, lens, output_size=num_tokens)
        self._tokens[of_tokens, step.step.positions[:num_tokens].long()] = step.step.input_ids[:num_tokens].int()
        of_samples = np.array([row.index for row in samples.rows], dtype=np.int64)
        at, positions = self.upload(np.stack((of_samples, packed.positions.astype(np.int64))))
        self._tokens[at, positions] = step.tokens.clamp(min=0).int()

    def _plan(self, packed: PackedStep, only_prompts: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the first position that each request computes now, and how many: [n] int64 each.

        A request computes all up to its newest token. The last ones may be of rejected drafts.
        """
        members, room = packed.members, self._max_tokens
        begins = packed.context_lens - members.query_lens
        starts, lens = begins.astype(np.int64), np.zeros(len(members.rows), dtype=np.int64)
        for i, row in enumerate(members.rows):
            if row.is_unknown:
                continue
            known, missing = self._missing.get(row.index, (row, -1))
            start = int(begins[i]) if known is not row or missing < 0 else min(missing, int(begins[i]))
            end = int(packed.context_lens[i]) + 1
            if i < members.batch.num_decodes and (only_prompts or int(begins[i]) - start > MAX_LAG):
                self._missing[row.index] = row, start
                continue
            count = min(end - start, room - (len(members.rows) - 1 - i))
            starts[i], lens[i], room = start, count, room - count
            self._missing[row.index] = row, -1 if start + count == end else start + count
        return starts, lens
