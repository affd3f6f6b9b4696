"""Quire's features, and which of them cannot be used together. Every new feature adds its entry here.

A *configuration* is a set of features that are on at the same time: one checkpoint, at most one weight format, any
number of settings. Every configuration answers the same requests, which use all features of single requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["model", "weights", "setting", "request"]


@dataclass(frozen=True)
class Feature:
    """One row and column of the table.

    `settings`: of `EngineConfig`. `checkpoint`: the weight format of `tests.oracles.quantised` that the checkpoint has.
    `how`: how users get it, where that is no setting.
    """

    name: str
    kind: Kind
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = ""
    how: str = ""


FEATURES = (
    Feature("sliding windows", "model"),
    Feature("experts", "model"),
    Feature("latent attention", "model"),
    Feature("sparse attention", "model"),
    Feature("recurrent layers", "model"),
    Feature("fp8 weights", "weights", {"quantization": "fp8"}),
    Feature("int8 weights", "weights", {"quantization": "int8"}),
    Feature("int4 weights", "weights", {"quantization": "int4"}),
    Feature("fp8 blocks", "weights", checkpoint="fp8-deepseek"),
    Feature("awq", "weights", checkpoint="awq"),
    Feature("gptq", "weights", checkpoint="gptq"),
    Feature("nvfp4", "weights", checkpoint="nvfp4"),
    Feature("mxfp4", "weights", checkpoint="mxfp4"),
    Feature("prefix cache", "setting", {"enable_prefix_caching": True}),
    Feature("prefix-cache file", "setting", {"enable_prefix_caching": True, "prefix_cache_file": "{folder}/cache"}),
    Feature("host tier", "setting", {"enable_prefix_caching": True, "kv_offloading_size": 0.01}),
    Feature("chunked prefill", "setting", {"max_num_batched_tokens": 16}),
    Feature("preemption", "setting", {"num_gpu_blocks_override": 14}),
    Feature("fp8 KV cache", "setting", {"kv_cache_dtype": "fp8"}),
    Feature("recorded steps", "setting", {"enforce_eager": False}),
    Feature(
        "drafts",
        "setting",
        {
            "speculative_config": {
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
                "enable_adaptive_verification": False,
            }
        },
        how="`--speculative-config`",
    ),
    Feature(
        "draft models",
        "setting",
        {
            "speculative_config": '{"method": "draft_model", "model": "{folder}/model/draft", '
            '"num_speculative_tokens": 3, "prompt_lookup_min": 16, "enable_adaptive_verification": false}'
        },
        how="`--speculative-config`",
    ),
    Feature(
        "block drafters",
        "setting",
        {
            "speculative_config": '{"method": "dflash", "model": "{folder}/model/block", '
            '"num_speculative_tokens": 4, "prompt_lookup_min": 16, "enable_adaptive_verification": false}'
        },
        how="`--speculative-config`",
    ),
    Feature(
        "rejection sampling",
        "setting",
        {
            "speculative_config": '{"method": "draft_model", "model": "{folder}/model/draft", '
            '"num_speculative_tokens": 3, "rejection_sample_method": "standard", "enable_adaptive_verification": false}'
        },
        how="`--speculative-config`",
    ),
    Feature("deterministic", "setting", {"deterministic": True}),
    Feature("deferred sampling", "setting", how="a grammar's mask is late"),
    Feature("step isolation", "setting", how="a step fails"),
    Feature("expert load", "setting", {"expert_load_interval": 1}),
    Feature("sleep", "setting", how="`POST /sleep`, `LLM.sleep`"),
    Feature("LoRA adapters", "setting", {"enable_lora": True, "max_loras": 1}),
    Feature("tensor parallel", "setting", {"tensor_parallel_size": 2}),
    Feature("pipeline parallel", "setting", {"pipeline_parallel_size": 2}),
    Feature("data parallel", "setting", {"data_parallel_size": 2}),
    Feature("async engine", "setting", how="`quire serve`, `AsyncEngine`"),
    Feature("offline", "setting", how="`LLM`"),
    Feature("grammars", "request"),
    Feature("log-probabilities", "request"),
    Feature("prompt log-probabilities", "request"),
    Feature("several completions", "request"),
    Feature("filters and penalties", "request"),
    Feature("beam search", "request"),
    Feature("embeddings", "request"),
)
BY_NAME = {feature.name: feature for feature in FEATURES}
MODEL_DRAFTERS = ("draft models", "block drafters", "rejection sampling")  # not if all layers have windows


@dataclass(frozen=True)
class Checkpoint:
    """A case of `tests.oracles.families`.

    `features`: those of kind "model" that it has. `shape`: sizes that every weight format divides. `stacks_experts`:
    weight formats of checkpoints do not store it; those made at start do.
    """

    features: frozenset[str]
    shape: dict[str, Any] = field(default_factory=dict)
    stacks_experts: bool = False
    has_full_attention: bool = True  # some layers attend to all tokens
    num_groups: int = 1  # groups of layers, of which each has blocks of its own for a token


CHECKPOINTS = {
    "qwen3": Checkpoint(frozenset(), {"intermediate_size": 256}),
    "mistral-window": Checkpoint(
        frozenset({"sliding windows"}), {"intermediate_size": 256}, has_full_attention=False
    ),
    "qwen3_moe": Checkpoint(frozenset({"experts"}), {"moe_intermediate_size": 128, "intermediate_size": 256}),
    "gpt_oss": Checkpoint(
        frozenset({"sliding windows", "experts"}), {"intermediate_size": 128}, stacks_experts=True, num_groups=3
    ),
    "glm4_moe_lite": Checkpoint(
        frozenset({"latent attention", "experts"}),
        {
            "moe_intermediate_size": 256, "intermediate_size": 256, "q_lora_rank": 64, "kv_lora_rank": 64,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 16, "v_head_dim": 64,  # two ranks can divide them in blocks of 128
        },
    ),
    "deepseek_v32": Checkpoint(
        frozenset({"latent attention", "sparse attention", "experts"}),
        {
            "moe_intermediate_size": 256, "intermediate_size": 256, "q_lora_rank": 64, "kv_lora_rank": 64,
            "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "index_head_dim": 32,
        },
    ),
    "lfm2": Checkpoint(frozenset({"recurrent layers"}), {"hidden_size": 256, "intermediate_size": 256}),
    "qwen3_5_moe": Checkpoint(
        frozenset({"recurrent layers", "experts"}),
        {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
        stacks_experts=True,
    ),
    "lfm2_moe": Checkpoint(
        frozenset({"recurrent layers", "experts"}),
        {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256},
    ),
}  # fmt: skip

# Pairs that are refused at start → a part of the error.
REFUSED: dict[frozenset[str], str] = {
    frozenset({"fp8 KV cache", "latent attention"}): "kv_cache_dtype must be auto for latent attention",
    frozenset({"fp8 KV cache", "sparse attention"}): "kv_cache_dtype must be auto for latent attention",
    frozenset({"expert load", "pipeline parallel"}): "expert_load_interval needs pipeline_parallel_size 1",
    **{frozenset({name, "pipeline parallel"}): "cannot be used with pipeline_parallel_size" for name in MODEL_DRAFTERS},
    frozenset({"rejection sampling", "deterministic"}): "standard cannot be used with deterministic",
    frozenset({"data parallel", "offline"}): "data_parallel_size must be 1 offline",
}

# Pairs that do not exist → why.
_ONE_FORMAT = "a checkpoint has one weight format"
NO_PAIR: dict[frozenset[str], str] = {
    frozenset({"sliding windows", "latent attention"}): "no family has both",
    frozenset({"sliding windows", "recurrent layers"}): "no family has both",
    frozenset({"sliding windows", "sparse attention"}): "no family has both",
    frozenset({"recurrent layers", "sparse attention"}): "no family has both",
    frozenset({"latent attention", "recurrent layers"}): "Kimi Linear alone has both: tests/engine/test_hybrids.py",
    frozenset({"deterministic", "tensor parallel"}): "not with every model: tests/engine/test_deterministic_ranks.py",
    **{
        frozenset({one, other}): "two values of one flag"
        for one in ("drafts", *MODEL_DRAFTERS)
        for other in MODEL_DRAFTERS
        if one != other
    },
    frozenset({"async engine", "offline"}): "two ways to run the engine",
    frozenset({"async engine", "beam search"}): "the API's own: tests/server/openai/test_beam_search.py",
    frozenset({"data parallel", "beam search"}): "the API's own: tests/server/openai/test_beam_search.py",
} | {
    frozenset({one.name, other.name}): _ONE_FORMAT
    for one in FEATURES
    for other in FEATURES
    if one.kind == other.kind == "weights" and one is not other
}


def reason_against(one: str, other: str) -> str | None:
    """Return why two features cannot be on at the same time; None if they can."""
    pair = frozenset({one, other})
    return REFUSED.get(pair) or NO_PAIR.get(pair)
