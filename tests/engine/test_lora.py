"""LoRA through the whole engine, against models into which PEFT has merged the adapter, in float32."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("gguf")

from engine import LLM, BeamSearchParams, ConfigError, EngineConfig, LoRARequest, SamplingParams
from engine.models.gguf import folder as gguf_folder
from engine.worker import adapter_slots
from kernels.cpu import library
from tests.oracles.gguf_files import write_gguf
from tests.oracles.peft_adapters import PROMPTS, answers, base_model, make_adapter
from tests.oracles.quantised import make_quantised

NUM_TOKENS = 40
MAX_ERROR = 1e-4
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "block_size": 8,
    "num_gpu_blocks_override": 200, "enable_lora": True, "max_lora_rank": 32, "debug_checks": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# name → (case of tests.oracles.families, fields of PEFT's LoraConfig)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear layers": ("qwen3", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
    "rank-stabilised": (
        "qwen3",
        {"r": 12, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]},
    ),
    "regular expression": ("qwen3", {"r": 4, "target_modules": r".*\.layers\.[02]\..*(k_proj|down_proj)"}),
    "some layers": ("qwen3", {"r": 4, "target_modules": ["v_proj", "gate_proj"], "layers_to_transform": [1]}),
    "patterns": (
        "qwen3",
        {
            "r": 8,
            "lora_alpha": 8,
            "target_modules": [*ATTENTION, "gate_proj"],
            "rank_pattern": {"q_proj": 20, r"layers\.1\..*v_proj": 2},
            "alpha_pattern": {"k_proj": 3, "gate_proj": 30},
        },
    ),
    "DoRA": ("qwen3", {"r": 8, "lora_alpha": 4, "use_dora": True, "target_modules": "all-linear"}),
    "DoRA with biases": ("llama-biases", {"r": 8, "use_dora": True, "target_modules": "all-linear"}),
    "biases": ("llama-biases", {"r": 8, "bias": "lora_only", "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "biases of B": ("llama-biases", {"r": 8, "lora_bias": True, "target_modules": ["k_proj", "o_proj", "up_proj"]}),
    "fused projections": ("phi3", {"r": 8, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "norms after sublayers": ("gemma3", {"r": 8, "target_modules": "all-linear"}),
    "sublayers in parallel": ("cohere", {"r": 8, "target_modules": "all-linear"}),
    "no gate": ("starcoder2", {"r": 8, "target_modules": "all-linear"}),
    "experts without adapters": ("qwen3_moe", {"r": 8, "target_modules": ATTENTION}),
    "experts": ("qwen3_moe", {"r": 8, "target_parameters": EXPERTS, "target_modules": ["q_proj"]}),
    "experts with gates between": ("gpt_oss", {"r": 4, "target_parameters": EXPERTS, "target_modules": []}),
    "experts down alone": ("qwen3_moe", {"r": 8, "target_parameters": EXPERTS[1:], "target_modules": []}),
    "dense MLP beside experts": ("gemma4_moe", {"r": 8, "target_modules": r".*(self_attn\..*|mlp\..*)_proj"}),
    "shared expert": ("qwen2_moe", {"r": 8, "target_modules": [*ATTENTION, "shared_expert.up_proj"]}),
    "transposed matrices": ("gpt2", {"r": 8, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "projections by heads": ("gpt_neox", {"r": 8, "target_modules": "all-linear"}),
    "short convolutions": ("lfm2-bias", {"r": 8, "target_modules": "all-linear"}),
    "state spaces": ("nemotron_h", {"r": 8, "target_modules": ["in_proj", "q_proj", "o_proj", "up_proj", "down_proj"]}),
    "Kimi delta attention": (
        "kimi_linear",
        {"r": 8, "target_modules": ["v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj"]},
    ),
    "delta nets": ("qwen3_5", {"r": 8, "target_modules": "all-linear"}),
    "DoRA of delta nets": ("qwen3_5", {"r": 8, "use_dora": True, "target_modules": "all-linear"}),
    "delta nets beside experts": ("qwen3_next", {"r": 8, "target_modules": ["in_proj_qkvz", "in_proj_ba", "q_proj"]}),
    "embeddings per layer": (
        "gemma4_small",
        {"r": 8, "target_modules": r".*\.layers\..*(_proj|per_layer_input_gate|per_layer_projection)"},
    ),
    "latent attention": (
        "glm4_moe_lite",
        {"r": 8, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
}


VOCABULARY = ["q_proj", "embed_tokens", "lm_head"]
# Of embeddings and heads: name → (case, whether its embeddings are tied, fields of PEFT's LoraConfig)
VOCABULARIES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "LoRA": ("qwen3", False, {"r": 8, "target_modules": VOCABULARY}),
    "LoRA of tied embeddings": ("qwen3", True, {"r": 8, "target_modules": VOCABULARY}),
    "LoRA of a tied embedding alone": ("qwen3", True, {"r": 8, "target_modules": ["embed_tokens"]}),
    "LoRA of both together": (
        "qwen3",
        True,
        {"r": 8, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "DoRA of the head": ("qwen3", False, {"r": 8, "target_modules": ["lm_head", "v_proj"], "use_dora": True}),
    "copies": ("qwen3", False, {"r": 8, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "a copy of a tied head": ("qwen3", True, {"r": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("qwen3", False, {"r": 8, "target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 200, 14]}),
    "tokens of tied embeddings": (
        "qwen3",
        True,
        {"r": 8, "target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 200, 14]},
    ),
    "tokens of both": (
        "qwen3",
        False,
        {
            "r": 8,
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [20, 9, 21]},
        },
    ),
    "scaled embeddings": ("gemma3", False, {"r": 8, "target_modules": VOCABULARY}),
    "other names": ("gpt2", True, {"r": 8, "target_modules": ["wte"], "trainable_token_indices": None}),
}


@contextmanager
def started(model: Path, **settings: Any) -> Iterator[LLM]:
    llm = LLM(str(model), **{**SETTINGS, **settings})
    try:
        yield llm
    finally:
        llm.close()
        gc.collect()


def run(llm: LLM, requests: list[LoRARequest | None]) -> list[list[tuple[list[int], torch.Tensor]]]:
    """Run all prompts with each adapter in one batch. Returns tokens and log-probabilities, as `answers` does."""
    given = [({"prompt_token_ids": prompt}, request) for request in requests for prompt in PROMPTS]
    results = llm.generate(
        [each for each, _ in given], GREEDY, use_tqdm=False, lora_request=[each for _, each in given]
    )
    found = []
    for result in results:
        assert result.outputs[0].error == ""
        positions = [*(result.prompt_logprobs or [])[1:], *(result.outputs[0].logprobs or [])]
        tokens = [*result.prompt_token_ids[1:], *result.outputs[0].token_ids]
        scores = [position[token].logprob for position, token in zip(positions, tokens, strict=True) if position]
        found.append((result.outputs[0].token_ids, torch.tensor(scores)))
    return [found[first : first + len(PROMPTS)] for first in range(0, len(found), len(PROMPTS))]


def check(got: list[tuple[list[int], torch.Tensor]], want: list[tuple[list[int], torch.Tensor]]) -> None:
    for (tokens, scores), (expected, expected_scores) in zip(got, want, strict=True):
        assert tokens == expected
        assert (scores - expected_scores).abs().max() <= MAX_ERROR


QUICK = ("experts", "all linear layers", "patterns", "DoRA with biases", "fused projections")


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_answers_are_those_of_the_merged_model(kind: str, tmp_path: Path) -> None:
    name, config = KINDS[kind]
    base = base_model(name, tmp_path / "model")
    expected = [answers(base, NUM_TOKENS)]
    merged = make_adapter(copy.deepcopy(base), tmp_path / "adapter", 1, **config)
    expected.append(answers(merged, NUM_TOKENS))
    assert expected[0] != expected[1]
    with started(tmp_path / "model", lora_experts="target_parameters" in config) as llm:
        for got, want in zip(run(llm, [None, LoRARequest("a", 1, str(tmp_path / "adapter"))]), expected, strict=True):
            check(got, want)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("LoRA", "copies", "tokens of tied embeddings") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in VOCABULARIES
    ],
)
def test_embeddings_and_heads_are_those_of_the_adapted_model(kind: str, tmp_path: Path) -> None:
    name, tied, config = VOCABULARIES[kind]
    base = base_model(name, tmp_path / "model", {"tie_word_embeddings": tied})
    expected = [answers(base, NUM_TOKENS)]
    adapted = make_adapter(copy.deepcopy(base), tmp_path / "adapter", 1, merges=False, **config)
    expected.append(answers(adapted, NUM_TOKENS))
    assert (expected[0][0][1] - expected[1][0][1]).abs().max() > 100 * MAX_ERROR
    with started(tmp_path / "model", lora_embeddings=True, lora_tokens=4 if "tokens" in kind else 512) as llm:
        for got, want in zip(run(llm, [None, LoRARequest("a", 1, str(tmp_path / "adapter"))]), expected, strict=True):
            check(got, want)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_loras": 3}, id="one rank"),
        pytest.param({"max_loras": 2, "max_cpu_loras": 2, "max_num_batched_tokens": 16}, id="chunks, two at a time"),
        pytest.param({"max_loras": 3, "tensor_parallel_size": 2}, id="two ranks"),
        pytest.param({"max_loras": 3, "pipeline_parallel_size": 2}, id="two stages", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_tied_embeddings_share_a_batch(
    vocabularies: tuple[Path, list[LoRARequest], list[Any]], settings: dict[str, Any]
) -> None:
    model, requests, expected = vocabularies
    with started(model, lora_embeddings=True, lora_tokens=400, **settings) as llm:
        for order in ([None, *requests], [*requests[::-1], None]):
            wanted = expected if order[0] is None else [*expected[:0:-1], expected[0]]
            for got, want in zip(run(llm, order), wanted, strict=True):
                check(got, want)


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoRARequest], list[Any]]:
    """A model with tied embeddings, an adapter of each form, and the answers of the base and of each."""
    folder = tmp_path_factory.mktemp("vocabularies")
    base = base_model("qwen3", folder / "model", {"tie_word_embeddings": True})
    requests, expected = [], [answers(base, NUM_TOKENS)]
    kinds = ("LoRA of both together", "a copy of a tied head", "tokens of tied embeddings")
    for number, kind in enumerate(kinds):
        own = folder / str(number)
        adapted = make_adapter(copy.deepcopy(base), own, number, merges=False, **VOCABULARIES[kind][2])
        requests.append(LoRARequest(kind, number + 1, str(own)))
        expected.append(answers(adapted, NUM_TOKENS))
    return folder / "model", requests, expected


# Of weights alone, since GEMMs of quantised activations are not exact. format → fields of PEFT's LoraConfig
QUANTISED: dict[str, dict[str, Any]] = {
    "int4": {"use_dora": True},
    "fp8-weights-only": {},
    "int8-groups": {"bias": "lora_only"},
    "awq": {"use_rslora": True},
    "gptq-desc-act": {"use_dora": True},
    "nvfp4": {},
    "gguf": {"use_dora": True},
}


@pytest.mark.parametrize(
    "name", [name if name == "int4" else pytest.param(name, marks=pytest.mark.slow) for name in QUANTISED]
)
def test_the_base_may_be_quantised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The oracle merges the adapter into the weights that the quantised ones stand for."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("QUIRE_CPU_KERNELS", "pytorch")  # the others quantise activations
    library.library.cache_clear()
    request.addfinalizer(library.library.cache_clear)
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
    model = tmp_path / "model"
    if name == "gguf":
        base = base_model("qwen3", tmp_path / "exact")
        model = write_gguf(base, tmp_path / "model.gguf", lambda name: "Q8_0")
    else:
        make_quantised(name, model, tmp_path / "exact")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32).eval()
    config: dict[str, Any] = {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", **QUANTISED[name]}
    merged = make_adapter(copy.deepcopy(base), tmp_path / "adapter", 1, **config)
    expected = [answers(each, NUM_TOKENS) for each in (base, merged)]
    assert expected[0] != expected[1]
    with started(model) as llm:
        for got, want in zip(run(llm, [None, LoRARequest("a", 1, str(tmp_path / "adapter"))]), expected, strict=True):
            check(got, want)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoRARequest], list[Any]]:
    """A model, five adapters of three kinds, and the answers of the base and of each."""
    folder = tmp_path_factory.mktemp("lora")
    base = base_model("qwen3", folder / "model")
    requests, expected = [], [answers(base, NUM_TOKENS)]
    for number in range(5):
        config: dict[str, Any] = {"r": 4 + 4 * number, "target_modules": "all-linear", "use_dora": number == 3}
        if number == 1:
            config["target_modules"] = ["q_proj", "down_proj"]
        merged = make_adapter(copy.deepcopy(base), folder / str(number), number, **config)
        requests.append(LoRARequest(f"adapter {number}", number + 1, str(folder / str(number))))
        expected.append(answers(merged, NUM_TOKENS))
    return folder / "model", requests, expected


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_loras": 5}, id="all at once"),
        pytest.param({"max_loras": 2, "max_cpu_loras": 2}, id="two at a time"),
        pytest.param({"max_loras": 3, "max_num_batched_tokens": 16}, id="chunks", marks=pytest.mark.slow),
        pytest.param({"max_loras": 3, "num_gpu_blocks_override": 40}, id="preemption", marks=pytest.mark.slow),
        pytest.param({"max_loras": 5, "tensor_parallel_size": 2}, id="two ranks"),
        pytest.param(
            {"max_loras": 2, "max_cpu_loras": 2, "pipeline_parallel_size": 2}, id="two stages", marks=pytest.mark.slow
        ),
        pytest.param(
            {"max_loras": 1, "tensor_parallel_size": 2}, id="two ranks, one at a time", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.usefixtures("forked")
def test_adapters_and_the_base_share_a_batch(
    several: tuple[Path, list[LoRARequest], list[Any]], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests, expected = several
    monkeypatch.setattr(adapter_slots, "PART_BYTES", 20_000)  # an adapter is copied in several parts, on all ranks
    with started(model, **settings) as llm:
        for _ in range(2):  # then partly from the prefix cache
            for got, want in zip(run(llm, [None, *requests]), expected, strict=True):
                check(got, want)
            for got, want in zip(run(llm, [*reversed(requests), None]), reversed([*expected[1:]]), strict=False):
                check(got, want)


def test_adapters_after_sleep(several: tuple[Path, list[LoRARequest], list[Any]]) -> None:
    model, requests, expected = several
    with started(model, max_loras=2, max_cpu_loras=2) as llm:
        for level in (0, 1, 2):
            if level:
                llm.sleep(level)
                llm.wake_up()
            for got, want in zip(run(llm, [None, *requests[:3]]), expected[:4], strict=True):
                check(got, want)


def test_no_blocks_leak_between_adapters_by_a_common_prefix(
    several: tuple[Path, list[LoRARequest], list[Any]],
) -> None:
    model, requests, expected = several
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    with started(model) as llm:
        for index in (0, 1, 2, 0, 1, 2):
            request = None if index == 0 else requests[index - 1]
            [result] = llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)
            assert result.outputs[0].token_ids == expected[index][0][0][:8]
        [again] = llm.generate([prompt], sampling, use_tqdm=False, lora_request=requests[0])
        assert again.num_cached_tokens == 24
        salted = {**prompt, "cache_salt": "\0" + "ff" * 32}
        [other] = llm.generate([salted], sampling, use_tqdm=False, lora_request=requests[0])
        assert other.num_cached_tokens == 0


def test_a_damaged_adapter_ends_its_own_requests_only(
    several: tuple[Path, list[LoRARequest], list[Any]], tmp_path: Path
) -> None:
    model, requests, expected = several
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in Path(requests[0].lora_path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with started(model) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        prompts = [{"prompt_token_ids": PROMPTS[0]}] * 3
        given = [None, LoRARequest("damaged", 9, str(folder)), requests[0]]
        first, bad, last = llm.generate(prompts, sampling, use_tqdm=False, lora_request=given)
        assert bad.outputs[0].finish_reason == "error"
        assert "the adapter 'damaged' cannot be used" in bad.outputs[0].error
        assert "corrupt or truncated" in bad.outputs[0].error
        assert first.outputs[0].token_ids == expected[0][0][0][:8]
        assert last.outputs[0].token_ids == expected[1][0][0][:8]


def test_embeddings_and_beams_use_the_adapter(several: tuple[Path, list[LoRARequest], list[Any]]) -> None:
    model, requests, expected = several
    prompt = {"prompt_token_ids": PROMPTS[0]}
    with started(model) as llm:
        base, adapted = (llm.embed([prompt], use_tqdm=False, lora_request=each) for each in (None, requests[0]))
        assert base[0].outputs.embedding != adapted[0].outputs.embedding
        [beams] = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=8), lora_request=requests[0])
        assert beams.sequences[0].tokens[len(PROMPTS[0]) :] == expected[1][0][0][:8]


def test_adapters_need_the_setting(several: tuple[Path, list[LoRARequest], list[Any]]) -> None:
    model, requests, _ = several
    with started(model, enable_lora=False) as llm, pytest.raises(ValueError, match="enable_lora=True"):
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False, lora_request=requests[0])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"distributed_executor_backend": "ray"}, "enable_lora needs distributed_executor_backend mp"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras must be at least max_loras=4, got 3"),
    ],
)
def test_what_adapters_are_not_used_with(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="x", enable_lora=True, **settings)
