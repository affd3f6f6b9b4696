"""Tokens that the target has computed and a drafter has not yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine.worker.input_batch import Row
from engine.worker.proposers.proposer import HiddenStates, SampledStep

Upload: TypeAlias = Callable[[np.ndarray], Tensor]  # copies to the device


class DraftTokens(NamedTuple):
    """T tokens of decoding requests, for a drafter that reads the target's hidden states."""

    ids: Tensor  # [T] int64: the token after each one
    rows: Tensor  # [T] int64: device rows
    positions: Tensor  # [T] int64
    is_kept: Tensor  # [T] int64: 0: the entry is not stored, since the position is computed again
    hidden: HiddenStates  # of the T tokens first

    @classmethod
    def of_decodes(cls, step: SampledStep, upload: Upload) -> DraftTokens:
        """Return the tokens of a step in which all requests decode."""
        assert step.hidden is not None
        members, num_tokens = step.packed.members, step.packed.members.batch.total_num_tokens
        positions = step.step.positions[:num_tokens].long()
        rows = upload(members.row_indices)
        if num_tokens == len(members.rows):
            return cls(step.tokens.clamp(min=0), rows, positions, (step.counts > 0).long(), step.hidden)
        counts = upload(members.query_lens.astype(np.int64))
        rows = torch.repeat_interleave(rows, counts, output_size=num_tokens)
        return cls(following_ids(step, upload), rows, positions, torch.ones_like(positions), step.hidden)


def following_ids(step: SampledStep, upload: Upload) -> Tensor:
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
    where, given = upload(np.stack((at, known)))
    ids[where] = torch.where(given >= 0, given, step.tokens).clamp(min=0)
    return ids


class PendingTokens:
    """Memory for tokens of decoding requests, with the hidden states of the target that the next step overwrites.

    A token is dropped once its request has lost its row. The cached prefix that it leaves lacks the drafter's entry
    then, so later drafts may be worse.
    """

    def __init__(self, size: int, hidden_size: int, layers: Sequence[int], like: Tensor) -> None:
        """`size`: the most tokens. `layers`: see `HiddenStates`. `like`: has the dtype and device of hidden states."""
        self.size = size
        self._integers = torch.zeros(4, size, dtype=torch.int64, device=like.device)
        self._hidden = HiddenStates.allocate(size, hidden_size, layers, like.dtype, like.device)
        self._requests: list[tuple[str, Row]] = []  # of each token: id and row

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: Sequence[tuple[str, Row]], tokens: DraftTokens) -> None:
        """Append tokens, given the id and the row of each one's request."""
        start, count = len(self._requests), len(requests)
        self._requests += requests
        for mine, theirs in zip(self._integers, tokens[:4], strict=True):
            mine[start : start + count] = theirs
        for mine, theirs in self._hidden.pairs(tokens.hidden):
            mine[start : start + count] = theirs[:count]

    def take(self, rows: Mapping[str, Row]) -> DraftTokens:
        """Remove all tokens, and return those of requests that still have their `rows`."""
        alive = [i for i, (name, row) in enumerate(self._requests) if rows.get(name) is row]
        integers, hidden, count = self._integers[:, : len(self._requests)], self._hidden, len(self._requests)
        self._requests = []
        if len(alive) < count:
            at = torch.tensor(alive, dtype=torch.int64, device=integers.device)
            integers, hidden = integers[:, at], hidden.select(at)
        ids, device_rows, positions, is_kept = integers
        return DraftTokens(ids, device_rows, positions, is_kept, hidden)
