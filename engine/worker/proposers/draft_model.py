"""Proposes with a smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.drafters.spec import DraftSpec
from engine.worker.attention.group_attention import AttentionStep, Prefills
from engine.worker.input_batch import PackedStep, Row
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from engine.worker.proposers.model_proposer import DraftRows, FirstPass, ModelProposer
from engine.worker.proposers.proposer import SampledStep
from kernels.data.layout import RowState


class DraftModelProposer(ModelProposer):
    """Computes prompts in the steps in which the target does. While nothing is to be proposed, it leaves out the steps
    that decode, and computes their tokens later.

    So it records all tokens on the device: 4 bytes for each position of each row.
    """

    def __init__(
        self, model: Decoder, spec: DraftSpec, layout: KVCacheLayout, options: RunnerOptions, state: RowState
    ) -> None:
        super().__init__(spec, layout, options, state)
        self._model = model
        self._max_tokens = options.max_num_batched_tokens + options.max_num_seqs  # of a pass
        size = options.max_num_seqs + 1, options.max_model_len + 1
        self._tokens = torch.zeros(size, dtype=torch.int32, device=options.device.torch_device)
        # Row index → the request in it, and the first position that the draft model has not computed; -1: it has
        # computed all before the step.
        self._missing: dict[int, tuple[Row, int]] = {}

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """See `ModelProposer.forward`. It reads no hidden states."""
        indices = metadata[-1].logits_indices
        return self._model(ids, positions, self.kv_cache, metadata, None, indices)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `ModelProposer.logits`."""
        return self._model.logits(hidden)

    def first_pass(self, step: SampledStep) -> tuple[FirstPass, DraftRows] | None:
        """See `ModelProposer.first_pass`."""
        packed, batch = step.packed, step.packed.members.batch
        self._record(step)
        starts, lens = self._plan(packed, only_prompts=not step.num_proposals)
        if not lens.any():
            return None
        rows = self.rows_of(step)
        at = lens.nonzero()[0]
        query_start = np.zeros(len(at) + 1, dtype=np.int64)
        np.cumsum(lens[at], out=query_start[1:])
        num_tokens = int(query_start[-1])
        chosen, first, begins = self.upload(np.stack((at, starts[at], query_start[:-1])))
        of_seq = rows.rows[chosen]
        seq = torch.repeat_interleave(
            torch.arange(len(at), device=chosen.device), self.upload(lens[at]), output_size=num_tokens
        )
        offsets = torch.arange(num_tokens, device=chosen.device) - begins[seq]
        positions = first[seq] + offsets
        slots = self.slots(of_seq[seq], positions, positions < rows.num_slots[chosen][seq])
        decodes = int((lens[at] == 1).sum()) if (lens[at] == 1).all() else 0
        ends = (starts[at] + lens[at]).tolist()
        attention = AttentionStep(
            num_decodes=decodes,
            rows=of_seq.int(),
            query_start=self.upload(query_start.astype(np.int32)),
            context_lens=self.upload(np.array(ends, dtype=np.int32)),
            decode_lens=None,
            block_tables=self.block_tables,
            slot_mapping=slots.unsqueeze(0),
        )
        prefills = None if decodes else Prefills(lens[at].tolist(), ends, self.device.upload)
        ids = self._tokens[of_seq[seq], positions].long()
        last = begins + (rows.newest[chosen] - first).clamp(min=0)
        last = torch.minimum(last, begins + self.upload(lens[at]) - 1)
        clamped = positions.clamp(max=self._max_len - 1).int()
        hidden = self.forward(ids, ids, clamped, self.metadata(attention, prefills, last))
        if not step.num_proposals:
            return None
        whole = hidden.new_zeros(len(batch), hidden.shape[1])
        whole[chosen] = hidden
        is_complete = torch.zeros(len(batch), dtype=torch.bool, device=chosen.device)
        is_complete[chosen] = rows.newest[chosen] < first + self.upload(lens[at])
        is_complete &= rows.newest < rows.num_slots
        newest = torch.where(is_complete, rows.newest, -1)
        rows = DraftRows(rows.rows, newest, rows.num_slots, rows.greedy)
        return FirstPass(whole, newest), rows

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
            known, missing = self._missing.get(row.index, (row, -1))
            start = int(begins[i]) if known is not row or missing < 0 else min(missing, int(begins[i]))
            end = int(packed.context_lens[i]) + 1
            if only_prompts and i < members.batch.num_decodes:
                self._missing[row.index] = row, start
                continue
            count = min(end - start, room - (len(members.rows) - 1 - i))
            starts[i], lens[i], room = start, count, room - count
            self._missing[row.index] = row, -1 if start + count == end else start + count
        return starts, lens
