"""Families with experts (MoE) in all or some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from engine.models.errors import ModelError
from engine.models.families.common import (
    MAX_HEAD_DIM,
    attention,
    decoder,
    dense,
    latent_attention,
    num_layers,
    slides,
    windows_of,
)
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.llama_like import granite, qwen_windows
from engine.models.spec import DenseSpec, ExpertNames, IndexSpec, ModelSpec, MoESpec, RouterSpec

# `separate_experts`: in folders made of GGUF files; the experts are not stacked as in the family's checkpoints.
MAX_EXPERTS = 2**16  # in all layers: their declarations are created before the weights are checked
MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)
GRANITE = ExpertNames(
    router="block_sparse_moe.router.layer",
    stacked=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    shared="shared_mlp",
)
QWEN3_VL = ExpertNames(stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), suffix="_", transposed=True)
GPT_OSS = ExpertNames(
    router="mlp.router",
    stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    suffix="_",
    interleaved=True,
    transposed=True,
)


def experts(
    config: Config,
    *,
    count: Sequence[str] = ("num_experts", "num_local_experts"),
    size: str = "moe_intermediate_size",
    scoring: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax",
    renormalise: bool = False,
    activations: Sequence[str] = ("silu", "swish"),
) -> MoESpec:
    """Create an MoE. count: possible fields for the number of experts; size: field of their intermediate size."""
    name = next((name for name in count if config.get(name) is not None), count[0])
    num_experts = integer(config, name, maximum=MAX_EXPERTS // num_layers(config))
    num_chosen = integer(config, "num_experts_per_tok", maximum=num_experts)
    router = RouterSpec(num_chosen=num_chosen, scoring=scoring, renormalise=renormalise)
    dense(config | {"intermediate_size": 1}, activations=activations)  # checks the activation
    return MoESpec(num_experts=num_experts, intermediate_size=integer(config, size), router=router)


def qwen2_moe(config: Config) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-57B-A14B: a gated shared expert; biases of query, key and value."""
    mlp = experts(config, renormalise=flag(config, "norm_topk_prob"))
    shared = replace(dense(config), intermediate_size=integer(config, "shared_expert_intermediate_size"))
    mlp = replace(mlp, shared=shared, shared_gate=True, names=ExpertNames(shared="mlp.shared_expert"))
    mixer = attention(config, qkv_bias=flag(config, "qkv_bias", True))
    return decoder(config, mixer, every(config, mlp), windows=qwen_windows(config))


def qwen3_moe(config: Config) -> ModelSpec:
    """Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder: RMSNorm of each query and key head."""
    bias = flag(config, "attention_bias")
    mixer = attention({"head_dim": 128, **config}, qkv_bias=bias, o_bias=bias, qk_norm=True)
    mlp = experts(config, renormalise=flag(config, "norm_topk_prob"))
    window = integer(config, "sliding_window") if flag(config, "use_sliding_window") else 0
    return decoder(config, replace(mixer, window=window), every(config, mlp))


def qwen3_vl_moe(config: Config) -> ModelSpec:
    """Qwen3-VL with experts: Qwen3's, transposed in stacked tensors; quantised ones are separate."""
    spec = qwen3_moe(config | {"norm_topk_prob": True})
    if spec.quantization is not None:
        return spec
    layers = (
        replace(layer, mlp=replace(layer.mlp, names=QWEN3_VL)) if isinstance(layer.mlp, MoESpec) else layer
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def every(config: Config, mlp: MoESpec) -> list[DenseSpec | MoESpec]:
    """Use experts in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, count = integer(config, "decoder_sparse_step", 1), num_layers(config)
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(isinstance(layer, int) for layer in without):
        raise ModelError(f"'mlp_only_layers' must be a list of layers, got {without!r}")
    sparse = [(layer + 1) % step == 0 and layer not in without for layer in range(count)]
    return [mlp if here else dense(config) for here in sparse]


def mixtral(config: Config) -> ModelSpec:
    """Mixtral 8x7B and 8x22B."""
    window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
    mlp = experts(config, count=("num_local_experts",), size="intermediate_size", renormalise=True)
    return decoder(config, attention(config, window=window), replace(mlp, names=MIXTRAL))


def olmoe(config: Config) -> ModelSpec:
    """OLMoE: norms over all query heads and all key heads."""
    bias, clip = flag(config, "attention_bias"), config.get("clip_qkv")
    mixer = replace(attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True), qk_norm_over_heads=True)
    if clip is not None:
        raise ModelError("'clip_qkv' is not supported for OLMoE, which clips after its norms; supported: null")
    return decoder(config, mixer, experts(config, size="intermediate_size", renormalise=flag(config, "norm_topk_prob")))


def granite_moe(config: Config) -> ModelSpec:
    """Granite 3 MoE, with or without a shared expert: Granite's multipliers, experts in stacked tensors."""
    mlp = experts(config, count=("num_local_experts",), size="intermediate_size", scoring="softmax_chosen")
    separate = flag(config, "separate_experts")
    if size := integer(config, "shared_intermediate_size", 0, minimum=0):
        shared = DenseSpec(intermediate_size=size)
        mlp = replace(
            mlp, shared=shared if separate else replace(shared, fused="input_linear", down_name="output_linear")
        )
    spec = granite(config)
    mlp = replace(mlp, names=ExpertNames(shared="mlp.shared_expert") if separate else GRANITE)
    return replace(spec, layers=tuple(replace(layer, mlp=mlp) for layer in spec.layers))


def glm4_moe(config: Config) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7: the first layers are dense, RoPE on half of each head."""
    mixer = attention(
        config, qkv_bias=flag(config, "attention_bias"), qk_norm=flag(config, "use_qk_norm"), rotary_factor=0.5
    )
    return _with_mtp(decoder(config, mixer, deepseek_mlps(config)))


def glm4_moe_lite(config: Config) -> ModelSpec:
    """GLM-4.7-Flash: latent attention."""
    kinds = config.get("mlp_layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds[1:]) - {"sparse"}):
        raise ModelError(f"'mlp_layer_types' must have experts in all layers but the first, got {kinds!r}")
    config = {"first_k_dense_replace": int(kinds is None or kinds[0] == "dense"), **config}
    mixer = latent_attention(config, bias=flag(config, "attention_bias"))
    return _with_mtp(decoder(config, mixer, deepseek_mlps(config)))


def deepseek_v3(config: Config) -> ModelSpec:
    """DeepSeek V3, V3.1 and R1, Kimi K2: latent attention."""
    mixer = latent_attention(config, bias=flag(config, "attention_bias"))
    return _with_mtp(decoder(config, mixer, deepseek_mlps(config)))


def deepseek_v32(config: Config) -> ModelSpec:
    """DeepSeek V3.2: V3 with an indexer that chooses the tokens that a token attends to."""
    return _sparse(config, interleaved=False)


def glm_moe_dsa(config: Config) -> ModelSpec:
    """GLM-5: DeepSeek V3.2's attention. Some layers may attend to the tokens that an earlier one chose."""
    return _sparse(config, interleaved=True)


def _sparse(config: Config, *, interleaved: bool) -> ModelSpec:
    mixer = latent_attention(config, bias=flag(config, "attention_bias"))
    if not mixer.query_rank:
        raise ModelError("'q_lora_rank' must not be null: the indexer reads the short vectors of queries")
    index = IndexSpec(
        num_heads=integer(config, "index_n_heads"),
        head_dim=integer(config, "index_head_dim", maximum=MAX_HEAD_DIM),
        top_k=integer(config, "index_topk"),
        interleaved=flag(config, "indexer_rope_interleave", interleaved),
    )
    if index.head_dim < mixer.rope.rotary_dim:
        raise ModelError(f"'index_head_dim' ({index.head_dim}) must be at least 'qk_rope_head_dim'")
    shared = _shares_choice(config)
    mixers = [replace(mixer, index=replace(index, is_shared=each)) for each in shared]
    kinds, first = config.get("mlp_layer_types"), integer(config, "first_k_dense_replace", 3, minimum=0)
    if isinstance(kinds, list):
        first = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if set(kinds[first:]) - {"sparse"}:
            raise ModelError(f"'mlp_layer_types' must be dense, then sparse, got {kinds!r}")
    spec = decoder(config, mixers, deepseek_mlps({"n_shared_experts": 1, **config, "first_k_dense_replace": first}))
    return spec if shared[-1] else _with_mtp(spec)  # prediction layers are like the last one


def _shares_choice(config: Config) -> list[bool]:
    """Return which layers attend to the tokens that an earlier one chose."""
    count, kinds = num_layers(config), config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        every, first = integer(config, "index_topk_freq", 1), integer(config, "index_skip_topk_offset", 2)
        return [max(i - first + 1, 0) % every != 0 for i in range(count)]
    kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]
    if len(kinds) < count or kinds[0] != "full" or set(kinds) - {"full", "shared"}:
        raise ModelError(f"'indexer_types' must name full or shared for {count} layers, full first, got {kinds!r}")
    return [kind == "shared" for kind in kinds[:count]]


def _with_mtp(spec: ModelSpec) -> ModelSpec:
    """Return the specification with the names of its prediction layers, if it has any."""
    return replace(spec, mtp="layers" if spec.num_draft_layers else "")


def deepseek_v2(config: Config) -> ModelSpec:
    """DeepSeek V2 and V2-Lite: latent attention, softmax router."""
    grouped = config.get("topk_method", "greedy") != "greedy"
    spec = deepseek_v3(config if grouped else {**config, "n_group": 1, "topk_group": 1})
    layers = []
    for layer in spec.layers:
        if isinstance(layer.mlp, MoESpec):
            router = replace(layer.mlp.router, scoring="softmax", group_score="max", renormalise=False)
            layer = replace(layer, mlp=replace(layer.mlp, router=router, correction=False))
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def deepseek_mlps(config: Config) -> list[DenseSpec | MoESpec]:
    """DeepSeek's MLPs: dense in the first layers, then experts and a shared one, chosen by corrected sigmoid scores."""
    mlp = experts(
        config,
        count=("n_routed_experts", "num_local_experts", "num_experts"),
        scoring="sigmoid",
        renormalise=flag(config, "norm_topk_prob", True),
    )
    router = replace(
        mlp.router,
        num_groups=integer(config, "n_group", 1),
        num_chosen_groups=integer(config, "topk_group", 1),
        group_score="top2",
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    if mlp.num_experts % router.num_groups or mlp.num_experts < 2 * router.num_groups:
        raise ModelError(
            f"'n_group' ({router.num_groups}) must divide {mlp.num_experts} experts in groups of two or more"
        )
    of_chosen_groups = mlp.num_experts // router.num_groups * min(router.num_chosen_groups, router.num_groups)
    if of_chosen_groups < router.num_chosen:
        raise ModelError(
            f"'topk_group' ({router.num_chosen_groups}) groups hold fewer than {router.num_chosen} experts"
        )
    shared = None
    if count := integer(config, "n_shared_experts", 0, minimum=0):
        shared = DenseSpec(intermediate_size=count * mlp.intermediate_size)
    mlp = replace(mlp, router=router, correction=True, shared=shared)
    first = integer(config, "first_k_dense_replace", 0, minimum=0)
    return [dense(config) if layer < first else mlp for layer in range(num_layers(config))]


def dots1(config: Config) -> ModelSpec:
    """dots.llm1: DeepSeek V3's experts, RMSNorm of each query and key head."""
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return decoder(config, mixer, deepseek_mlps(config), windows=windows_of(config, slides(config)))


def minimax_m2(config: Config) -> ModelSpec:
    """MiniMax-M2: norms over all query heads and all key heads, RoPE on half of each head."""
    config = {"head_dim": 128, **config}
    factor = integer(config, "rotary_dim", config["head_dim"]) / config["head_dim"]
    mixer = replace(attention(config, qk_norm=True, rotary_factor=factor), qk_norm_over_heads=True)
    mlp = experts(config, count=("num_local_experts",), size="intermediate_size", scoring="sigmoid", renormalise=True)
    return decoder(config, mixer, replace(mlp, correction=True, names=MIXTRAL))


def gpt_oss(config: Config) -> ModelSpec:
    """gpt-oss: attention sinks, a sliding window in every other layer, biases everywhere, a clamped activation."""
    config = {"head_dim": 64, **config}
    if config.get("layer_types") is None:
        slide = [layer % 2 == 0 for layer in range(num_layers(config))]
    else:
        slide = slides(config)
    bias = flag(config, "attention_bias", True)
    mixer = replace(attention(config, qkv_bias=bias, o_bias=bias), learnt=("sinks",))
    mlp = experts(
        config, count=("num_local_experts", "num_experts"), size="intermediate_size", scoring="softmax_chosen"
    )
    if (limit := number(config, "swiglu_limit", 7.0)) != 7:
        raise ModelError(f"'swiglu_limit' {limit:g} is not supported; supported: 7")
    names = ExpertNames(router="mlp.router") if flag(config, "separate_experts") else GPT_OSS
    mlp = replace(mlp, activation="clamped_swiglu", bias=True, router_bias=True, names=names)
    return decoder(config, mixer, mlp, windows=windows_of(config, slide, 128))
