"""Finds the first operation of a step whose result for a sequence depends on the other sequences of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from engine.models.decoder import Decoder
from tests.oracles.paged_runner import PagedRunner

Calls = list[tuple[str, list[Tensor]]]


@contextmanager
def operations() -> Iterator[Calls]:
    """Give the name and copies of the results of each operation that is called within the context."""
    calls: Calls = []

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            tensors = result if isinstance(result, tuple) else (result,)
            if isinstance(options.get("out"), Tensor):
                tensors = (*tensors, options["out"])
            if found := [each.clone() for each in tensors if isinstance(each, Tensor)]:
                calls.append((name, found))
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, function in list(vars(kernels).items()):
            if hasattr(function, "__wrapped__"):
                patch.setattr(kernels, name, wrapped(name, function))
        yield calls


def parting(model: Decoder, prompts: list[list[int]], which: int) -> str:
    """Return the first operation whose rows for prompt `which` differ between a step of its own and one of all prompts;
    "": none does.
    """
    own = _step(model, [prompts[which]])
    every = _step(model, prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) > 1)  # as the runner puts them
    first = sum(len(prompts[i]) for i in order[: order.index(which)])
    count, total = len(prompts[which]), sum(map(len, prompts))
    others = "_attention_decode" if count > 1 else "_attention_prefill"  # only some of the steps have such sequences
    own, every = ([call for call in calls if not call[0].endswith(others)] for calls in (own, every))
    assert [name for name, _ in own] == [name for name, _ in every]
    for number, ((name, alone), (_, among)) in enumerate(zip(own, every, strict=True)):
        for got, want in zip(among, alone, strict=True):
            if len(want) != count or len(got) != total:
                continue  # it has no row for each token
            rows = int((got[first : first + count] != want).flatten(1).any(1).sum())
            if rows:
                return f"{name} (operation {number}): {rows} of {count} rows"
    return ""


def _step(model: Decoder, prompts: list[list[int]]) -> Calls:
    runner = PagedRunner(model, len(prompts), max_len=max(map(len, prompts)) + 1)
    sequences = [runner.start(prompt) for prompt in prompts]
    with operations() as calls, torch.inference_mode():
        runner.step([(sequence, len(prompt)) for sequence, prompt in zip(sequences, prompts, strict=True)])
    return calls
