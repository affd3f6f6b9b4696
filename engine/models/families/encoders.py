"""Encoders: BERT and its relatives, whose tokens see the whole text. They compute embeddings, scores and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.models.errors import ModelError
from engine.models.families import llama_like, other_norms
from engine.models.families.classic import ACTIVATIONS
from engine.models.families.common import MAX_LAYERS, attention, decoder, num_layers, with_names
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.mpt import alibi_slopes
from engine.models.quantization import Renames
from engine.models.spec import (
    AdaptationSpec,
    AttentionSpec,
    DenseSpec,
    DisentangledSpec,
    HeadLayerSpec,
    HeadSpec,
    LearntPositions,
    ModelSpec,
    Norms,
)

CLASSIFIER, TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
AFTER_SUMS = Norms(before_mixer="", before_mlp="", sum_mixer="attention_norm", sum_mlp="output_norm")
UNUSED = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")
BERT = (
    ("^bert.", ""),
    ("^roberta.", ""),
    (".LayerNorm.gamma", ".LayerNorm.weight"),
    (".LayerNorm.beta", ".LayerNorm.bias"),
    ("^embeddings.word_embeddings.", "model.embed_tokens."),
    ("^embeddings.position_embeddings.", "model.embed_positions."),
    ("^embeddings.token_type_embeddings.", "model.embed_types."),
    ("^embeddings.LayerNorm.", "model.embed_norm."),
    ("^encoder.layer.", "model.layers."),
    (".attention.self.query.", ".self_attn.q_proj."),
    (".attention.self.key.", ".self_attn.k_proj."),
    (".attention.self.value.", ".self_attn.v_proj."),
    (".attention.output.dense.", ".self_attn.o_proj."),
    (".attention.output.LayerNorm.", ".attention_norm."),
    (".intermediate.dense.", ".mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."),
    (".output.LayerNorm.", ".output_norm."),
)
FLASH = (  # Jina's and Nomic's form of BERT
    ("^roberta.", ""),
    ("^embeddings.word_embeddings.", "model.embed_tokens."),
    ("^embeddings.position_embeddings.", "model.embed_positions."),
    ("^embeddings.token_type_embeddings.", "model.embed_types."),
    ("^emb_ln.", "model.embed_norm."),
    ("^encoder.layers.", "model.layers."),
    (".mixer.", ".attn."),
    (".attn.Wqkv.", ".self_attn.qkv_proj."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".norm1.", ".attention_norm."),
    (".norm2.", ".output_norm."),
    (".mlp.fc11.", ".mlp.up_proj."),
    (".mlp.fc12.", ".mlp.gate_proj."),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)
DISTILBERT = (
    ("^distilbert.", ""),
    ("^transformer.layer.", "encoder.layer."),
    (".attention.q_lin.", ".attention.self.query."),
    (".attention.k_lin.", ".attention.self.key."),
    (".attention.v_lin.", ".attention.self.value."),
    (".attention.out_lin.", ".attention.output.dense."),
    (".sa_layer_norm.", ".attention.output.LayerNorm."),
    (".ffn.lin1.", ".intermediate.dense."),
    (".ffn.lin2.", ".output.dense."),
    (".output_layer_norm.", ".output.LayerNorm."),
    *BERT,
)
GTE = (
    ("^new.", ""),
    ("^gte.", ""),
    (".attention.qkv_proj.", ".self_attn.qkv_proj."),
    (".attention.o_proj.", ".self_attn.o_proj."),
    (".attn_ln.", ".attention_norm."),
    (".mlp_ln.", ".output_norm."),
    *BERT,
)
JINA = (
    (".mlp.layernorm.", ".output_norm."),
    (".mlp.gated_layers.", ".mlp.gate_up."),
    (".mlp.wo.", ".mlp.down_proj."),
    *BERT,
)
ALBERT = (
    ("^albert.", ""),
    ("^encoder.embedding_hidden_mapping_in.", "model.embed_projection."),
    (".attention.query.", ".attention.self.query."),
    (".attention.key.", ".attention.self.key."),
    (".attention.value.", ".attention.self.value."),
    (".attention.dense.", ".attention.output.dense."),
    (".attention.LayerNorm.", ".attention.output.LayerNorm."),
    (".ffn.", ".intermediate.dense."),
    (".ffn_output.", ".output.dense."),
    (".full_layer_layer_norm.", ".output.LayerNorm."),
    ("^pooler.", "pooler.dense."),
    *BERT,
)
ELECTRA = (("^electra.", ""), ("^embeddings_project.", "model.embed_projection."), *BERT)
MPNET = (
    ("^mpnet.", ""),
    ("^encoder.relative_attention_bias.", "model.relative_attention_bias."),
    (".attention.attn.q.", ".attention.self.query."),
    (".attention.attn.k.", ".attention.self.key."),
    (".attention.attn.v.", ".attention.self.value."),
    (".attention.attn.o.", ".attention.output.dense."),
    (".attention.LayerNorm.", ".attention.output.LayerNorm."),
    *BERT,
)
DEBERTA = (
    ("^deberta.", ""),
    ("^encoder.rel_embeddings.", "model.relative_embeddings."),
    ("^encoder.LayerNorm.", "model.relative_embeddings.norm."),
    (".attention.self.query_proj.", ".attention.self.query."),
    (".attention.self.key_proj.", ".attention.self.key."),
    (".attention.self.value_proj.", ".attention.self.value."),
    *BERT,
)
MODERN = (
    ("^model.", ""),
    ("^embeddings.tok_embeddings.", "model.embed_tokens."),
    ("^embeddings.norm.", "model.embed_norm."),
    ("^layers.", "model.layers."),
    ("^final_norm.", "model.norm."),
    (".attn.Wqkv.", ".self_attn.qkv_proj."),
    (".attn.Wo.", ".self_attn.o_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".mlp.Wo.", ".mlp.down_proj."),
)
Layers = Callable[[int], tuple[HeadLayerSpec, ...]]  # of a classifier's head, given the hidden size


def bert(config: Config) -> ModelSpec:
    """BERT (bge, e5, gte, all-MiniLM, rerankers of ms-marco): learnt positions, token types, norms after the sums."""
    return _bert(config, BERT, lambda size: (HeadLayerSpec(name="pooler.dense", num_outputs=size, activation="tanh"),))


def roberta(config: Config) -> ModelSpec:
    """RoBERTa and XLM-RoBERTa (bge-m3, multilingual-e5, rerankers of bge and Jina): BERT with other first positions."""
    if config.get("position_embedding_type") == "rotary":
        return jina_v3(config)
    is_flash = "Flash" in str(config.get("auto_map"))  # Jina's files
    spec = _bert(
        config,
        FLASH if is_flash else BERT,
        lambda size: (HeadLayerSpec(name="classifier.dense", num_outputs=size, activation="tanh"),),
        last="classifier.out_proj",
        first_position=integer(config, "pad_token_id", 1, minimum=0) + 1,
    )
    return _with_mixers(spec, fused=True) if is_flash else spec


def jina_v2(config: Config) -> ModelSpec:
    """jina-embeddings-v2 and jina-reranker-v1: BERT with ALiBi to both sides and a gated MLP."""
    if "qk-post-norm" in str(config.get("auto_map")):
        raise ModelError("norms of queries and keys over all heads (jina-embeddings-v2-base-code) are not supported")
    for name, value in (("position_embedding_type", "alibi"), ("feed_forward_type", "geglu"), ("hidden_act", "gelu")):
        if config.get(name) != value:
            raise ModelError(f"{name!r} must be {value}, got {config.get(name)!r}")
    mixer = replace(_attention(config, bias=True), rope=None)
    mlp = DenseSpec(
        intermediate_size=integer(config, "intermediate_size"), activation="gelu", fused="gate_up", down_bias=True
    )
    config = {"layer_norm_eps": 1e-12, **config}
    spec = decoder(
        config,
        replace(mixer, alibi=alibi_slopes(mixer.num_heads)),
        mlp,
        norms=AFTER_SUMS,
        eps_name="layer_norm_eps",
    )
    is_sequence = str(config["architectures"][0]).endswith(CLASSIFIER)
    unused = tuple(name for name in UNUSED if name != "pooler." or not is_sequence)
    spec = replace(with_names(spec, JINA, unused=unused), context_length=integer(config, "max_position_embeddings"))
    pooler = HeadLayerSpec(name="pooler.dense", num_outputs=spec.hidden_size, activation="tanh")
    return _with_head(config, _with_embeddings(config, spec), (pooler,), "cls")


def jina_v3(config: Config) -> ModelSpec:
    """jina-embeddings-v3: XLM-RoBERTa with RoPE. `lora_adaptation` names the task whose adapter is merged."""
    config = {"layer_norm_eps": 1e-5, "type_vocab_size": 1, **config}
    if not isinstance(config.get("rope_parameters"), dict):
        config["rope_theta"] = number(config, "rotary_emb_base", 20000.0)
    mixer = replace(_attention(config, bias=True), fused=True)
    spec = decoder(config, mixer, _plain_mlp(config), norms=AFTER_SUMS, eps_name="layer_norm_eps")
    spec = with_names(spec, FLASH, unused=UNUSED)
    layer = HeadLayerSpec(name="classifier.dense", num_outputs=spec.hidden_size, activation="tanh")
    spec = _with_head(config, _with_embeddings(config, spec), (layer,), "cls", last="classifier.out_proj")
    return replace(spec, adaptations=_adaptations(config))


def _adaptations(config: Config) -> AdaptationSpec | None:
    """Return the adapters of tasks that the checkpoint holds, and the one that `lora_adaptation` names."""
    names, chosen = config.get("lora_adaptations"), config.get("lora_adaptation")
    if names is None and chosen is None:
        return None
    if not isinstance(names, list) or not names or (chosen is not None and chosen not in names):
        raise ModelError(f"'lora_adaptation' must be one of {names!r}, got {chosen!r}")
    scale = number(config, "lora_alpha", 1.0) / integer(config, "lora_rank", 4)
    return AdaptationSpec(count=len(names), chosen=None if chosen is None else names.index(chosen), scale=scale)


def albert(config: Config) -> ModelSpec:
    """ALBERT: BERT whose layers share weights, with smaller embeddings, which are projected."""
    count, groups = num_layers(config), integer(config, "num_hidden_groups", 1, maximum=num_layers(config))
    inner = integer(config, "inner_group_num", 1, maximum=MAX_LAYERS // count)
    own = [(int(i / (count / groups)), k) for i in range(count) for k in range(inner)]
    first = {group: own.index(group) for group in reversed(own)}
    names = [
        (f"^encoder.albert_layer_groups.{group}.albert_layers.{k}.", f"encoder.layer.{at}.")
        for (group, k), at in first.items()
    ]
    config = {"hidden_act": "gelu_new", **config, "num_hidden_layers": len(own)}
    pooler = HeadLayerSpec(name="pooler.dense", num_outputs=integer(config, "hidden_size"), activation="tanh")
    spec = _bert(config, (*ALBERT[:1], *names, *ALBERT[1:]), lambda size: (pooler,))
    layers = tuple(
        replace(layer, weights_of=first[group] if first[group] != i else None)
        for i, (group, layer) in enumerate(zip(own, spec.layers, strict=True))
    )
    unused = (*spec.unused, "predictions.", "sop_classifier.")
    return replace(spec, layers=layers, unused=unused, embedding_dim=integer(config, "embedding_size", 128))


def electra(config: Config) -> ModelSpec:
    """ELECTRA: BERT, in small sizes with smaller embeddings, which are projected."""
    spec = _bert(
        config,
        ELECTRA,
        lambda size: (HeadLayerSpec(name="classifier.dense", num_outputs=size, activation="gelu"),),
        last="classifier.out_proj",
    )
    size = integer(config, "embedding_size", 128)
    unused = (*spec.unused, "generator_predictions.", "generator_lm_head.", "discriminator_predictions.")
    return replace(spec, unused=unused, embedding_dim=size if size != spec.hidden_size else 0)


def distilbert(config: Config) -> ModelSpec:
    """DistilBERT: BERT of half the layers, without token types."""
    sizes = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    sizes["intermediate_size"] = "hidden_dim"
    config = {**config, **{ours: integer(config, theirs) for ours, theirs in sizes.items()}, "type_vocab_size": 0}
    config["hidden_act"] = config.get("activation", "gelu")
    spec = _bert(
        config,
        DISTILBERT,
        lambda size: (HeadLayerSpec(name="pre_classifier", num_outputs=size, activation="relu"),),
    )
    return replace(spec, unused=(*spec.unused, "vocab_"))


def mpnet(config: Config) -> ModelSpec:
    """MPNet (all-mpnet-base, multi-qa-mpnet): RoBERTa with learnt biases of scores by distance; on CPUs."""
    if integer(config, "relative_attention_num_buckets", 32) != 32:
        raise ModelError("'relative_attention_num_buckets' must be 32")
    spec = _bert(
        {**config, "type_vocab_size": 0},
        MPNET,
        lambda size: (HeadLayerSpec(name="classifier.dense", num_outputs=size, activation="tanh"),),
        last="classifier.out_proj",
        first_position=2,
    )
    return _with_mixers(spec, relative=True)


def deberta(config: Config) -> ModelSpec:
    """DeBERTa v2 and v3 (mxbai-rerank, NLI, zero-shot classifiers): BERT with scores by relative positions."""
    terms = config.get("pos_att_type")
    terms = terms.split("|") if isinstance(terms, str) else terms or []
    for name, found, value in (
        ("relative_attention", flag(config, "relative_attention"), True),
        ("share_att_key", flag(config, "share_att_key"), True),
        ("pos_att_type", sorted(str(term).strip() for term in terms), ["c2p", "p2c"]),
        ("conv_kernel_size", integer(config, "conv_kernel_size", 0, minimum=0), 0),
        ("embedding_size", config.get("embedding_size") or config.get("hidden_size"), config.get("hidden_size")),
    ):
        if found != value:
            raise ModelError(f"{name!r} must be {value!r} for DeBERTa, got {found!r}")
    config = {"layer_norm_eps": 1e-7, "type_vocab_size": 0, **config}
    longest = integer(config, "max_relative_positions", -1, minimum=-1)
    distances = DisentangledSpec(
        max_distance=longest if longest >= 1 else integer(config, "max_position_embeddings"),
        num_buckets=max(integer(config, "position_buckets", -1, minimum=-1), 0),
        norm="layer_norm" in str(config.get("norm_rel_ebd", "none")),
    )
    if distances.num_buckets and not 1 < distances.num_buckets // 2 < distances.max_distance - 1:
        raise ModelError(
            f"'position_buckets' ({distances.num_buckets}) do not divide {distances.max_distance} distances"
        )
    pooler = HeadLayerSpec(
        name="pooler.dense",
        num_outputs=integer(config, "pooler_hidden_size", config.get("hidden_size")),
        activation=_activation(config.get("pooler_hidden_act") or "gelu"),
    )
    spec = _bert(config, DEBERTA, lambda size: (pooler,))
    if not flag(config, "position_biased_input", True):
        spec = replace(spec, positions=None)
    spec = replace(spec, unused=(*spec.unused, "lm_predictions.", "mask_predictions."))
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return _with_mixers(spec, disentangled=distances, scale=(3 * mixer.head_dim) ** -0.5)  # a sum of three products


def gte(config: Config) -> ModelSpec:
    """gte 1.5 and gte-multilingual (NewModel), arctic-embed-m-v2.0 (GteModel): BERT with RoPE and a gated MLP."""
    for name, value in (("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm"), ("hidden_act", "gelu")):
        if config.get(name, value) != value:
            raise ModelError(f"{name!r} must be {value}, got {config[name]!r}")
    if flag(config, "logn_attention_scale") or not flag(config, "pack_qkv", True):
        raise ModelError("'logn_attention_scale' must be false, 'pack_qkv' true")
    rope, scaling = config.get("rope_scaling"), None
    if isinstance(rope, dict) and rope.get("type") == "ntk":
        if rope.get("mixed_b") is not None:
            raise ModelError("'rope_scaling': 'mixed_b' is not supported")
        factor, size = number(rope, "factor"), integer(config, "hidden_size") // integer(config, "num_attention_heads")
        config = {**config, "rope_theta": number(config, "rope_theta", 10000.0) * factor}
        scaling = {"rope_type": "linear", "factor": factor ** (2 / size)}
    elif rope is not None:
        raise ModelError(f"'rope_scaling' must be of type ntk, got {rope!r}")
    config = {"layer_norm_eps": 1e-12, "type_vocab_size": 1, **config, "rope_scaling": scaling}
    mlp = DenseSpec(
        intermediate_size=integer(config, "intermediate_size"),
        activation="gelu",
        fused="up_gate_proj",
        up_first=True,
        down_bias=True,
    )
    mixer = replace(_attention(config, bias=True), fused=True)
    is_sequence = str(config["architectures"][0]).endswith(CLASSIFIER)
    unused = tuple(name for name in UNUSED if name != "pooler." or not is_sequence)
    spec = with_names(decoder(config, mixer, mlp, norms=AFTER_SUMS, eps_name="layer_norm_eps"), GTE, unused=unused)
    spec = replace(spec, context_length=integer(config, "max_position_embeddings"))
    pooler = HeadLayerSpec(name="pooler.dense", num_outputs=spec.hidden_size, activation="tanh")
    return _with_head(config, _with_embeddings(config, spec), (pooler,), "cls")


def nomic_bert(config: Config) -> ModelSpec:
    """NomicBERT (nomic-embed-text 1 and 1.5): BERT with RoPE and a gated MLP."""
    if integer(config, "num_experts", 0, minimum=0) or integer(config, "moe_every_n_layers", 0, minimum=0):
        raise ModelError("experts are not supported in NomicBERT: 'num_experts' must be 0")
    for name, value in (("prenorm", False), ("use_rms_norm", False), ("rotary_emb_interleaved", False)):
        if flag(config, name, value) != value:
            raise ModelError(f"{name!r} must be false for NomicBERT")
    if config.get("activation_function", "swiglu") != "swiglu":
        raise ModelError(f"'activation_function' must be swiglu, got {config['activation_function']!r}")
    if number(config, "rotary_emb_fraction", 1.0) != 1:
        raise ModelError("'rotary_emb_fraction' must be 1")
    size = integer(config, "hidden_size", config.get("n_embd"))
    inner = integer(config, "intermediate_size", config.get("n_inner"))
    usual = {
        "hidden_size": size,
        "num_attention_heads": integer(config, "num_attention_heads", config.get("n_head")),
        "num_hidden_layers": integer(config, "num_hidden_layers", config.get("n_layer")),
        "intermediate_size": inner,
        # Beyond the context of training, the authors stretch RoPE by a text's length.
        "max_position_embeddings": integer(
            config, "max_trained_positions", config.get("max_position_embeddings", 2048)
        ),
        "rope_theta": number(config, "rotary_emb_base", 1000.0),
        "layer_norm_eps": number(config, "layer_norm_epsilon", config.get("layer_norm_eps", 1e-12)),
    }
    config = {**config, **usual}
    mixer = replace(_attention(config, bias=flag(config, "qkv_proj_bias")), fused=True)
    mlp = DenseSpec(intermediate_size=inner, bias=flag(config, "mlp_fc1_bias"))
    spec = with_names(
        decoder(config, mixer, mlp, norms=AFTER_SUMS, eps_name="layer_norm_eps"), FLASH, unused=(*UNUSED, "head.")
    )
    return _with_embeddings(config, spec)


def modern_bert(config: Config) -> ModelSpec:
    """ModernBERT (gte-modernbert, gte-reranker-modernbert): attention alternates between all tokens and a window."""
    count, every = num_layers(config), integer(config, "global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    if len(kinds) != count or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"'layer_types' must be full_attention or sliding_attention for each of {count} layers")
    if not isinstance(config.get("rope_parameters"), dict):
        thetas = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}
        ropes = {kind: {"rope_theta": number(config, *theta)} for kind, theta in thetas.items()}
        config = {**config, "rope_parameters": ropes}
    window = integer(config, "local_attention", 128) // 2 + 1  # half of it to each side
    bias = flag(config, "attention_bias")
    mixers = {
        kind: replace(_attention(config, bias=bias, layer_type=kind), fused=True, window=size)
        for kind, size in (("full_attention", 0), ("sliding_attention", window))
    }
    mlp = DenseSpec(
        intermediate_size=integer(config, "intermediate_size"),
        bias=flag(config, "mlp_bias"),
        activation=_activation(config.get("hidden_activation") or "gelu"),
        fused="Wi",
    )
    config = {"norm_eps": 1e-5, **config}
    spec = decoder(config, [mixers[kind] for kind in kinds], mlp, eps_name="norm_eps")
    first = replace(spec.layers[0], norms=Norms(before_mixer=""))  # it reads the embeddings, which are normalised
    norm_bias = flag(config, "norm_bias")
    head = HeadLayerSpec(
        name="head.dense",
        num_outputs=spec.hidden_size,
        bias=flag(config, "classifier_bias"),
        activation=_activation(config.get("classifier_activation") or "gelu"),
        norm="head.norm",
        norm_bias=norm_bias,
    )
    unused = ("decoder.",) if _is_classifier(config) else ("decoder.", "head.")
    spec = replace(
        with_names(spec, MODERN, unused=unused),
        layers=(first, *spec.layers[1:]),
        norm="layer_bias" if norm_bias else "layer",
        embedding_norm="norm",
    )
    return _with_head(config, spec, (head,), config.get("classifier_pooling", "cls"), head_of_tokens=(head,))


def gemma3_encoder(config: Config) -> ModelSpec:
    """EmbeddingGemma: Gemma 3 with attention in both directions."""
    spec = other_norms.gemma3({**config, "use_bidirectional_attention": False})
    if not flag(config, "use_bidirectional_attention"):
        return spec
    return _both_ways(spec, lambda window: window and window // 2 + 1)


def eurobert(config: Config) -> ModelSpec:
    """EuroBERT: Llama with attention in both directions."""
    return _both_ways(llama_like.llama(config))


def llama_both_ways(config: Config) -> ModelSpec:
    """NVIDIA's llama-nemotron-embed and -rerank: Llama with attention in both directions."""
    spec, pooling = _both_ways(llama_like.llama(config)), config.get("pooling", "avg")
    if not _is_classifier(config):
        return spec
    if pooling != "avg" or config.get("temperature", 1.0) != 1:
        raise ModelError(f"'pooling' must be avg and 'temperature' 1 for classification, got {pooling!r}")
    spec = _with_head(config, with_names(spec, (("^score.", "classifier."),)), (), "mean")
    assert spec.head is not None
    return replace(spec, head=replace(spec.head, layers=(replace(spec.head.layers[0], bias=False),)))


def _both_ways(spec: ModelSpec, window_of: Callable[[int], int] = lambda window: window) -> ModelSpec:
    """Let the tokens of a decoder see later ones."""
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, causal=False, window=window_of(layer.mixer.window))))
    return replace(spec, layers=tuple(layers))


def _with_mixers(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Change fields of each layer's attention."""
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, **changes)))
    return replace(spec, layers=tuple(layers))


def _bert(
    config: Config, names: Renames, layers: Layers, *, last: str = "classifier", first_position: int = 0
) -> ModelSpec:
    """Create an encoder with learnt positions and norms after the sums. layers: a classifier's before `last`."""
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(f"'position_embedding_type' must be absolute, got {kind!r}")
    if flag(config, "is_decoder"):
        raise ModelError("'is_decoder' must be false: encoders that were made decoders are not supported")
    mixer, mlp = replace(_attention(config, bias=True), rope=None), _plain_mlp(config)
    config = {"layer_norm_eps": 1e-12, **config}
    spec = decoder(config, mixer, mlp, norms=AFTER_SUMS, eps_name="layer_norm_eps")
    is_sequence = str(config["architectures"][0]).endswith(CLASSIFIER)
    unused = tuple(name for name in UNUSED if name != "pooler." or not is_sequence)
    count = integer(config, "max_position_embeddings")
    spec = replace(
        with_names(spec, names, unused=unused),
        positions=LearntPositions(count=count, offset=first_position),
        context_length=count - first_position,
    )
    return _with_head(config, _with_embeddings(config, spec), layers(spec.hidden_size), "cls", last=last)


def _plain_mlp(config: Config) -> DenseSpec:
    return DenseSpec(
        intermediate_size=integer(config, "intermediate_size"),
        bias=True,
        activation=_activation(config.get("hidden_act") or "gelu"),
        gated=False,
    )


def _attention(config: Config, *, bias: bool, layer_type: str = "") -> AttentionSpec:
    config = {**config, "num_key_value_heads": None}
    return replace(attention(config, qkv_bias=bias, o_bias=bias, layer_type=layer_type), causal=False)


def _with_embeddings(config: Config, spec: ModelSpec) -> ModelSpec:
    """Return the encoder with BERT's embeddings and norms."""
    types = integer(config, "type_vocab_size", 2, minimum=0)
    return replace(spec, norm="layer_bias", embedding_norm="norm", token_types=types, final_norm=False)


def _is_classifier(config: Config) -> bool:
    return str(config["architectures"][0]).endswith((CLASSIFIER, TOKEN_CLASSIFIER))


def _with_head(
    config: Config,
    spec: ModelSpec,
    layers: tuple[HeadLayerSpec, ...],
    pooling: str,
    *,
    last: str = "classifier",
    head_of_tokens: tuple[HeadLayerSpec, ...] = (),
) -> ModelSpec:
    """Return the model with the head of its architecture: `layers`, then a linear layer called `last`; none if it is no
    classifier.
    """
    if not _is_classifier(config):
        return spec
    is_of_tokens = str(config["architectures"][0]).endswith(TOKEN_CLASSIFIER)
    if pooling not in ("cls", "mean"):
        raise ModelError(f"'classifier_pooling' must be cls or mean, got {pooling!r}")
    names = config.get("id2label")
    count = len(names) if isinstance(names, dict) and names else integer(config, "num_labels", 2)
    labels = HeadLayerSpec(name="classifier" if is_of_tokens else last, num_outputs=count)
    return replace(
        spec,
        head=HeadSpec(
            layers=(*(head_of_tokens if is_of_tokens else layers), labels), pooling="all" if is_of_tokens else pooling
        ),
    )


def _activation(name: Any) -> Any:
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


_BODIES = {
    "Bert": bert,
    "Roberta": roberta,
    "XLMRoberta": roberta,
    "Camembert": roberta,
    "DistilBert": distilbert,
    "ModernBert": modern_bert,
    "MPNet": mpnet,
    "JinaBert": jina_v2,
    "JinaEmbeddingsV3": jina_v3,
    "Albert": albert,
    "Electra": electra,
    "DebertaV2": deberta,
    "New": gte,
    "Gte": gte,
}
_HEADS = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER, TOKEN_CLASSIFIER)
ENCODERS: dict[str, Callable[[Config], ModelSpec]] = {
    **{body + head: family for body, family in _BODIES.items() for head in _HEADS},
    "NomicBertModel": nomic_bert,
    "Gemma3TextModel": gemma3_encoder,
    "EuroBertModel": eurobert,
    "LlamaBidirectionalModel": llama_both_ways,
    "LlamaBidirectionalForSequenceClassification": llama_both_ways,
}
