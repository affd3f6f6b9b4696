"""Encoders as on a GPU: their kernels compile at start-up and compute the vectors of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from engine.worker import startup
from tests.engine.test_encoders import PROMPTS, close, embedded, reference, start
from tests.support.interpreted_gpu import interpret

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 64}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("family", ["Bert", "ModernBert", "DebertaV2"])
def test_vectors_are_those_of_the_cpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference(tmp_path, family)
    prompts = [PROMPTS[i][:40] for i in (0, 1, 2, 4)]
    llm = start(tmp_path, **SETTINGS)
    expected = embedded(llm, prompts)
    llm.close()
    compile_kernels = startup.compile_kernels
    interpret(monkeypatch)
    monkeypatch.setattr(startup, "compile_kernels", compile_kernels)  # kernels run on steps that compute nothing
    llm = start(tmp_path, **SETTINGS)
    for found, want in zip(embedded(llm, prompts), expected, strict=True):
        close(found, want)
    llm.close()
