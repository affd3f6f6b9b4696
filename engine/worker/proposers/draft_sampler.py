"""Samples the tokens that a drafter proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from engine.worker.input_batch import Row
from engine.worker.proposers.draft_cache import DrafterSetup
from engine.worker.sampling.rejection import DraftProbabilities, distribution, draw
from kernels.data.layout import MIN_P, TEMPERATURE, TOP_K, TOP_P


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The n requests for which tokens are proposed."""

    rows: Tensor  # [n] int64: device rows
    newest: Tensor  # [n] int64: position of the newest token; below 0: the request got none
    num_slots: Tensor  # [n] int64: tokens that fit in its blocks
    greedy: bool  # all requests are


class DraftSampler:
    """Samples with the seeds, temperatures and filters of the requests, as the target does."""

    def __init__(self, setup: DrafterSetup) -> None:
        self._state = setup.state
        self.probabilities = DraftProbabilities() if setup.options.rejects_drafts else None
        self._sampled_from: list[Tensor] = []  # [n, V] for each token of the current proposals, if these are kept

    def sample(self, logits: Tensor, rows: DraftRows, ahead: int) -> Tensor:
        """Sample the token `ahead` of each request's newest from logits [n, V]: [n] int64."""
        if rows.greedy:
            return kernels.greedy_sample(logits)
        state, at = self._state, rows.rows
        params = kernels.SamplingRows(
            state.floats(TEMPERATURE)[at],
            state.records[at, TOP_K].int(),
            state.floats(TOP_P)[at],
            state.floats(MIN_P)[at],
            state.seed[at],
            rows.newest + ahead,
        )
        if self.probabilities is None:
            return kernels.sample(logits, params)
        self._sampled_from.append(found := distribution(logits, params))
        return draw(found, params.seeds, params.positions)

    def keep(self, requests: Sequence[Row], newest: Tensor, tokens: Tensor) -> None:
        """Keep what the tokens [n, k] of these requests were sampled from, if that is wanted, for rejection sampling.
        newest [n] int64: see `DraftRows`.
        """
        if self.probabilities is not None and self._sampled_from:
            self.probabilities.keep(requests, newest, tokens, torch.stack(self._sampled_from, 1))
        self._sampled_from.clear()
