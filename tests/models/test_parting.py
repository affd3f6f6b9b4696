"""The search for the operation that parts finds it, and finds none where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from engine.models.families import read_spec
from tests.oracles.families import make_checkpoint
from tests.support.loaded import load
from tests.support.parting import parting

PROMPTS = [[3 + 7 * i % 90 + j for j in range(1 + 5 * i % 31)] for i in range(9)]


pytestmark = pytest.mark.usefixtures("deterministic")


def test_the_first_operation_that_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("qwen3", tmp_path)
    model = load(tmp_path, read_spec(tmp_path), dtype=torch.bfloat16)
    model.pack_weights()
    assert [parting(model, PROMPTS, i) for i in range(len(PROMPTS))] == [""] * len(PROMPTS)
    multiply: Any = kernels.norm_linear

    def by_size(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = multiply(x, *args, **options)
        return result.mul_(1.25) if len(x) > 64 else result

    by_size.__wrapped__ = multiply  # type: ignore[attr-defined]
    monkeypatch.setattr(kernels, "norm_linear", by_size)
    assert parting(model, PROMPTS, 4) == "norm_linear (operation 1): 21 of 21 rows"
