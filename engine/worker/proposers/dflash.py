"""Proposes with a block drafter: all tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.models.drafters.dflash import BlockDrafter
from engine.models.residual import SublayerInput
from engine.worker.attention.group_attention import AttentionStep, Prefills
from engine.worker.proposers.model_proposer import DrafterSetup, DraftRows, ModelProposer, of_all_tokens
from engine.worker.proposers.proposer import SampledStep


class DFlashProposer(ModelProposer):
    """After each step it stores the keys and values of what the target computed. To propose, it runs a block after a
    request's newest token, whose own keys and values are overwritten as the target goes on.
    """

    def __init__(self, drafter: BlockDrafter, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self._drafter, self._block = drafter, drafter.spec
        self.layers: Sequence[int] | None = list(dict.fromkeys(drafter.spec.target_layers))

    def capture(self) -> None:
        """Capture nothing: it runs on CPUs only."""

    def propose(self, step: SampledStep) -> Tensor:
        """See `DeviceProposer.propose`."""
        self._store(step)
        n = len(step.packed.members.rows)
        found = torch.full((n, step.num_proposals), -1, dtype=torch.int64, device=self.device.torch_device)
        if not step.num_proposals:
            return found
        rows, newest_ids = self.rows_of(step), self._newest(step)
        ends = rows.newest + self._block.length
        fits = (rows.newest >= 0) & (ends <= rows.num_slots) & (ends <= self._max_len)
        at = fits.nonzero().squeeze(1)
        if not len(at):
            return found
        chosen = DraftRows(rows.rows[at], rows.newest[at], rows.num_slots[at], rows.greedy)
        hidden = self._run(chosen, newest_ids[at])
        found[at] = guessed = self._guess(hidden, chosen, newest_ids[at])
        requests = step.packed.members.rows
        self.keep_probabilities([requests[i] for i in at.tolist()], chosen.newest, guessed)
        return found

    def _store(self, step: SampledStep) -> None:
        """Store keys and values of the step's tokens, rejected drafts among them."""
        assert step.hidden is not None
        num_tokens = step.packed.members.batch.total_num_tokens
        states = self._drafter.combine([step.hidden.layers[i][:num_tokens] for i in self._block.target_layers])
        positions, slots = step.step.positions[:num_tokens], step.step.slot_mapping[self._group, :num_tokens]
        for layer, kv in zip(self._drafter.layers, self.kv_cache, strict=True):
            layer.store(states, positions, kv, slots)  # type: ignore[operator]

    def _newest(self, step: SampledStep) -> Tensor:
        """Return each request's newest kept token, any if it keeps none: [n] int64."""
        samples = step.samples
        first = self.upload(np.array([samples.of_request(i).start for i in range(samples.num_requests)]))
        return step.tokens[(first + step.counts - 1).clamp(min=0)].clamp(min=0)

    def _run(self, rows: DraftRows, newest_ids: Tensor) -> Tensor:
        """Run the blocks of n requests. Returns hidden states after the last norm: [n · length, hidden]."""
        n, length = len(newest_ids), self._block.length
        ids = torch.full((n, length), self._block.mask_token_id, dtype=torch.int64, device=newest_ids.device)
        ids[:, 0] = newest_ids
        positions = (rows.newest.unsqueeze(1) + torch.arange(length, device=ids.device)).flatten()
        lens = (rows.newest + length).tolist()
        starts = self.upload(np.array([0, *accumulate([length] * n)], dtype=np.int32))
        slots = self.slots(rows.rows.repeat_interleave(length), positions, torch.ones_like(positions, dtype=torch.bool))
        attention = AttentionStep(
            num_decodes=0,
            rows=rows.rows.int(),
            query_start=starts,
            context_lens=(rows.newest + length).int(),
            decode_lens=None,
            block_tables=self.block_tables,
            slot_mapping=slots.unsqueeze(0),
        )
        metadata = self.metadata(attention, Prefills([length] * n, lens, self.device.upload))
        own = self._drafter.embed_tokens
        x = (self._target.embed if own is None else own)(ids.flatten())
        for layer, kv, of_layer in zip(self._drafter.layers, self.kv_cache, metadata, strict=True):
            x = layer(x, positions.int(), kv, of_layer)
        normed: Tensor = self._drafter.norm(x)
        return normed

    def _guess(self, hidden: Tensor, rows: DraftRows, newest_ids: Tensor) -> Tensor:
        """Return the guesses of n requests, [n, num_tokens] int64, given the hidden states of their blocks."""
        block, n = self._block, len(newest_ids)
        hidden = hidden.view(n, block.length, -1)[:, block.length - block.num_tokens :]
        logits = self._logits(hidden.flatten(0, 1)).view(n, block.num_tokens, -1)
        guessed, before = list[Tensor](), newest_ids
        for i in range(block.num_tokens):
            of_token = self._drafter.following(logits[:, i], hidden[:, i], before)
            guessed.append(self.sample(of_token, rows, i + 1))
            before = guessed[-1].clamp(min=0)
        found = torch.stack(guessed, 1)
        return torch.where((found < 0).cumsum(1) > 0, -1, found)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits of all tokens given normalised hidden states: [T, hidden] → [T, V]."""
        head, vocabulary = self._drafter.lm_head, self._drafter.vocabulary
        if head is None or vocabulary is None:
            return self._target.logits_of_normed(hidden)
        own = head.gather(head.own_logits(SublayerInput(hidden, normed=hidden)))
        return of_all_tokens(own, vocabulary.token_ids, self._target.spec.vocab_size)
