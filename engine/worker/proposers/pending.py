"""Tokens that the target has computed and a drafter has not yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.worker.input_batch import Row
from engine.worker.proposers.proposer import HiddenStates


class DraftTokens(NamedTuple):
    """T tokens of decoding requests, for a drafter that reads the target's hidden states."""

    ids: Tensor  # [T] int64: the token after each one
    rows: Tensor  # [T] int64: device rows
    positions: Tensor  # [T] int64
    is_kept: Tensor  # [T] int64: 0: the entry is not stored, since the position is computed again
    hidden: HiddenStates  # of the T tokens first


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
