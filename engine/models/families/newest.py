"""Families with experts of 2025 and 2026, and small ones with one switch of their own."""

from __future__ import annotations

from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import (
    attention,
    decoder,
    dense,
    latent_attention,
    num_layers,
    slides,
    windows_of,
    with_names,
)
from engine.models.families.experts import MIXTRAL, deepseek_mlps, experts
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.llama_like import granite, llama
from engine.models.families.other_norms import gemma2
from engine.models.families.renamed import minicpm
from engine.models.families.rope import phi_longrope
from engine.models.spec import AttentionSpec, DenseSpec, ExpertNames, ModelSpec, MoESpec, Norms

KINDS = ("full_attention", "sliding_attention")
HY3_EXPERTS = ExpertNames(router="mlp.router.gate", correction="mlp.expert_bias", shared="mlp.shared_mlp")
EXAONE_EXPERTS = ExpertNames(correction="mlp.e_score_correction_bias")


def mellum(config: Config) -> ModelSpec:
    """Mellum 2: experts, RMSNorm of each query and key head, windows with a RoPE of their own."""
    slide, bias = slides(config), flag(config, "attention_bias")
    mixers = [_of_kind({"head_dim": 128, **config}, KINDS[here], bias) for here in slide]
    mlp = experts(config, renormalise=flag(config, "norm_topk_prob", True))
    mlps = [mlp if here else dense(config) for here in sparse_layers(config, first_dense=0)]
    return decoder(config, mixers, mlps, windows=windows_of(config, slide))


def solar_open(config: Config) -> ModelSpec:
    """Solar Open 100B: DeepSeek V3's experts in all layers."""
    config = {"head_dim": 128, "rope_theta": 1e6, "first_k_dense_replace": 0, **config}
    config["intermediate_size"] = integer(config, "intermediate_size", config.get("moe_intermediate_size"))
    return decoder(config, attention(config, qkv_bias=flag(config, "attention_bias")), deepseek_mlps(config))


def hy3(config: Config) -> ModelSpec:
    """Hunyuan 3: experts chosen by corrected sigmoid scores, RMSNorm of each query and key head."""
    bias = flag(config, "attention_bias")
    mixer = attention({"head_dim": 128, **config}, qkv_bias=bias, o_bias=bias, qk_norm=True)
    mlp = experts(config, scoring="sigmoid", renormalise=True)
    router = replace(mlp.router, scale=number(config, "router_scaling_factor", 1.0))
    shared = DenseSpec(intermediate_size=integer(config, "num_shared_experts", 1) * mlp.intermediate_size)
    mlp = replace(mlp, router=router, correction=True, shared=shared, names=HY3_EXPERTS)
    mlps = [mlp if here else dense(config) for here in sparse_layers(config, first_dense=1)]
    return decoder(config, mixer, mlps)


def exaone_moe(config: Config) -> ModelSpec:
    """K-EXAONE: DeepSeek V3's experts, RMSNorm of each head, no RoPE in layers without a window."""
    slide = slides(config, 4)
    mixer = attention(config, qk_norm=True)
    hybrid = config.get("sliding_window") is not None
    mixers = [replace(mixer, rope=None) if hybrid and not here else mixer for here in slide]
    shared = {"n_shared_experts": config.get("num_shared_experts"), "n_routed_experts": config.get("num_experts")}
    mlp = next(each for each in deepseek_mlps({**config, **shared, "first_k_dense_replace": 0}))
    assert isinstance(mlp, MoESpec)
    mlp = replace(mlp, names=EXAONE_EXPERTS)
    first = integer(config, "first_k_dense_replace", 0, minimum=0)
    mlps = [mlp if here else dense(config) for here in sparse_layers(config, first_dense=first)]
    spec = decoder(config, mixers, mlps, windows=windows_of(config, slide))
    return replace(spec, unused=("mtp.",))


def phimoe(config: Config) -> ModelSpec:
    """Phi-3.5-MoE: two experts, each chosen and weighted among those close to the best; LayerNorm and biases."""
    bias = flag(config, "attention_bias")
    if integer(config, "num_experts_per_tok", 2) != 2:
        raise ModelError("'num_experts_per_tok' must be 2 for Phi-3.5-MoE")
    config = {**config, "rope_scaling": phi_longrope(config)}
    window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
    mixer = attention(config, qkv_bias=bias, o_bias=bias, window=window)
    mlp = experts({"num_experts_per_tok": 2, **config}, count=("num_local_experts",), size="intermediate_size")
    mlp = replace(mlp, names=MIXTRAL, margin=2 * number(config, "router_jitter_noise", 0.01))
    spec = decoder({"rms_norm_eps": 1e-5, **config}, mixer, mlp)
    return replace(spec, norm="layer_bias", head_bias=flag(config, "lm_head_bias"))


def minicpm3(config: Config) -> ModelSpec:
    """MiniCPM 3: latent attention, MiniCPM's multipliers."""
    sizes = integer(config, "hidden_size") // integer(config, "num_attention_heads")
    own = {"v_head_dim": integer(config, "v_head_dim", sizes), "rope_interleave": False, "head_dim": None}
    spec = minicpm({**config, "head_dim": integer(config, "qk_rope_head_dim")})
    mixer = latent_attention({**config, **own}, bias=flag(config, "attention_bias"))
    mixer = replace(mixer, norm_eps=1e-6)
    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))


def granite_swa(config: Config) -> ModelSpec:
    """Granite with windows and attention sinks: Granite's multipliers, RoPE in some layers."""
    count = num_layers(config)
    default = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(count)]
    config = {"sliding_window": 128, "num_key_value_heads": 4, **config}
    config["layer_types"] = config.get("layer_types") or default
    thetas = config.get("layer_rope_theta") or [1] * count
    if not isinstance(thetas, list) or len(thetas) != count or len({theta for theta in thetas if theta}) > 1:
        raise ModelError(f"'layer_rope_theta' must be 0 or the same number for each of {count} layers, got {thetas!r}")
    spec, windows = granite(config), windows_of(config, slides(config))
    layers = []
    for layer, theta, window in zip(spec.layers, thetas, windows, strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        mixer = replace(layer.mixer, window=window, learnt=("sinks",), rope=layer.mixer.rope if theta else None)
        layers.append(replace(layer, mixer=mixer))
    return replace(spec, layers=tuple(layers))


def hyperclovax(config: Config) -> ModelSpec:
    """HyperCLOVA X: Granite's multipliers, logits that are multiplied, norms after attention and MLP, too."""
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    scale, logits = number(config, "attention_multiplier", head_dim**-0.5), number(config, "logits_scaling", 1.0)
    spec = granite({**config, "attention_multiplier": scale})
    norms = Norms()
    if flag(config, "use_post_norm", True):
        norms = Norms(after_mixer="post_norm1", after_mlp="post_norm2")
    layers = tuple(replace(layer, norms=norms) for layer in spec.layers)
    return replace(spec, layers=layers, logits_multiplier=logits)


def youtu(config: Config) -> ModelSpec:
    """Youtu-LLM (Tencent): latent attention and dense MLPs."""
    return decoder(config, latent_attention(config, bias=flag(config, "attention_bias")), dense(config))


def vault_gemma(config: Config) -> ModelSpec:
    """VaultGemma: Gemma 2 without the norms after attention and MLP."""
    spec = gemma2(config)
    norms = Norms(before_mlp="pre_feedforward_layernorm")
    return replace(spec, layers=tuple(replace(layer, norms=norms) for layer in spec.layers))


def cwm(config: Config) -> ModelSpec:
    """CWM (Meta): Llama with a sliding window in three of four layers."""
    default = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(num_layers(config))]
    config = {"sliding_window": 8192, "rope_theta": 1e6, **config}
    config["layer_types"] = config.get("layer_types") or default
    spec, windows = llama(config), windows_of(config, slides(config))
    layers = []
    for layer, window in zip(spec.layers, windows, strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, window=window)))
    return replace(spec, layers=tuple(layers))


def mllama(config: Config) -> ModelSpec:
    """Llama 3.2 Vision, text: the layers that look at images are left out, as they are without one."""
    count, crossed = num_layers(config), config.get("cross_attention_layers") or []
    if not isinstance(crossed, list) or not all(isinstance(i, int) and 0 <= i < count for i in crossed):
        raise ModelError(f"'cross_attention_layers' must be a list of layers, got {crossed!r}")
    kept = [i for i in range(count) if i not in crossed]
    names = [(f"model.layers.{i}.", f"model.cross_attention.{i}.") for i in crossed]
    names += [(f"model.layers.{i}.", f"model.layers.{at}.") for at, i in enumerate(kept) if at != i]
    spec = llama({"rope_theta": 500000.0, **config, "num_hidden_layers": len(kept)})
    spec = with_names(spec, tuple(names), unused=("cross_attention.",))
    return replace(spec, num_embeddings=spec.vocab_size + 8)


def _of_kind(config: Config, kind: str, bias: bool) -> AttentionSpec:
    return attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True, layer_type=kind)


def sparse_layers(config: Config, *, first_dense: int) -> list[bool]:
    """Return which layers have experts: by `mlp_layer_types`, else all but the first ones."""
    count, kinds = num_layers(config), config.get("mlp_layer_types")
    if kinds is None:
        return [layer >= first_dense for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {"sparse", "dense"}:
        raise ModelError(f"'mlp_layer_types' must be sparse or dense for each of {count} layers, got {kinds!r}")
    return [kind == "sparse" for kind in kinds]
