"""With `deterministic`, a request's tokens and log-probabilities are the same bytes whatever runs beside it, however
its prompt is cut, and whichever way the engine computes: in one engine and in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, ConfigError, LoRARequest, SamplingParams
from engine.models.errors import ModelError
from kernels.cpu.library import library
from tests.oracles.families import make_checkpoint
from tests.oracles.hybrids import make_hybrid
from tests.oracles.random_adapters import write_random_adapter

SHARED = [7 * i % 250 + 1 for i in range(40)]  # the beginning of some prompts
COMMON: dict[str, Any] = {
    "device": "cpu", "skip_tokenizer_init": True, "deterministic": True, "max_model_len": 72, "block_size": 8,
    "num_gpu_blocks_override": 600, "debug_checks": True,
}  # fmt: skip
ALONE: dict[str, Any] = {"max_num_seqs": 1, "enforce_eager": True, "enable_prefix_caching": False}
NGRAMS = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    "enable_adaptive_verification": False,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 11, "max_num_seqs": 8},
    "few blocks": {"num_gpu_blocks_override": 14},
    "eager": {"enforce_eager": True, "enable_prefix_caching": False},
    "drafts": {"speculative_config": NGRAMS},
    "host tier": {"kv_offloading_size": 0.01, "num_gpu_blocks_override": 34},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("gemma2", {"dtype": "bfloat16"}),
    "experts int4": ("qwen3_moe", {"dtype": "float32", "quantization": "int4"}),
}
# Where PyTorch computes each token alone, which takes longer: by default, some requests in chunks.
SLOWER: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention": ("glm4_moe_lite", {"dtype": "bfloat16", "quantization": "int8"}),
    "recurrent": ("qwen3_5", {"dtype": "bfloat16"}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {"dtype": "float32"}),
    "int8": ("qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
    "fp8": ("qwen3_moe", {"dtype": "bfloat16", "quantization": "fp8"}),
    "fp8 cache": ("mistral-window", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "sinks": ("gpt_oss", {"dtype": "bfloat16"}),
    "alibi": ("mpt", {"dtype": "float32"}),
    "no gate": ("starcoder2", {"dtype": "float32"}),
    "per layer": ("gemma4_small", {"dtype": "float32"}),
    **{
        name: (name, {"dtype": "float32"})
        for name in ("lfm2", "nemotron_h", "granitemoehybrid", "falcon_h1", "kimi_linear", "deepseek_v3", "qwen2_moe")
    },
}
GROUPS = {"gemma2": 2, "gpt_oss": 3, "gemma4_small": 2}  # groups of layers, of which each has blocks of its own
HYBRIDS = {"qwen3_5", "lfm2", "nemotron_h", "granitemoehybrid", "falcon_h1", "kimi_linear"}


def grows(i: int) -> bool:
    """Return True for a request with a short prompt and a long answer: several of these make an engine preempt."""
    return i < 4


def sampling(i: int) -> SamplingParams:
    """Parameters of request `i`: greedy, sampled, filtered, with penalties, filtered by PyTorch."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.9, "typical_p": 0.8, "xtc_probability": 0.5, "top_n_sigma": 2.0, "dry_multiplier": 0.5},
    ]
    return SamplingParams(
        max_tokens=40 if grows(i) else 8, seed=i, logprobs=2, ignore_eos=True, **kinds[i % len(kinds)]
    )


def prompt(i: int) -> list[int]:
    if grows(i):
        return [5 + i]
    own = [(11 * i + 5 * j) % 200 + 3 for j in range(1 + 3 * i % 19)]
    return own if i % 3 else SHARED + own


PROMPTS = [prompt(i) for i in range(10)]


def ask(llm: LLM, some: Sequence[int], adapter: LoRARequest | None = None) -> list[Any]:
    """Return each request's tokens, and the log-probabilities of these and the most likely ones."""
    results = llm.generate(
        [{"prompt_token_ids": PROMPTS[i]} for i in some],
        [sampling(i) for i in some],
        use_tqdm=False,
        lora_request=[adapter if i % 5 == 4 else None for i in some] if adapter else None,
    )
    return [
        (each.outputs[0].token_ids, [[(k, v.logprob) for k, v in at.items()] for at in each.outputs[0].logprobs or ()])
        for each in results
    ]


def scores(llm: LLM, texts: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token but the first."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    results = llm.generate([{"prompt_token_ids": text} for text in texts], asked, use_tqdm=False)
    return [
        [at[token].logprob for token, at in zip(text[1:], (each.prompt_logprobs or [])[1:], strict=True) if at]
        for text, each in zip(texts, results, strict=True)
    ]


pytestmark = pytest.mark.usefixtures("own_cpu_kernels")


def check_case(
    family: str, settings: dict[str, Any], folder: Path, everyone: Sequence[int] = range(len(PROMPTS)), *ways: str
) -> None:
    """Compare a model's requests alone with the same in `ways`; none: in all."""
    (make_hybrid if family in HYBRIDS else make_checkpoint)(family, folder)
    settings = COMMON | settings
    llm = LLM(str(folder), **settings | ALONE)
    alone = {i: ask(llm, [i])[0] for i in everyone}
    texts = {i: [*PROMPTS[i], *alone[i][0]] for i in everyone}
    scored_alone = {i: scores(llm, [texts[i]])[0] for i in everyone[-2:]}
    llm.close()
    for name in ways or WAYS:
        own = settings | WAYS[name]
        own["num_gpu_blocks_override"] *= GROUPS.get(family, 1)
        llm = LLM(str(folder), **own)
        for some in (everyone, everyone[::-1]):  # the second time prefixes are found
            for i, got in zip(some, ask(llm, some), strict=True):
                assert got == alone[i], f"request {i}, {name}"
        stats = llm._engine.stats()
        assert name != "few blocks" or stats.num_preemptions > 0
        assert name != "drafts" or stats.num_draft_tokens > 0
        if name in ("together", "chunks"):
            for (i, text), got in zip(texts.items(), scores(llm, list(texts.values())), strict=True):
                sampled = [dict(at)[token] for token, at in zip(*alone[i], strict=True)]
                assert got[len(PROMPTS[i]) - 1 :] == sampled, f"scores of the generated text {i}, {name}"
                assert len(got) == len(text) - 1
                assert got == scored_alone.get(i, got), f"scores of text {i}, {name}"
        llm.close()


def test_the_same_request_gives_the_same_bytes(tmp_path: Path) -> None:
    check_case(*CASES["dense"], tmp_path)


def test_the_same_request_gives_the_same_bytes_with_quantised_experts(tmp_path: Path) -> None:
    """In the ways in which steps differ most; `test_determinism_matrix.py` has the others for experts."""
    check_case(*CASES["experts int4"], tmp_path, range(len(PROMPTS)), "together", "host tier")


@pytest.mark.parametrize("case", SLOWER)
def test_the_same_request_gives_the_same_bytes_token_by_token(case: str, tmp_path: Path) -> None:
    check_case(*SLOWER[case], tmp_path, (5, 6, 7, 9), "chunks")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES | SLOWER | MORE)
def test_the_same_request_gives_the_same_bytes_in_more_families(case: str, tmp_path: Path) -> None:
    check_case(*(CASES | SLOWER | MORE)[case], tmp_path)


def test_adapters_of_others_change_nothing(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    write_random_adapter(tmp_path / "adapter", tmp_path, 8, 0)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    settings = COMMON | {"enable_lora": True, "dtype": "float32"}
    llm = LLM(str(tmp_path), **settings | ALONE)
    alone = [ask(llm, [i], adapter)[0] for i in range(10)]
    without = ask(llm, [4])[0]
    llm.close()
    assert without != alone[4], "the adapter changes nothing"
    llm = LLM(str(tmp_path), **settings)
    assert ask(llm, list(range(10)), adapter) == alone
    llm.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float16"}, "deterministic cannot be used with dtype float16: the CPU's own kernels"),
    ],
)
def test_what_has_no_such_form_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=reason):
        LLM(str(tmp_path), **COMMON | settings)


def test_it_is_refused_without_the_cpus_own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("qwen3", tmp_path)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "pytorch")
    library.cache_clear()
    try:
        with pytest.raises(ModelError, match="deterministic needs the CPU's kernels in C"):
            LLM(str(tmp_path), **COMMON)
    finally:
        library.cache_clear()


def test_an_engine_with_it_and_one_without_need_two_processes(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    llm = LLM(str(tmp_path), **COMMON)
    with pytest.raises(ModelError, match="another engine of this process runs with deterministic"):
        LLM(str(tmp_path), **COMMON | {"deterministic": False})
    llm.close()
    LLM(str(tmp_path), **COMMON | {"deterministic": False}).close()
