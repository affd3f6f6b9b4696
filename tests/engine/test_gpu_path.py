"""A step as it runs on a GPU, without one: all of it but the hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import kernels
from engine.engine import Engine
from engine.models.expansion import LatentExpansion
from engine.models.wide_pages import WidePages
from engine.setup import options
from engine.worker.attention import fp8_prefill, latent
from engine.worker.attention.fp8_prefill import Fp8PrefillAttention
from engine.worker.attention.group_attention import Prefills
from engine.worker.attention.latent import LatentGroupAttention
from engine.worker.cuda_graphs import DecodeGraphs
from engine.worker.executor import Computed, StepRequest
from engine.worker.input_batch import PackedStep

pytest.importorskip("triton")

from kernels.cuda import quantized_linear
from kernels.cuda.choice import CHOICE
from tests.oracles.families import make_checkpoint
from tests.oracles.quantised import make_quantised
from tests.support.drafts import Answers
from tests.support.interpreted_gpu import REQUESTS, InterpretedGPU, answers, interpret


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def test_tokens_are_those_of_the_cpu(tiny_model: Path, request: pytest.FixtureRequest) -> None:
    expected = answers(tiny_model)
    request.getfixturevalue("gpu")
    assert answers(tiny_model) == expected
    first, second = InterpretedGPU.graphs[::2], InterpretedGPU.graphs[1::2]  # sizes 4, 2, 1
    assert all(graph.num_replays for graph in first)
    assert all(graph.num_replays for graph in second[:2])


def test_tokens_with_drafts_that_graphs_of_decode_steps_verify(
    shallow_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    names = ["greedy", "long prompt", "sampled", "word"]
    expected = answers(shallow_model, names)
    request.getfixturevalue("gpu")
    monkeypatch.setattr(options, "STEP_DRAFTS", 4)
    monkeypatch.setattr(options, "SPLIT_DRAFTS", True)
    found = Answers()
    found.truth = 0.8
    for name in names:
        prompt, sampling = REQUESTS[name]
        found.answers[tuple(prompt), sampling.seed or 0] = expected[name]
    counts, sizes = [], list[int]()

    def begin(engine: Engine) -> None:
        policy = engine.scheduler._planner.drafts
        assert policy is not None
        policy._proposer = found
        counts.append(policy.counts)

    def noted(self: DecodeGraphs, step: StepRequest, packed: PackedStep) -> Computed:
        if step.output.drafts:
            assert packed.num_tokens == packed.num_seqs >= step.batch.total_num_tokens > len(step.batch)
            sizes.append(packed.num_seqs)
        return run(self, step, packed)

    run = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", noted)
    settings = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
    assert answers(shallow_model, names, begin, speculative_config=settings, num_gpu_blocks_override=24) == expected
    assert 8 in sizes, "padded sizes of steps with drafts"
    assert 0 < counts[0].num_accepted_tokens < counts[0].num_draft_tokens


def test_tokens_over_an_fp8_cache(shallow_model: Path, request: pytest.FixtureRequest) -> None:
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "max_num_seqs": 2}
    names = ["greedy", "long prompt"]
    expected = answers(shallow_model, names, **settings)
    assert expected != answers(shallow_model, names)
    request.getfixturevalue("gpu")
    request.getfixturevalue("exact_float8")
    assert answers(shallow_model, names, **settings) == expected


def test_tokens_over_wide_pages_of_an_fp8_cache(
    shallow_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Prompts beside decodes, and the full step at start-up."""
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    names = ["greedy", "long prompt", "late"]
    expected = answers(shallow_model, names, **settings)
    request.getfixturevalue("gpu")
    request.getfixturevalue("exact_float8")
    monkeypatch.setattr(fp8_prefill, "can_gain", lambda *_: True)
    monkeypatch.setattr(fp8_prefill, "seconds_saved", lambda *_: 1.0)
    steps, metadata = [], Fp8PrefillAttention.metadata

    def counted(self: Fp8PrefillAttention, step: Any, prefills: Any) -> Any:
        found = metadata(self, step, prefills)
        if isinstance(prefills, Prefills):
            assert isinstance(found.prefill_kv, WidePages)
            steps.append((found.num_decodes, prefills.query_lens, prefills.context_lens))
        return found

    monkeypatch.setattr(Fp8PrefillAttention, "metadata", counted)
    assert answers(shallow_model, names, **settings) == expected
    assert (0, [24], [48]) in steps, "the full step"
    assert any(num_decodes for num_decodes, _, _ in steps)


@pytest.mark.parametrize("form", ["fp8 by row", "fp8 blocks"])
def test_tokens_of_what_is_rounded_where_it_is_computed(
    form: str, shallow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Norms, and attention where a scale is a head's: as if the products themselves rounded them."""
    names, model = ["scored", "special"], shallow_model
    settings: dict[str, Any] = {"quantization": "fp8", "max_num_seqs": 2}
    if form == "fp8 blocks":
        pytest.importorskip("transformers")
        make_quantised(
            "qwen3_moe fp8-deepseek", tmp_path,
            shape={"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "num_hidden_layers": 1},
        )  # fmt: skip
        settings, model = {"skip_tokenizer_init": True, "max_num_seqs": 2}, tmp_path
    request.getfixturevalue("gpu")
    request.getfixturevalue("exact_float8")
    monkeypatch.setattr(quantized_linear, "multiplies_e4m3", lambda device: True)
    monkeypatch.setattr(quantized_linear, "CHOICE", replace(CHOICE, small_batch_tokens=1))
    rounding, rounded, attended = kernels.quantized_input, [], []
    decode = kernels.paged_attention_decode

    def counted(*args: Any) -> kernels.QuantizedRows | None:
        rounded.append(rounding(*args))
        return rounded[-1]

    def counted_decode(*args: Any, **options: Any) -> Tensor:
        attended.append(isinstance(options["out"], kernels.QuantizedRows))
        return decode(*args, **options)

    monkeypatch.setattr(kernels, "quantized_input", counted)
    monkeypatch.setattr(kernels, "paged_attention_decode", counted_decode)
    got = answers(model, names, **settings)
    assert any(each is not None for each in rounded)
    assert any(attended) == (form == "fp8 blocks")
    monkeypatch.setattr(kernels, "quantized_input", lambda *_: None)
    assert answers(model, names, **settings) == got


def test_tokens_of_expanded_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Prompts beside decodes, and the step at start-up that expands most."""
    pytest.importorskip("transformers")
    make_checkpoint("glm4_moe_lite", tmp_path, {"num_hidden_layers": 1})
    names = ["greedy", "long prompt", "late"]
    monkeypatch.setattr(latent, "is_worth_expanding", lambda *_: False)
    settings = {"skip_tokenizer_init": True}
    expected = answers(tmp_path, names, **settings)
    request.getfixturevalue("gpu")
    monkeypatch.setattr(latent, "is_worth_expanding", lambda *_: True)
    monkeypatch.setattr(latent, "FEWEST_QUERIES_ON_ACCELERATOR", 1)
    steps, metadata = [], LatentGroupAttention.metadata

    def counted(self: LatentGroupAttention, step: Any, prefills: Any) -> Any:
        found = metadata(self, step, prefills)
        if isinstance(found.prefill_kv, LatentExpansion):
            steps.append((found.num_decodes, prefills.query_lens, prefills.context_lens))
        return found

    monkeypatch.setattr(LatentGroupAttention, "metadata", counted)
    assert answers(tmp_path, names, **settings) == expected
    assert (0, [24], [63]) in steps, "the one that expands most"
    assert any(num_decodes for num_decodes, _, _ in steps)


def test_tokens_of_chosen_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Prompts and decodes that choose, in graphs, too."""
    pytest.importorskip("transformers")
    make_checkpoint("glm_moe_dsa", tmp_path, {"num_hidden_layers": 2, "index_topk": 12})
    names, settings = ["greedy", "long prompt", "late"], {"skip_tokenizer_init": True}
    expected = answers(tmp_path, names, **settings)
    request.getfixturevalue("gpu")
    kinds, metadata = set(), LatentGroupAttention.metadata

    def counted(self: LatentGroupAttention, step: Any, prefills: Any) -> Any:
        found = metadata(self, step, prefills)
        chooses = found.decode_choice is not None, found.prefill_choice is not None
        kinds.add((type(prefills).__name__, *chooses))
        return found

    monkeypatch.setattr(LatentGroupAttention, "metadata", counted)
    assert answers(tmp_path, names, **settings) == expected
    assert ("NoneType", True, False) in kinds, "decodes"
    assert ("Prefills", False, True) in kinds, "long prompts"
