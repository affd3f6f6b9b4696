"""A tiny random Llama, or a mixture of experts, with a byte-level tokenizer and a chat template, made on the spot."""

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_model(folder: Path, experts: bool = False, num_layers: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"num_hidden_layers": num_layers} | (EXPERTS if experts else {})
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    hidden, inner = 64, 128
    tensors = {"model.embed_tokens.weight": weight(300, hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": torch.ones(hidden),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
            layer + "self_attn.q_proj.weight": weight(hidden, hidden),
            layer + "self_attn.k_proj.weight": weight(hidden // 2, hidden),
            layer + "self_attn.v_proj.weight": weight(hidden // 2, hidden),
            layer + "self_attn.o_proj.weight": weight(hidden, hidden),
        }
        if experts:
            names = [f"{layer}mlp.experts.{i}." for i in range(6)]
            tensors |= {name + f"{part}_proj.weight": weight(48, hidden) for name in names for part in ("gate", "up")}
            tensors |= {name + "down_proj.weight": weight(hidden, 48) for name in names}
            tensors |= {layer + f"self_attn.{part}_norm.weight": torch.ones(16) for part in ("q", "k")}
            tensors[layer + "mlp.gate.weight"] = weight(6, hidden)
        else:
            tensors |= {
                layer + "mlp.gate_proj.weight": weight(inner, hidden),
                layer + "mlp.up_proj.weight": weight(inner, hidden),
                layer + "mlp.down_proj.weight": weight(hidden, inner),
            }
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 40}))
    return folder
