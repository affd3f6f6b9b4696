"""The demo model for training: a Qwen3-shaped transformer, and its folder in the Hugging Face format.

ids [B, T] → embed → 7 × (x + attention(norm(x)); x + mlp(norm(x))) → norm → logits [B, T, vocab]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 7
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    eps: float = 1e-6


TINY = Shape(hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] turned by its position; cos and sin [N, 1, D] in float32."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


# The two halves of a layer, on either side of attention. They see tokens, not sequences, so that batches of every
# length have the same shapes and each half is compiled once. Weights are float32; products are made in x's dtype.


def project(
    x: Tensor,
    norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, hidden] → query, key and value [N, heads, D], with keys and values repeated for their query heads."""
    num_tokens, head_dim = x.shape[0], q_norm.shape[0]
    group = q.shape[0] // k.shape[0]
    x = rms_norm(x, norm, eps)
    query, key, value = (F.linear(x, weight.to(x.dtype)).view(num_tokens, -1, head_dim) for weight in (q, k, v))
    query = rotate(rms_norm(query, q_norm, eps), cos, sin)
    key = rotate(rms_norm(key, k_norm, eps), cos, sin)
    return query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)


def finish(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """x [N, hidden] and what attention has found [N, heads * D] → the layer's output [N, hidden]."""
    x = x + F.linear(attended, o.to(x.dtype))
    normed = rms_norm(x, norm, eps)
    inner = F.silu(F.linear(normed, gate.to(x.dtype))) * F.linear(normed, up.to(x.dtype))
    return x + F.linear(inner, down.to(x.dtype))


LAYER_WEIGHTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class Model(nn.Module):
    """Its weights, by their names in Qwen3ForCausalLM; `dtype` is that of the activations."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.project, self.finish = project, finish
        hidden, inner = shape.hidden_size, shape.intermediate_size
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        weights = {"model.embed_tokens.weight": nn.Parameter(torch.ones(shape.vocab_size, hidden))}
        for layer in range(shape.num_layers):
            sizes = (
                (hidden,), (query, hidden), (key, hidden), (key, hidden), (shape.head_dim,), (shape.head_dim,),
                (hidden, query), (hidden,), (inner, hidden), (inner, hidden), (hidden, inner),
            )  # fmt: skip
            for name, size in zip(LAYER_WEIGHTS, sizes, strict=True):
                weights[f"model.layers.{layer}.{name}.weight"] = nn.Parameter(torch.ones(size))
        weights["model.norm.weight"] = nn.Parameter(torch.ones(hidden))
        generator = torch.Generator().manual_seed(seed)
        for name, weight in weights.items():
            if weight.ndim == 2:
                std = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= (2 * shape.num_layers) ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)
        # A ParameterDict takes no dots in its keys.
        self.weights = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in weights.items()})
        self.to(device)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions, device=device).float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()  # [max_positions, head_dim]

    def weight(self, name: str) -> nn.Parameter:
        weight: nn.Parameter = self.weights[f"model.{name}.weight".replace(".", "/")]
        return weight

    def named_weights(self) -> dict[str, nn.Parameter]:
        return {name.replace("/", "."): weight for name, weight in self.weights.items()}

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] → hidden [B * T, hidden], normalised."""
        batch, length = ids.shape
        cos, sin = (table[:length].repeat(batch, 1).unsqueeze(1) for table in (self.cos, self.sin))
        eps = self.shape.eps
        x = F.embedding(ids.reshape(-1), self.weight("embed_tokens")).to(self.dtype)
        for layer in range(self.shape.num_layers):
            norm, q, k, v, q_norm, k_norm, o, mlp_norm, gate, up, down = (
                self.weight(f"layers.{layer}.{name}") for name in LAYER_WEIGHTS
            )
            heads = self.project(x, norm, q, k, v, q_norm, k_norm, cos, sin, eps)
            query, key, value = (part.view(batch, length, -1, part.shape[-1]).transpose(1, 2) for part in heads)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = self.finish(x, attended.transpose(1, 2).reshape(batch * length, -1), o, mlp_norm, gate, up, down, eps)
        return rms_norm(x, self.weight("norm"), eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] → [N, vocab] in float32."""
        return F.linear(hidden, self.weight("embed_tokens").to(hidden.dtype)).float()

    def compile_halves(self) -> None:
        self.project = torch.compile(project, dynamic=False)
        self.finish = torch.compile(finish, dynamic=False)

    @torch.no_grad()
    def round_to_bfloat16(self) -> None:
        for weight in self.parameters():
            weight.copy_(weight.to(torch.bfloat16))


def save(model: Model, folder: Path) -> None:
    """Writes model.safetensors (bfloat16), config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in model.named_weights().items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    shape = model.shape
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_layers,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    generation = {
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.95,
        "bos_token_id": None,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)


@torch.no_grad()
def load(model: Model, folder: Path) -> None:
    """Gives the model the weights that `save` wrote."""
    for name, value in load_file(folder / "model.safetensors").items():
        model.named_weights()[name].copy_(value)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
