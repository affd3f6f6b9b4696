"""Proposes with a block drafter: all tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.models.drafters.dflash import BlockDrafter
from engine.models.residual import SublayerInput
from engine.worker.attention.group_attention import AttentionStep, Prefills
from engine.worker.options import MAX_DRAFTED_SEQS
from engine.worker.proposers.draft_cache import DrafterSetup
from engine.worker.proposers.draft_graphs import DraftWork
from engine.worker.proposers.draft_sampler import DraftRows
from engine.worker.proposers.model_proposer import ModelProposer, of_all_tokens
from engine.worker.proposers.proposer import SampledStep


class DFlashProposer(ModelProposer):
    """After each step it stores the keys and values of what the target computed. To propose, it runs a block after a
    request's newest token, whose own keys and values are overwritten as the target goes on.
    """

    def __init__(self, drafter: BlockDrafter, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self._drafter, self._block = drafter, drafter.spec
        self.layers: Sequence[int] | None = list(dict.fromkeys(drafter.spec.target_layers))
        options, device = setup.options, setup.options.device.torch_device
        has_windows = any(0 < mixer.window < options.max_model_len for mixer in setup.spec.mixers)
        # Tokens of blocks, up to which each is a sequence of its own: with windows, these would begin too late.
        self._most_split = options.max_decodes if options.device.is_accelerator and not has_windows else 0
        self._each = torch.arange(options.max_num_seqs * self._block.length + 1, dtype=torch.int32).to(device)
        self._no_states = torch.zeros(0, 0, dtype=options.dtype, device=device)

    def works(self) -> list[DraftWork]:
        """Return the blocks of few requests and the drafts from them, where each token is a sequence of its own."""
        most = min(self._most_split // self._block.length, MAX_DRAFTED_SEQS)
        if not self._captures or not most:
            return []
        return [DraftWork.up_to(most, self._draft_sampled, [0, len(self._state.records) - 1, -1, 0], width=0)]

    def propose(self, step: SampledStep) -> Tensor:
        """See `DeviceProposer.propose`."""
        self._store(step)
        n = len(step.packed.members.rows)
        if not step.num_proposals:
            return torch.full((n, 0), -1, dtype=torch.int64, device=self.device.torch_device)
        rows, newest_ids = self.rows_of(step), self._newest(step)
        if self._graphs and self._graphs[0].fits(n):
            integers = torch.stack((newest_ids, rows.rows, rows.newest, rows.num_slots))
            return self._graphs[0].run(integers, self._no_states)
        found, newest = self._draft(newest_ids, rows)
        self._sampler.keep(step.packed.members.rows, newest, found)
        return found

    def _draft_sampled(self, integers: Tensor, hidden: Tensor) -> Tensor:
        """Return the drafts of requests that may sample, see `DraftGraphs`."""
        newest_ids, rows, newest, num_slots = integers
        return self._draft(newest_ids, DraftRows(rows, newest, num_slots, greedy=False))[0]

    def _store(self, step: SampledStep) -> None:
        """Store keys and values of the step's tokens, rejected drafts among them."""
        assert step.hidden is not None
        num_tokens = step.packed.members.batch.total_num_tokens
        states = self._drafter.combine([step.hidden.layers[i][:num_tokens] for i in self._block.target_layers])
        positions, slots = step.step.positions[:num_tokens], step.step.slot_mapping[self.cache.group, :num_tokens]
        for layer, kv in zip(self._drafter.layers, self.cache.layers, strict=True):
            layer.store(states, positions, kv, slots)  # type: ignore[operator]

    def _newest(self, step: SampledStep) -> Tensor:
        """Return each request's newest kept token, any if it keeps none: [n] int64."""
        samples = step.samples
        first = self.upload(np.array([samples.of_request(i).start for i in range(samples.num_requests)]))
        return step.tokens[(first + step.counts - 1).clamp(min=0)].clamp(min=0)

    def _draft(self, newest_ids: Tensor, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """Return the drafts of n requests, [n, num_tokens] int64, and the positions before them, [n] int64: below 0
        where a block does not fit, so that there are none. newest_ids [n] int64.
        """
        block, n = self._block, len(newest_ids)
        ends = rows.newest + block.length
        fits = (rows.newest >= 0) & (ends <= rows.num_slots) & (ends <= self._options.max_model_len)
        hidden = self._run(replace(rows, newest=rows.newest.where(fits, 0)), fits, newest_ids)
        hidden = hidden.view(n, block.length, -1)[:, block.length - block.num_tokens :]
        logits = self._logits(hidden.flatten(0, 1)).view(n, block.num_tokens, -1)
        drafts, before = list[Tensor](), newest_ids
        for i in range(block.num_tokens):
            of_token = self._drafter.following(logits[:, i], hidden[:, i], before)
            drafts.append(self._sampler.sample(of_token, rows, i + 1))
            before = drafts[-1].clamp(min=0)
        found = torch.stack(drafts, 1)
        none = ((found < 0).cumsum(1) > 0) | ~fits.unsqueeze(1)
        return found.masked_fill(none, -1), rows.newest.where(fits, -1)

    def _run(self, rows: DraftRows, is_kept: Tensor, newest_ids: Tensor) -> Tensor:
        """Run the blocks of n requests. is_kept [n]: their keys and values are stored. Returns hidden states after the
        last norm: [n · length, hidden].
        """
        n, length = len(newest_ids), self._block.length
        ids = torch.full((n, length), self._block.mask_token_id, dtype=torch.int64, device=newest_ids.device)
        ids[:, 0] = newest_ids
        positions = (rows.newest.unsqueeze(1) + torch.arange(length, device=ids.device)).flatten()
        of_tokens = rows.rows.repeat_interleave(length, output_size=n * length)
        slots = self.cache.slots(of_tokens, positions, is_kept.repeat_interleave(length, output_size=n * length))
        ends = (rows.newest + length).int()
        splits = n * length <= self._most_split
        query_start = self._each[: n * length + 1] if splits else self._each[: n + 1] * length
        attention = AttentionStep(
            num_decodes=n * length if splits else 0,
            rows=(of_tokens if splits else rows.rows).int(),
            query_start=query_start,
            # Keys and values are stored before the layer attends, so each token sees the whole block.
            context_lens=ends.repeat_interleave(length, output_size=n * length) if splits else ends,
            decode_lens=None,
            block_tables=self.cache.block_tables,
            slot_mapping=slots.unsqueeze(0),
        )
        prefills = None if splits else Prefills([length] * n, ends.tolist(), self.device.upload)
        metadata = self.cache.metadata(attention, prefills)
        own = self._drafter.embed_tokens
        x = (self._target.embed if own is None else own)(ids.flatten())
        for layer, kv, of_layer in zip(self._drafter.layers, self.cache.layers, metadata, strict=True):
            x = layer(x, positions.int(), kv, of_layer)
        normed: Tensor = self._drafter.norm(x)
        return normed

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits of all tokens given normalised hidden states: [T, hidden] → [T, V]."""
        head, vocabulary = self._drafter.lm_head, self._drafter.vocabulary
        if head is None or vocabulary is None:
            return self._target.logits_of_normed(hidden)
        own = head.gather(head.own_logits(SublayerInput(hidden, normed=hidden)))
        return of_all_tokens(own, vocabulary.token_ids, self._target.spec.vocab_size)
