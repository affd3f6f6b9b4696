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
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
PERMUTED = ("llama", "granite", "granitemoe", "smollm3")
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"

Kind = Callable[[str], str]  # name in the GGUF file → type of a matrix


def write_gguf(model: Any, path: Path, kind: Kind = lambda name: "F32", tokenizer: bool = False) -> Path:
    """Write `model` with its matrices in the types that `kind` says; then its own weights are what the file holds."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
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
    return tensor.dim() > 1 and not any(part in name for part in ("norm", "_inp", "conv.conv", "conv1d"))


def write_settings(writer: Any, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    if architecture.startswith("qwen35"):
        writer.add_rope_dimension_sections([3, 3, 2, 0])
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
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    rope = config.rope_parameters
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
        writer.add_expert_used_count(config.num_experts_per_tok)
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
    rope = config.rope_parameters
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
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, view in _parts(name, tensor, config.model_type):
            heads = 0
            if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
                heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            offset = 0.0
            if architecture.startswith(("gemma", "qwen35")) and part.endswith("norm.weight"):
                offset = 0.0 if "linear_attn" in part else 1.0
            found = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert found is not None, part
            if architecture.startswith("qwen35") and "linear_attn" in part and "norm" not in part:
                yield found, *_tiled(view, part, config)
                continue
            value = _permuted(view, heads) if heads else view + offset

            def take(stored: Tensor, view: Tensor = view, heads: int = heads, offset: float = offset) -> None:
                view.copy_(_unpermuted(stored, heads) if heads else stored - offset)

            yield found, value.contiguous(), take


def _parts(name: str, tensor: Tensor, family: str) -> list[tuple[str, Tensor]]:
    """Return views of a tensor as llama.cpp's converter splits it, by names that its map knows."""
    if name.endswith("sinks"):
        return [(name + ".weight", tensor)]
    if name.endswith("expert_bias"):
        return [(name + ".bias", tensor)]
    if name.endswith("dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), tensor)]
    if name.endswith(("conv.conv.weight", "linear_attn.conv1d.weight")):
        return [(name, tensor.squeeze(1))]
    name = name.replace("block_sparse_moe.", "mlp.")
    block, _, what = name.rpartition(".experts.")
    if block:
        bias = what.endswith("_bias")
        base, suffix = f"{block}.experts.", ".bias" if bias else ".weight"
        if family == "gpt_oss" and not bias:
            tensor = tensor.mT
        if not what.startswith("gate_up"):
            return [(f"{base}down_proj{suffix}", tensor)]
        size = tensor.shape[1] // 2
        halves = (tensor[:, ::2], tensor[:, 1::2]) if family == "gpt_oss" else (tensor[:, :size], tensor[:, size:])
        return [(f"{base}gate_proj{suffix}", halves[0]), (f"{base}up_proj{suffix}", halves[1])]
    if "shared_mlp.input_linear" in name:
        first, second = tensor.chunk(2)
        base = name.replace("shared_mlp.input_linear.weight", "mlp.shared_expert.")
        return [(f"{base}gate_proj.weight", first), (f"{base}up_proj.weight", second)]
    replaced = name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")
    return [(replaced.replace("router", "gate") if family.startswith("granite") else replaced, tensor)]


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
