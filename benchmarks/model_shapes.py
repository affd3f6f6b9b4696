"""Configurations of well-known models: random weights need no more than a config.json, so nothing is downloaded.

For servers there is a made-up tokenizer of the right size beside it.

    python -m benchmarks.model_shapes qwen3-0.6b out/models     # prints the folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.hybrid_shapes import HYBRID_SHAPES
from benchmarks.vision_shapes import VISION_SHAPES, add_processor, special_tokens
from engine.errors import ConfigError
from engine.flags import nearest

_COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0}
_COMMON |= {"attention_bias": False, "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def _llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
        **_COMMON,
        **more,
    }


def _llama3(
    *shape: int, tied: bool, factor: float, max_position_embeddings: int = 131072, **more: Any
) -> dict[str, Any]:
    scaling = {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    return _llama(
        *shape,
        vocab_size=128256,
        head_dim=shape[1] // shape[3],
        rope_theta=500000.0,
        rope_scaling=scaling | {"original_max_position_embeddings": 8192},
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        bos_token_id=128000,
        eos_token_id=128001,
        **more,
    )


def _qwen3(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, *, tied: bool, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        **_COMMON,
        **more,
    }


_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}
    left_out = ("self_attn", "mlp.router")
    return {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 128,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": scaling | {"original_max_position_embeddings": 4096},
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": 199998,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *(f"model.layers.*.{name}" for name in left_out), "model.embed_tokens", "lm_head",
            ],
        },
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "llama-100m": _llama(
        12,
        768,
        2048,
        12,
        4,
        vocab_size=16384,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8, tied=False),
    "qwen3-30b-a3b": _qwen3(48, 2048, 6144, 32, 4, tied=False, **_MOE),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, 8, tied=True, factor=32.0),
    "llama-3.1-8b": _llama3(32, 4096, 14336, 32, 8, tied=False, factor=8.0),
}

SHAPES["glm-4.7-flash"] = {
    **_COMMON,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 47,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 154880,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "rope_interleave": True,
    "max_position_embeddings": 202752,
    "tie_word_embeddings": False,
    "bos_token_id": 151329,
    "eos_token_id": 154820,
}
# Drafters of Qwen3-8B, see docs/drafts.md: an EAGLE-3 head, and a block drafter.
SHAPES["qwen3-8b-eagle3"] = _llama(
    1, 4096, 12288, 32, 8, head_dim=128, vocab_size=151936, rope_theta=1000000.0, max_position_embeddings=40960,
    tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645, draft_vocab_size=32000,
    eagle_aux_hidden_state_layer_ids=[2, 18, 33],
) | {"architectures": ["LlamaForCausalLMEagle3"]}  # fmt: skip
SHAPES["qwen3-8b-dflash"] = SHAPES["qwen3-8b"] | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 8,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}
_FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# As published: an engine that quantised the routers, too, would look for scales that no checkpoint has.
_ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(SHAPES["qwen3-30b-a3b"]["num_hidden_layers"])]
SHAPES["qwen3-30b-a3b-fp8-block"] = SHAPES["qwen3-30b-a3b"] | {
    "quantization_config": _FP8_BLOCK | {"modules_to_not_convert": ["lm_head", *_ROUTERS]}
}
SHAPES["bge-large"] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "vocab_size": 30522,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
    "position_embedding_type": "absolute",
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
SHAPES["phi-3-small"] = {
    **_COMMON,
    "architectures": ["Phi3SmallForCausalLM"],
    "model_type": "phi3small",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "ff_intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "gegelu",
    "gegelu_limit": 20.0,
    "dense_attention_every_n_layers": 2,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
    "blocksparse_homo_head_pattern": False,
    "vocab_size": 100352,
    "layer_norm_epsilon": 1e-5,
    "rope_embedding_base": 1000000,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
}
SHAPES["gemma-3-12b"] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 48,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    **_COMMON,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}
SHAPES["gemma-4-26b-a4b"] = {
    **_COMMON,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 30,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "enable_moe_block": True,
    "moe_intermediate_size": 704,
    "num_experts": 128,
    "top_k_experts": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262144,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}


def _q4_k_m(layers: int) -> dict[str, Any]:
    """Types of llama.cpp's mixture Q4_K_M, by module."""
    names = {"Q4_K": list[str](), "Q6_K": ["lm_head"]}
    for i in range(layers):
        more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"):
            names["Q4_K"].append(f"model.layers.{i}.{name}")
        for name in ("self_attn.v_proj", "mlp.down_proj"):
            names["Q6_K" if more else "Q4_K"].append(f"model.layers.{i}.{name}")
    return {"quant_method": "gguf", "types": names}


SHAPES |= HYBRID_SHAPES | VISION_SHAPES
SHAPES |= {
    f"llama-3.1-8b-{name}": SHAPES["llama-3.1-8b"] | {"quantization_config": quantization}
    for name, quantization in {
        "fp8-block": _FP8_BLOCK,
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        "q4_k_m": _q4_k_m(32),
    }.items()
}


def model_folder(name: str, root: Path) -> Path:
    """The folder of a model: `name` itself if it is one, else `root/name`, written for a shape of that name."""
    given = Path(name).expanduser()
    if (given / "config.json").is_file():
        return given.resolve()
    if name not in SHAPES:
        raise ConfigError(
            f"model {name!r} is neither a folder with a config.json nor one of "
            f"{', '.join(SHAPES)}{nearest(name, SHAPES)}"
        )
    folder = root.resolve() / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1) + "\n", encoding="utf-8")
    return folder


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the model's number of tokens: all bytes, then made-up words; none where there is one.

    It turns token ids into text as fast as a real one does, and texts into one token for each byte.
    """
    if (folder / "tokenizer.json").exists():
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config", config)
    words = [*_byte_alphabet(), *("Ġ" + _word(i) for i in range(text_config["vocab_size"] - 256))]
    ends = {"<|begin|>": "bos_token_id", "<|end|>": "eos_token_id"}  # encoders may have none
    special = {text: text_config[name] for text, name in ends.items() if text_config.get(name) is not None}
    if "vision_config" in config:
        special |= special_tokens(config)
        add_processor(folder)
    for text, token_id in special.items():
        words[token_id] = text
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": token_id, "content": text, **flags} for text, token_id in special.items()],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }
    named = {ends[text].removesuffix("_id"): text for text in special if text in ends}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level tokenizers; all but the printable ones are shifted."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def _word(number: int) -> str:
    """A different pronounceable word for each number."""
    syllables: list[str] = []
    while number or not syllables:
        number, rest = divmod(number, 105)
        syllables.append("bcdfghjklmnprstvwxyzq"[rest // 5] + "aeiou"[rest % 5])
    return "".join(syllables)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m benchmarks.model_shapes NAME FOLDER   (names: {', '.join(SHAPES)})")
    print(model_folder(sys.argv[1], Path(sys.argv[2])))
