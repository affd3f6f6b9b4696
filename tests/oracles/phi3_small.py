"""Phi-3-small as a plain decoder: transformers has none built in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

HEADS, KV_HEADS, SIZE, INNER, VOCAB = 4, 2, 16, 48, 96
CONFIG: dict[str, Any] = {
    "architectures": ["Phi3SmallForCausalLM"],
    "model_type": "phi3small",
    "auto_map": {"AutoConfig": "configuration_phi3_small.Phi3SmallConfig"},
    "hidden_size": HEADS * SIZE,
    "ff_intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "hidden_act": "gegelu",
    "gegelu_limit": 1.5,
    "max_position_embeddings": 512,
    "dense_attention_every_n_layers": 2,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 3,
    "rope_embedding_base": 1000000,
    "mup_use_scaling": True,
    "mup_attn_multiplier": 2.0,
    "mup_embedding_multiplier": 10.0,
    "mup_width_multiplier": 4.0,
    "layer_norm_epsilon": 1e-5,
}


def make(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a random checkpoint, and return its configuration."""
    config = CONFIG | changes
    torch.manual_seed(0)
    hidden, tensors = HEADS * SIZE, {"model.embed_tokens.weight": torch.randn(VOCAB, HEADS * SIZE) / 10}
    shapes = {
        "self_attn.query_key_value": ((HEADS + 2 * KV_HEADS) * SIZE, hidden),
        "self_attn.dense": (hidden, hidden),
        "mlp.up_proj": (2 * INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape) * 2 / math.sqrt(shape[1])
            tensors[f"model.layers.{layer}.{name}.bias"] = torch.randn(shape[0]) / 2
    norms = [
        f"layers.{i}.{n}_layernorm" for i in range(config["num_hidden_layers"]) for n in ("input", "post_attention")
    ]
    for name in (*norms, "final_layernorm"):
        tensors[f"model.{name}.weight"] = torch.rand(hidden) + 0.5
        tensors[f"model.{name}.bias"] = torch.randn(hidden) / 5
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config


def sees(config: dict[str, Any], n: int) -> Tensor:
    """Return which keys the heads' queries see in a sparse layer: [H, n, n]."""
    block, local, stride = (config[f"blocksparse_{name}"] for name in ("block_size", "num_local_blocks", "vert_stride"))
    count = -(-n // block)
    found = torch.zeros(HEADS, count, count, dtype=torch.bool)
    for head in range(HEADS):
        shift = 1 if config.get("blocksparse_homo_head_pattern") else head + 1
        for own in range(count):
            for seen in range(own + 1):
                found[head, own, seen] = own - seen < local or (seen + shift) % stride == 0
    tokens = found.repeat_interleave(block, 1).repeat_interleave(block, 2)
    return tokens[:, :n, :n] & torch.ones(n, n).tril().bool()


def turned(x: Tensor, theta: float, scaling: dict[str, Any] | None, length: int) -> Tensor:
    """Rotate the halves of heads x [n, H, D]."""
    frequencies = 1 / theta ** (torch.arange(0, SIZE, 2).double() / SIZE)
    if scaling is not None:
        is_long = length > scaling["original_max_position_embeddings"]
        frequencies /= torch.tensor(scaling["long_factor" if is_long else "short_factor"]).double()
    angles = torch.arange(len(x)).double()[:, None] * frequencies
    cos, sin = (f(angles)[:, None] * (scaling or {}).get("long_mscale", 1.0) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain_decoder(folder: Path, ids: list[int]) -> Tensor:
    """Compute the logits [n, vocab] of a text as the published code says, in float64."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    n, eps = len(ids), config["layer_norm_epsilon"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    sparse, causal = sees(config, n), torch.ones(n, n).tril().bool()
    scale = config["mup_attn_multiplier"] / SIZE if config["mup_use_scaling"] else SIZE**-0.5
    x = w["model.embed_tokens.weight"][ids] * config["mup_embedding_multiplier"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        qkv = linear(norm(x, f"{at}.input_layernorm"), f"{at}.self_attn.query_key_value")
        qkv = qkv.view(n, KV_HEADS, HEADS // KV_HEADS + 2, SIZE)
        q, k, v = qkv[:, :, :-2].reshape(n, HEADS, SIZE), qkv[:, :, -2], qkv[:, :, -1]
        rope = config["rope_embedding_base"], config.get("rope_scaling"), config["max_position_embeddings"]
        q, k = turned(q, *rope), turned(k, *rope)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        is_dense = (layer + 1) % config["dense_attention_every_n_layers"] == 0
        scores = scores.masked_fill(~(causal if is_dense else sparse), -math.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        x = x + linear(out, f"{at}.self_attn.dense")
        inner = linear(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.up_proj")
        gate, up = inner[:, ::2].clamp(max=config["gegelu_limit"]), inner[:, 1::2]
        up = up.clamp(-config["gegelu_limit"], config["gegelu_limit"])
        x = x + linear(gate * torch.sigmoid(1.702 * gate) * (up + 1), f"{at}.mlp.down_proj")
    return norm(x, "model.final_layernorm") @ w["model.embed_tokens.weight"].T / config["mup_width_multiplier"]
