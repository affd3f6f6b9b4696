"""Captured decode steps answer as others do, while requests come and go."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from engine import LLM, LoRARequest, SamplingParams
from engine.worker.captured_steps import CapturedSteps
from kernels.cpu import build, library
from tests.oracles.families import make_checkpoint
from tests.oracles.random_adapters import write_random_adapter

PROMPTS = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 40, 9, 17, 3)]
PARAMS = [
    SamplingParams(temperature=t, max_tokens=n, seed=7, ignore_eos=True)
    for t, n in ((0, 20), (0.8, 5), (0, 33), (0.5, 12), (0, 2))
]


def answers(model: Path, num_requests: int = len(PROMPTS), **options: Any) -> list[list[int]]:
    llm = LLM(model=str(model), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, **options)
    outputs = llm.generate(PROMPTS[:num_requests], PARAMS[:num_requests], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_they_answer_as_steps_run_one_by_one(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    sizes = []
    run = CapturedSteps.run

    def counted(self: Any, step: Any, packed: Any) -> Any:
        sizes.append(packed.num_seqs)
        return run(self, step, packed)

    monkeypatch.setattr(CapturedSteps, "run", counted)
    captured = answers(demo_model, quantization=quantization)
    assert {1, 2, 3} <= set(sizes)
    count = len(sizes)
    assert answers(demo_model, quantization=quantization, enforce_eager=True) == captured
    assert len(sizes) == count


@pytest.mark.parametrize("compiler", [True, False])
def test_pytorch_has_threads_where_it_computes_steps(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, compiler: bool
) -> None:
    """Beside those of the kernels its own would only spin."""
    if not compiler:
        monkeypatch.setattr(build, "find_compiler", lambda: None)
    elif library.library() is None:
        pytest.skip("no compiler is installed")
    library.library.cache_clear()
    torch.set_num_threads(2)
    try:
        answers(demo_model, 1)
        assert torch.get_num_threads() == (1 if compiler else 2)
    finally:
        torch.set_num_threads(1)
        library.library.cache_clear()


FAMILIES = ["llama-biases", "qwen3", "gemma", "gemma2", "gemma3", "granite", "lfm2"]
HYBRIDS = ["qwen3_5", "granitemoehybrid-dense", "nemotron_h", "falcon_h1", "falcon_h1-norm"]


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_families_whose_steps_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """PyTorch computes no part of them: not GELUs, norms after a sublayer, multipliers, caps, convolutions, or
    recurrent layers. Steps that are not captured give the same tokens."""
    if library.library() is None:
        pytest.skip("no compiler is installed")
    make_checkpoint(family, tmp_path)
    replays, record = [], kernels.record

    def noted(work: Any) -> Any:
        recorded = record(work)
        replays.append(recorded.replay)
        return recorded

    monkeypatch.setattr(kernels, "record", noted)
    captured = answers(tmp_path, skip_tokenizer_init=True)
    assert len(replays) > 1
    assert all(replays)
    if family in HYBRIDS:
        assert answers(tmp_path, skip_tokenizer_init=True, enforce_eager=True) == captured


def test_steps_with_adapters_are_captured(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches mix adapters and none; each token is the same as in steps that are not captured."""
    if library.library() is None:
        pytest.skip("no compiler is installed")
    adapters = [write_random_adapter(tmp_path / str(i), tiny_model, rank, i) for i, rank in enumerate((4, 16))]
    requests = [None, *(LoRARequest(each.name, i + 1, str(each)) for i, each in enumerate(adapters))]
    replays, record = [], kernels.record

    def noted(work: Any) -> Any:
        recorded = record(work)
        replays.append(recorded.replay)
        return recorded

    monkeypatch.setattr(kernels, "record", noted)
    found = []
    for eager in (False, True):
        llm = LLM(
            model=str(tiny_model), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, enable_lora=True,
            enforce_eager=eager, skip_tokenizer_init=True,
        )  # fmt: skip
        each = [requests[i % 3] for i in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=each)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    assert len(replays) > 1
    assert all(replays)
