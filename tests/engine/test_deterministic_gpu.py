"""Deterministic mode on a GPU whose kernels are interpreted: a request's bytes alone, among others, and in chunks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import kernels
from engine import LLM, LoRARequest, SamplingParams
from engine.setup import deterministic as refusals
from tests.kernels.triton.test_deterministic import products_in_order as products_in_order
from tests.oracles.families import make_checkpoint
from tests.oracles.random_adapters import write_random_adapter
from tests.support.interpreted_gpu import interpret

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # captures compute rows that nothing has written

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention": ("glm4_moe_lite", {}),
    "delta rule": ("qwen3_5", {}),
    "adapters": ("qwen3", {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}),
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "state space": ("nemotron_h", {}),
    "kda": ("kimi_linear", {}),
    "convolutions": ("lfm2", {}),
    "int4": ("qwen3", {"quantization": "int4"}),
    "experts of int4": ("qwen3_moe", {"quantization": "int4"}),
    "adapters of experts": ("qwen3_moe", {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}),
}
ROWS = [[7 * i % 250 + 1 for i in range(length)] for length in (3, 19, 1)]
FINDS = {"finds_sequences": True}
WAYS: tuple[dict[str, Any], ...] = ({}, {"max_num_batched_tokens": 8, "enforce_eager": True})


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    for module, names in kernels.DETERMINISTIC["cuda"].items():
        for name in names.split():
            monkeypatch.setattr(kernels, name, getattr(importlib.import_module(module), name))
    monkeypatch.setattr(refusals, "UNCHECKED", frozenset())
    of_step = kernels.StateContext.of_step  # this device is a CPU's, whose kernels find sequences themselves
    monkeypatch.setattr(kernels.StateContext, "of_step", lambda *args, **own: of_step(*args, **own | FINDS))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_request_gives_the_same_bytes(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    make_checkpoint(family, tmp_path)
    own: dict[str, Any] = {}
    if "enable_lora" in settings:
        written = write_random_adapter(tmp_path / "adapter", tmp_path, 8, 0)
        own["lora_request"] = [LoRARequest("adapter", 1, str(written)), None, None]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=3, logprobs=1, ignore_eos=True) for i in range(3)
    ]

    def ask(llm: LLM, some: list[int]) -> list[Any]:
        prompts: list[Any] = [{"prompt_token_ids": ROWS[i]} for i in some]
        adapters = {name: [requests[i] for i in some] for name, requests in own.items()}
        results = llm.generate(prompts, [params[i] for i in some], use_tqdm=False, **adapters)
        found = [result.outputs[0] for result in results]
        assert all(each.logprobs for each in found)
        return [
            (each.token_ids, [[(k, v.logprob) for k, v in at.items()] for at in each.logprobs or ()]) for each in found
        ]

    alone: list[Any] = []
    for way in WAYS:
        llm = LLM(
            str(tmp_path), device="cpu", deterministic=True, dtype="float32", max_model_len=32, block_size=8,
            max_num_seqs=4, num_gpu_blocks_override=40, skip_tokenizer_init=True, **settings | way,
        )  # fmt: skip
        alone = alone or [ask(llm, [i])[0] for i in range(3)]
        assert ask(llm, [2, 0, 1]) == [alone[i] for i in (2, 0, 1)]
        llm.close()
