"""Log-probabilities on their way from the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.batch import ScheduledBatch
from engine.core.params.sampling import SamplingParams
from engine.worker.input_batch import Members, Row
from engine.worker.sampling.logprobs import SampledLogprobs

ASKED = [SamplingParams(logprobs=2), SamplingParams(), SamplingParams(logprob_token_ids=[4, 7, 0])]


class NothingWaits(TorchDispatchMode):
    """Fails where the CPU asks for a number, for which it would wait until a GPU has done all that is queued."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ != "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def test_tokens_asked_for_by_name() -> None:
    names = [str(i) for i in range(len(ASKED))]
    rows = {name: Row(i, np.zeros(1, np.int32), 1, ASKED[i], None) for i, name in enumerate(names)}
    members = Members(ScheduledBatch(names, [1] * 3, 3, 3, []), rows)
    logits, tokens = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([8, 1, 2])
    uploaded: list[torch.Tensor] = []

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        uploaded.append(tensor)
        return tensor

    with NothingWaits():  # type: ignore[no-untyped-call]
        found = SampledLogprobs.of(members, [0, 2], logits, tokens, to_device)
    assert len(uploaded) == 2, "indices cross the bus by what does not wait"
    first, named = (each for (each,) in found.read().values())
    expected = logits.log_softmax(1)
    assert first.logprob == pytest.approx(expected[0, 8].item())
    assert len(first.top_ids) == 2
    assert named.logprob == pytest.approx(expected[2, 2].item())
    assert dict(zip(named.top_ids, named.top_logprobs, strict=True)) == pytest.approx(
        {i: expected[2, i].item() for i in (4, 7, 0)}
    )
    assert named.top_logprobs == sorted(named.top_logprobs, reverse=True)
