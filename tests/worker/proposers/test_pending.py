"""Tokens that wait for a drafter: those of requests without a row are dropped."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.params.sampling import SamplingParams
from engine.worker.input_batch import Row
from engine.worker.proposers.pending import DraftTokens, PendingTokens
from engine.worker.proposers.proposer import HiddenStates


def _tokens(first: int, count: int, layers: tuple[int, ...]) -> DraftTokens:
    ids = torch.arange(first, first + count)
    states = HiddenStates.allocate(count + 3, 2, layers, torch.float32, torch.device("cpu"))
    for each in (states.last, *states.layers.values()):
        each[:count] = ids.unsqueeze(1)
    return DraftTokens(ids, ids + 10, ids + 20, torch.ones_like(ids), states)


def test_what_is_added_is_taken_once_without_the_tokens_of_lost_rows() -> None:
    rows = {name: Row(i, np.zeros(1, np.int32), 1, SamplingParams(), None) for i, name in enumerate("abc")}
    for layers in ((), (2, 5)):
        pending = PendingTokens(8, 2, layers, torch.zeros(0))
        pending.add([("a", rows["a"]), ("b", rows["b"])], _tokens(0, 2, layers))
        pending.add([("a", rows["a"]), ("b", rows["b"]), ("c", rows["c"])], _tokens(2, 3, layers))
        assert len(pending) == 5
        other = Row(1, np.zeros(1, np.int32), 1, SamplingParams(), None)  # b was preempted, and has started again
        taken = pending.take({"a": rows["a"], "b": other, "c": rows["c"]})
        assert len(pending) == 0
        assert taken.ids.tolist() == [0, 2, 4]
        assert taken.rows.tolist() == [10, 12, 14]
        assert taken.positions.tolist() == [20, 22, 24]
        for states in taken.hidden.layers.values() if layers else [taken.hidden.last]:
            assert states[:3].tolist() == [[0, 0], [2, 2], [4, 4]]
        pending.add([("c", rows["c"])], _tokens(7, 1, layers))
        assert pending.take(rows).ids.tolist() == [7]
