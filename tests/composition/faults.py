"""Faults that tests add to an engine, here and in engine processes: late masks, and a request whose steps fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from engine.core import tiers
from engine.core.batch import SchedulerOutput
from engine.replicas import engine_process
from engine.structured import grammar_manager
from engine.worker.model_runner import ModelRunner

CULPRIT = "culprit"  # the name of the request whose steps fail
CULPRIT_PROMPT = [99] * 4
SOUND_TOKENS = 40  # of the culprit, of prompt and output, before its steps fail
VARIABLE = "QUIRE_TEST_FAULTS"


def inject(names: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Apply the named features' faults here and in the engine processes started from here."""
    apply(names, patch)
    patch.setenv(VARIABLE, ",".join(names))
    patch.setattr(engine_process, "ENGINE_MODULE", "tests.composition.faulty_process")


def apply(names: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Apply the faults in this process."""
    if "deferred sampling" in names:  # masks always miss the deadline
        patch.setattr(grammar_manager, "LEAST", 1)
        patch.setattr(grammar_manager._Filler, "number_in", lambda filler, seconds: 0)
    if "host tier" in names or "prefix-cache file" in names:  # short prompts come back, too
        patch.setattr(tiers, "MIN_LOADED_TOKENS", 1)
    if "step isolation" in names:
        computed: dict[str, int] = {}  # most tokens of the culprits
        launch = ModelRunner.launch

        def failing(runner: ModelRunner, output: SchedulerOutput) -> Any:
            for new in output.new_requests:
                if list(new.token_ids[: len(CULPRIT_PROMPT)]) == CULPRIT_PROMPT:
                    computed.setdefault(new.request_id, 0)
            for request_id in computed.keys() & set(output.batch.request_ids):
                if (row := runner.batch.rows.get(request_id)) is not None:
                    computed[request_id] = max(computed[request_id], runner.batch.num_computed(row))
                if computed[request_id] > SOUND_TOKENS:
                    raise IndexError("it cannot be computed")
            return launch(runner, output)

        patch.setattr(ModelRunner, "launch", failing)


def wanted() -> list[str]:
    """Return the faults that the process that started this one asks for."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]
