"""Writes a transformers model as a GGUF file, as llama.cpp's converter would, with the published `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "phi3": "phi3", "gpt_oss": "gpt-oss", "glm4": "glm4", "granite": "granite", "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe", "smollm3": "smollm3", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next", "gemma4_text": "gemma4",
    "gemma3n_text": "gemma3n",
    "granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h",
}  # fmt: skip
PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3")
OFFSET = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")  # norms have one added
FLOATS = ("altup", "norm", "conv.conv", "conv1d", "ssm_a", "ssm_d")  # parts of names of tensors that stay floats
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"

Kind = Callable[[str], str]  # name in the GGUF file → type of a matrix


def write_gguf(model: Any, path: Path, kind: Kind = lambda name: "F32", tokenizer: bool = False) -> Path:
    """Write `model` with its matrices in the types that `kind` says; then its own weights are what the file holds."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    if architecture == "nemotron_h" and "moe" in config.layer_types:
        architecture = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, architecture)
    write_settings(writer, config, architecture)
    if tokenizer:
        write_tokenizer(writer, config.vocab_size)
    with torch.no_grad():
        for name, tensor, into in _tensors(model, architecture):
            stored = kind(name) if _is_matrix(name, tensor) else "F32"
            of = gguf.GGMLQuantizationType[stored]
            data = gguf.quantize(tensor.float().numpy(), of)
            writer.add_tensor(name, data, raw_dtype=of)
            into(torch.from_numpy(np.array(gguf.dequantize(data, of), dtype=np.float32)).view(tensor.shape))
    for name, values in _rope_factors(config).items():
        writer.add_tensor(f"{name}.weight", np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_matrix(name: str, tensor: Tensor) -> bool:
    """Return whether the converter may quantise a tensor."""
    return tensor.dim() > 1 and not any(part in name for part in (*FLOATS, "ffn_gate_inp"))


def write_settings(writer: Any, config: Any, architecture: str) -> None:
    """Write the settings. The writer warns where a later one replaces an earlier one, as it does in the converter."""
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, see `write_gemma4`
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    if architecture == "qwen3next" or architecture.startswith("qwen35"):
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    if architecture.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_leading_dense_block_count(getattr(config, "num_dense_layers", config.num_hidden_layers))
    writer.add_head_count(config.num_attention_heads)
    kinds = getattr(config, "layer_types", None) or []
    counts = [config.num_key_value_heads if kind != "conv" else 0 for kind in kinds]
    writer.add_head_count_kv(counts if "conv" in kinds else config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    eps = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    writer.add_layer_norm_rms_eps(next(getattr(config, name) for name in eps if hasattr(config, name)))
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(full["attention_factor"])
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if count := getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        writer.add_expert_count(count)
        if (chosen := getattr(config, "num_experts_per_tok", None)) is not None:
            writer.add_expert_used_count(chosen)
        if size := getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(size)
        shared = getattr(config, "shared_expert_intermediate_size", getattr(config, "shared_intermediate_size", 0))
        if shared:
            writer.add_expert_shared_feed_forward_length(shared)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if hasattr(config, "mamba_expand") or architecture.startswith("nemotron_h"):
        write_mamba(writer, config)
    if architecture.startswith("nemotron_h"):
        write_nemotron(writer, config)
    if architecture == "gemma4":
        write_gemma4(writer, config)
    if architecture == "gemma3n":
        write_gemma3n(writer, config)


def write_mamba(writer: Any, config: Any) -> None:
    is_nemotron = config.model_type == "nemotron_h"
    heads, size = (
        (config.mamba_num_heads, config.mamba_head_dim) if is_nemotron else (config.mamba_n_heads, config.mamba_d_head)
    )
    writer.add_ssm_conv_kernel(config.conv_kernel if is_nemotron else config.mamba_d_conv)
    writer.add_ssm_state_size(config.ssm_state_size if is_nemotron else config.mamba_d_state)
    writer.add_ssm_group_count(config.n_groups if is_nemotron else config.mamba_n_groups)
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_time_step_rank(heads)
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
    writer.add_rope_scaling_finetuned(getattr(config, "position_embedding_type", None) == "rope")


def write_nemotron(writer: Any, config: Any) -> None:
    has_experts = "moe" in config.layer_types
    size = config.moe_intermediate_size if has_experts else config.intermediate_size
    sizes = [size if kind in ("mlp", "moe") else 0 for kind in config.layer_types]
    writer.add_feed_forward_length(sizes)
    if has_experts:
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)


def write_gemma3n(writer: Any, config: Any) -> None:
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    normal = torch.distributions.normal.Normal(0, 1)
    scales = [normal.icdf(torch.tensor(share)).item() for share in config.activation_sparsity_pattern]
    writer.add_activation_sparsity_scale(scales)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_gemma4(writer: Any, config: Any) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[slides.index(False)]
    head_dim, heads = full.head_dim, full.num_key_value_heads
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_head_count_kv([config.num_key_value_heads if each else heads for each in slides])
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_used_count(config.top_k_experts)
    if config.use_double_wide_mlp:
        first, size = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
        sizes = [size * (1 + (i >= first)) for i in range(config.num_hidden_layers)]
        writer.add_feed_forward_length(sizes)


def write_tokenizer(writer: Any, vocab_size: int) -> None:
    """Write bytes, a few merges and special tokens; the rest of the vocabulary is unused."""
    alphabet = [chr(b) if 33 <= b < 127 else chr(256 + b) for b in range(33, 127)] + ["Ġ", "Ċ", "th", "the"]
    tokens = [*SPECIAL, *alphabet]
    types = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(alphabet)
    unused = range(len(tokens), vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in unused)])
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED for _ in unused]])
    writer.add_token_merges(["t h", "th e"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def _rope_factors(config: Any) -> dict[str, list[float]]:
    rope = getattr(config, "rope_parameters", {})
    if config.model_type == "gemma4_text":
        count = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        rotating = int(count * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs": [1.0] * rotating + [1e30] * (count - rotating)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}": rope[f"{kind}_factor"] for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, len(scaled) * 2, 2) / (len(scaled) * 2))
    return {"rope_freqs": (plain / scaled).tolist()}


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
    """Yield each tensor's name and value in the file, and a function that takes what the file holds of it."""
    config = model.config
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    weights = model.state_dict()
    for stack in ("altup_projections", "altup_unembed_projections"):  # of Gemma 3n
        members = [tensor for name, tensor in weights.items() if f".{stack}." in name]
        if members:
            yield f"{names.get_name(f'model.{stack}')}.weight", torch.stack(members), lambda stored: None
    for name, tensor in weights.items():
        if "altup_projections" in name or "altup_unembed_projections" in name:
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, view in _parts(name, tensor, config):
            heads = 0
            if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
                heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            offset = 0.0
            if architecture in OFFSET and part.endswith("norm.weight"):
                offset = 0.0 if "linear_attn" in part else 1.0
            found = OWN_NAMES.get(".".join(part.split(".")[3:]), "").format(*part.split(".")[2:3])
            found = found or names.get_name(part, try_suffixes=(".weight", ".bias")) or ""
            assert found, part
            if part.endswith((".mamba.A_log", ".mixer.A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")):
                yield found, _of_mamba(view, part, config), lambda stored: None
                continue
            if "in_proj_qkvz" in part:
                yield from _apart(view, found, config)
                continue
            if architecture == "qwen3next" and part.endswith("A_log"):
                yield found, -view.exp(), lambda stored: None
                continue
            if architecture.startswith("qwen35") and "linear_attn" in part and "norm" not in part:
                yield found, *_tiled(view, part, config)
                continue
            value = _permuted(view, heads) if heads else view + offset

            def take(stored: Tensor, view: Tensor = view, heads: int = heads, offset: float = offset) -> None:
                view.copy_(_unpermuted(stored, heads) if heads else stored - offset)

            yield found, value.contiguous(), take


OWN_NAMES = {  # that the map has not
    "router.scale": "blk.{}.ffn_gate_inp.scale",
    "router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
    "layer_scalar": "blk.{}.layer_output_scale.weight",
    "altup.correct_output_scale": "blk.{}.altup_correct_scale.weight",
}


NEMOTRON = {  # parts of its names in transformers, and as published
    "model.embeddings": "backbone.embeddings",
    "model.norm_f": "backbone.norm_f",
    "model.layers": "backbone.layers",
    "e_score_correction_bias": "e_score_correction.bias",
}


def _mlp_of_granite(config: Any) -> str:
    """Return what stands before the names of its shared expert, which is the only MLP where it has no others."""
    return "mlp.shared_expert." if getattr(config, "num_local_experts", 1) else "mlp."


def _of_mamba(tensor: Tensor, name: str, config: Any) -> Tensor:
    """Return a state-space layer's tensor as in the file."""
    if "norm" in name:
        return tensor.view(config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups, -1)
    return (-tensor.exp() if name.endswith("A_log") else tensor).view(-1, 1)


def _parts(name: str, tensor: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """Return views of a tensor as llama.cpp's converter splits it, by names that its map knows."""
    family = config.model_type
    if family == "nemotron_h":
        for theirs, ours in NEMOTRON.items():
            name = name.replace(theirs, ours)
        if ".mixer.experts." in name:
            return [(name.replace("backbone", "model").replace(".mixer.", ".mlp.") + ".weight", tensor)]
    if name.endswith("sinks"):
        return [(name + ".weight", tensor)]
    if name.endswith("expert_bias"):
        return [(name + ".bias", tensor)]
    if name.endswith("dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), tensor)]
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return [(name, tensor.squeeze(1))]
    name = name.replace("block_sparse_moe.", "mlp.")
    block, _, what = name.rpartition(".experts.")
    if block:
        bias = what.endswith("_bias")
        base, suffix = f"{block}.experts.", ".bias" if bias else ".weight"
        if family == "gpt_oss" and not bias:
            tensor = tensor.mT
        if family == "gemma4_text" or not what.startswith("gate_up"):
            projection = what.removesuffix("_bias")
            return [(f"{base}{projection}{suffix}", tensor)]
        size = tensor.shape[1] // 2
        halves = (tensor[:, ::2], tensor[:, 1::2]) if family == "gpt_oss" else (tensor[:, :size], tensor[:, size:])
        return [(f"{base}gate_proj{suffix}", halves[0]), (f"{base}up_proj{suffix}", halves[1])]
    if "shared_mlp.input_linear" in name:
        first, second = tensor.chunk(2)
        base = name.replace("shared_mlp.input_linear.weight", _mlp_of_granite(config))
        return [(f"{base}gate_proj.weight", first), (f"{base}up_proj.weight", second)]
    replaced = name.replace("shared_mlp.output_linear", f"{_mlp_of_granite(config)}down_proj")
    return [(replaced.replace("router", "gate") if family.startswith("granite") else replaced, tensor)]


def _apart(tensor: Tensor, name: str, config: Any) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
    """Yield queries, keys and values of all heads as one tensor, and the gates as another. In `tensor` they stand
    together for each key head.
    """
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    inner = config.linear_num_value_heads // keys * config.linear_value_head_dim
    indices = torch.arange(len(tensor)).view(keys, -1).split((size, size, inner, inner), 1)
    qkv, z = torch.cat([each.flatten() for each in indices[:3]]), indices[3].flatten()
    for part, rows in (("attn_qkv", qkv), ("attn_gate", z)):

        def take(stored: Tensor, rows: Tensor = rows) -> None:
            tensor.index_copy_(0, rows, stored)

        yield name.replace("ssm_in", part), tensor[rows].contiguous(), take


def _tiled(tensor: Tensor, name: str, config: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return a delta net's tensor as in the file: the first value head of each key head, then the second, and so on."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    count = config.linear_num_value_heads // keys
    first = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    size = 1 if any(each in name for each in ("A_log", "dt_proj", "in_proj_a", "in_proj_b")) else size
    order = torch.arange(keys * count * size).view(keys, count, size).swapaxes(0, 1).flatten()
    order = torch.cat((torch.arange(first), first + order))
    if "out_proj" in name:
        return tensor[:, order].contiguous(), lambda stored: tensor.index_copy_(1, order, stored)
    if "A_log" in name:
        return -tensor[order].exp(), lambda stored: None
    return tensor[order].contiguous(), lambda stored: tensor.index_copy_(0, order, stored)


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
