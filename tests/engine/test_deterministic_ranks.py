"""With `deterministic`, one rank and several, real processes over gloo, give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, ConfigError
from tests.engine.test_determinism import ALONE, COMMON, NGRAMS, PROMPTS, ask, scores
from tests.oracles.families import make_checkpoint
from tests.oracles.hybrids import make_hybrid

EVERYONE = range(len(PROMPTS))
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts int8": ("qwen3_moe", {"dtype": "bfloat16", "quantization": "int8"}, {}),
    "float32": ("llama", {"dtype": "float32"}, {}),
    "bfloat16": ("gemma2", {"dtype": "bfloat16"}, {}),
    "int4": ("qwen3", {"dtype": "bfloat16", "quantization": "int4"}, {"intermediate_size": 256}),
    "fp8": ("qwen3_moe", {"dtype": "float32", "quantization": "fp8"}, {}),
    "fp8 cache": ("mistral-window", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, {}),
    "sinks": ("gpt_oss", {"dtype": "bfloat16"}, {"num_local_experts": 8}),
    "latent attention": ("deepseek_v3", {"dtype": "bfloat16"}, {"n_routed_experts": 8}),
    "shared expert": ("qwen2_moe", {"dtype": "bfloat16"}, {"num_experts": 12}),
}
MANY = {
    "speculative_config": NGRAMS, "max_num_batched_tokens": 19, "max_num_seqs": 8, "num_gpu_blocks_override": 60,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_cpu_kernels")


def degrees_agree(case: str, folder: Path, degrees: tuple[int, ...]) -> None:
    """Compare requests alone on one rank with all of them, in chunks, with hits and drafts, on several."""
    family, settings, shape = CASES[case]
    make_checkpoint(family, folder, shape)
    settings = COMMON | settings
    llm = LLM(str(folder), **settings | ALONE)
    alone = [ask(llm, [i])[0] for i in EVERYONE]
    scored = scores(llm, PROMPTS)
    llm.close()
    for size in degrees:
        llm = LLM(str(folder), **settings | MANY, tensor_parallel_size=size)
        assert ask(llm, EVERYONE) == alone, size
        assert ask(llm, EVERYONE[::-1])[::-1] == alone, f"{size}, after hits"
        assert scores(llm, PROMPTS) == scored
        llm.close()


@pytest.mark.usefixtures("forked")
def test_two_ranks_give_the_bytes_of_one(tmp_path: Path) -> None:
    degrees_agree("experts int8", tmp_path, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_and_four_ranks_give_the_bytes_of_one(case: str, tmp_path: Path) -> None:
    degrees_agree(case, tmp_path, (2, 4))


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("qwen3", {"tensor_parallel_size": 3}, "3: sums are divided in eighths: use 2, 4 or 8 ranks"),
        ("qwen3", {"enable_lora": True}, "2: PyTorch computes adapters"),
        ("olmo2", {}, "2: norms over the heads of all ranks"),
        ("lfm2", {}, "2: PyTorch computes the heads of recurrent layers together"),
    ],
)
def test_ranks_that_would_give_other_bytes_are_refused(
    family: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (make_hybrid if family == "lfm2" else make_checkpoint)(family, tmp_path)
    with pytest.raises(ConfigError, match=f"deterministic cannot be used with tensor_parallel_size {reason}"):
        LLM(str(tmp_path), **COMMON | {"tensor_parallel_size": 2} | settings)
