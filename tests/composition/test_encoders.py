"""Encoders with every other feature that they have: an embedding is that of the text alone in the plainest engine.

Features that they cannot have are refused: tests/engine/test_encoders.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from tests.engine.test_encoders import PROMPTS, embedded, reference

WITH: dict[str, dict[str, Any]] = {
    "few blocks": {"num_gpu_blocks_override": 18},
    "one text a step": {"max_num_seqs": 1},
    "stages": {"pipeline_parallel_size": 2},
    "int8 weights": {"quantization": "int8"},
    "int8 weights, ranks": {"quantization": "int8", "tensor_parallel_size": 2},
    "fp8 weights, few blocks": {"quantization": "fp8", "num_gpu_blocks_override": 18},
    "int4 weights": {"quantization": "int4"},
    "no prefix cache, checks": {"enable_prefix_caching": False, "debug_checks": True},
}
ALONE = ("quantization", "tensor_parallel_size")  # settings that change an embedding's last bits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    reference(folder, "Bert", hidden_size=128, intermediate_size=256)
    return folder


def start(model: Path, settings: dict[str, Any]) -> LLM:
    return LLM(model=str(model), device="cpu", dtype="float32", skip_tokenizer_init=True, **settings)


@pytest.mark.parametrize("name", WITH)
@pytest.mark.usefixtures("forked")
def test_an_embedding_is_that_of_its_text_alone(name: str, model: Path) -> None:
    settings = WITH[name]
    plain = start(model, {key: value for key, value in settings.items() if key in ALONE})
    want = [embedded(plain, [prompt], normalize=True)[0] for prompt in PROMPTS]
    plain.close()
    llm = start(model, settings)
    for found, alone in zip(embedded(llm, PROMPTS, normalize=True), want, strict=True):
        torch.testing.assert_close(found, alone, atol=2e-6, rtol=1e-5)
    llm.close()


def test_sleep(model: Path) -> None:
    llm = start(model, {})
    want = embedded(llm, PROMPTS)
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        for found, before in zip(embedded(llm, PROMPTS), want, strict=True):
            torch.testing.assert_close(found, before, atol=1e-6, rtol=1e-6)
    llm.close()
