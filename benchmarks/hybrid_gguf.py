"""Settings and tensors of hybrid models as llama.cpp reads them, see `benchmarks.gguf_files`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Config = dict[str, Any]
Shape = tuple[int, ...]

HYBRIDS = {"Lfm2ForCausalLM": "lfm2", "Qwen3_5ForCausalLM": "qwen35"}


def write_settings(writer: Any, config: Config) -> None:
    """Write the settings of recurrent layers."""
    if config["architectures"][0] == "Lfm2ForCausalLM":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        return
    value_heads = config["linear_num_value_heads"]
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(value_heads * config["linear_value_head_dim"])


def plain_config(config: Config) -> Config:
    """Return the configuration with the fields that other models have, too."""
    if config["architectures"][0] == "Lfm2ForCausalLM":
        inner, multiple = 2 * config["block_ff_dim"] // 3, config["block_multiple_of"]
        counts = [config["num_key_value_heads"] if each != "conv" else 0 for each in config["layer_types"]]
        plain = {"intermediate_size": -(-inner // multiple) * multiple, "rms_norm_eps": config["norm_eps"]}
        return config | plain | {"kv_counts": counts, "tie_word_embeddings": config["tie_embedding"]}
    return config | {"rope_theta": config["rope_parameters"]["rope_theta"], "rotary_dim": config["head_dim"] // 4}


def layer_shapes(config: Config, index: int, head_dim: int) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of a layer, names with their last part. config: as `plain_config` returns it."""
    hidden, inner, is_lfm2 = config["hidden_size"], config["intermediate_size"], "conv_L_cache" in config
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "attn_norm.weight", (hidden,)
    yield "ffn_norm.weight" if is_lfm2 else "post_attention_norm.weight", (hidden,)
    yield from (("ffn_gate.weight", (inner, hidden)), ("ffn_up.weight", (inner, hidden)))
    yield "ffn_down.weight", (hidden, inner)
    if config["layer_types"][index] == "full_attention":
        yield "attn_q.weight", (query if is_lfm2 else 2 * query, hidden)
        yield from (("attn_k.weight", (kv, hidden)), ("attn_v.weight", (kv, hidden)))
        yield "attn_output.weight", (hidden, query)
        yield from (("attn_q_norm.weight", (head_dim,)), ("attn_k_norm.weight", (head_dim,)))
    elif is_lfm2:
        yield "shortconv.conv.weight", (hidden, config["conv_L_cache"])
        yield "shortconv.in_proj.weight", (3 * hidden, hidden)
        yield "shortconv.out_proj.weight", (hidden, hidden)
    else:
        yield from _delta_net(config, hidden)


def _delta_net(config: Config, hidden: int) -> Iterator[tuple[str, Shape]]:
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + heads * size
    yield "attn_qkv.weight", (channels, hidden)
    yield "attn_gate.weight", (heads * size, hidden)
    yield "ssm_conv1d.weight", (channels, config["linear_conv_kernel_dim"])
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads,)
    yield from (("ssm_beta.weight", (heads, hidden)), ("ssm_alpha.weight", (heads, hidden)))
    yield "ssm_norm.weight", (size,)
    yield "ssm_out.weight", (hidden, heads * size)
