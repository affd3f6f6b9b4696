"""Small random checkpoints with a prediction layer or a draft head, and reference implementations of these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracles.families import SHAPE, make_checkpoint

QWEN_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
LAYER_NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
FILE = "model.safetensors"


def causal(num_tokens: int) -> Tensor:
    """Return a mask [1, 1, T, T] to add to scores."""
    return torch.full((1, 1, num_tokens, num_tokens), torch.finfo(torch.float32).min).triu(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class MTPReference:
    """A prediction layer, run for each token again, over the whole text each time."""

    def __init__(self, target: Any, layer: Any, tensors: dict[str, Tensor], offset: float) -> None:
        """`target`, `layer`: transformers' modules. `tensors`: by `LAYER_NAMES`. `offset`: of weights of norms."""
        self.target, self._layer, self._offset = target, layer, offset
        self._tensors, self._body = tensors, target.model
        self._eps = target.config.rms_norm_eps

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._tensors[name] + self._offset, self._eps)

    def _for_rope(self, positions: Tensor) -> Tensor:
        """Return positions [1, T] as the rotary embedding reads them: Qwen3.5's also has rows and columns of images."""
        is_of_images = type(self._body.rotary_emb).__name__.startswith("Qwen3_5")
        return positions.expand(3, 1, -1) if is_of_images else positions

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], num: int) -> list[int]:
        """Return the greedy guesses of what follows."""
        ids = torch.tensor([list(token_ids)])
        hidden = self._body(ids[:, :-1], use_cache=False).last_hidden_state
        following, found = ids[:, 1:], list[int]()
        for _ in range(num):
            both = (self._norm("enorm", self._body.embed_tokens(following)), self._norm("hnorm", hidden))
            x = torch.cat(both, -1) @ self._tensors["eh_proj"].T
            positions = torch.arange(x.shape[1]).unsqueeze(0)
            out = self._layer(
                x, attention_mask=causal(x.shape[1]), position_ids=positions, past_key_values=None,
                position_embeddings=self._body.rotary_emb(x, self._for_rope(positions)),
            )  # fmt: skip
            out = self._norm("norm", out[0] if isinstance(out, tuple) else out)[:, -1:]
            found.append(int(self.target.lm_head(out)[0, -1].argmax()))
            hidden = torch.cat((hidden, out), 1)
            following = torch.cat((following, torch.tensor([[found[-1]]])), 1)
        return found


def make_mtp_checkpoint(name: str, folder: Path) -> MTPReference:
    """Save a model of a case whose checkpoint has a prediction layer: the case's, with a layer more."""
    is_qwen, shape = name.startswith("qwen"), dict[str, Any]()
    if is_qwen:
        shape = {"layer_types": ["linear_attention", "full_attention", "full_attention"], "num_hidden_layers": 3}
    else:
        shape = {"num_hidden_layers": SHAPE["num_hidden_layers"] + 1}
    whole = make_checkpoint(name, folder, shape)
    count, size = shape["num_hidden_layers"] - 1, whole.config.hidden_size
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    for field in ("layer_types", "mlp_layer_types"):
        if config.get(field) is not None:
            config[field] = config[field][:count]
    (folder / "config.json").write_text(json.dumps(config))
    offset, names, root = (1.0, QWEN_NAMES, "mtp.") if is_qwen else (0.0, LAYER_NAMES, f"model.layers.{count}.")
    old, new = f"model.layers.{count}.", "mtp.layers.0." if is_qwen else f"model.layers.{count}."
    own = {key: torch.randn(size) * 0.2 + 1 - offset for key in names}
    own["eh_proj"] = torch.randn(size, 2 * size) * (2 * size) ** -0.5
    tensors = load_file(folder / FILE)
    tensors = {new + each.removeprefix(old) if each.startswith(old) else each: t for each, t in tensors.items()}
    tensors |= {root + names[key]: value for key, value in own.items()}
    if not is_qwen:  # copies that published checkpoints hold
        tensors |= {root + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        tensors |= {root + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
    tensors |= {each + ".weight": tensors.pop(each) for each in [root + value for value in names.values()]}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    layer = whole.model.layers[count]
    whole.model.layers = whole.model.layers[:count]
    whole.config.num_hidden_layers = count
    return MTPReference(whole, layer, own, offset)


class Eagle3Reference:
    """An EAGLE-3 head over the whole text each time."""

    def __init__(self, target: Any, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._target, self._config, self._tensors = target, config, tensors
        self._layers: list[int] = config["eagle_aux_hidden_state_layer_ids"]

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], num: int) -> list[int]:
        """Return the greedy guesses of what follows."""
        t, config = self._tensors, self._config
        ids = torch.tensor([list(token_ids)])
        x = torch.cat(self._states(ids[:, :-1]), -1)
        if config.get("norm_before_fc"):
            x = rms_norm(x, t["input_norm.weight"], config["rms_norm_eps"])
        hidden, following, found = x @ t["fc.weight"].T, ids[:, 1:], list[int]()
        table = t.get("embed_tokens.weight", self._target.model.embed_tokens.weight)
        for _ in range(num):
            out = self._layer(table[following], hidden)[:, -1:]
            normed = rms_norm(out, t["norm.weight"], config["rms_norm_eps"])
            guess = int((normed[0, -1] @ t["lm_head.weight"].T).argmax())
            found.append(guess + (int(t["d2t"][guess]) if "d2t" in t else 0))
            hidden = torch.cat((hidden, normed if config.get("norm_output") else out), 1)
            following = torch.cat((following, torch.tensor([[found[-1]]])), 1)
        return found

    def _states(self, ids: Tensor) -> list[Tensor]:
        """Return the residual stream before each of the layers that the head reads, [1, T, H]."""
        found: dict[int, Tensor] = {}

        def keep(index: int, result: Any) -> None:
            found[index] = result[0] if isinstance(result, tuple) else result

        layers = self._target.model.layers
        hooks = [
            layer.register_forward_hook(lambda _, __, result, i=i: keep(i + 1, result))
            for i, layer in enumerate(layers)
        ]
        self._target.model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return [found[layer] for layer in self._layers]

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the residual stream, [1, T, H]."""
        t, config, n = self._tensors, self._config, embedded.shape[1]
        eps, heads, kv_heads = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]

        def weight(name: str) -> Tensor:
            return t[f"midlayer.{name}.weight"]

        normed = rms_norm(hidden, weight("hidden_norm"), eps)
        residual = normed if config.get("norm_before_residual") else hidden
        x = torch.cat((rms_norm(embedded, weight("input_layernorm"), eps), normed), -1)[0]
        q, k, v = (
            (x @ weight(f"self_attn.{each}_proj").T).view(n, count, -1).transpose(0, 1)
            for each, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = (_rotate(each, config["rope_theta"]) for each in (q, k))
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5 + causal(n)[0]
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
        residual = residual + out @ weight("self_attn.o_proj").T
        x = rms_norm(residual, weight("post_attention_layernorm"), eps)
        gate, up = (x @ weight(f"mlp.{each}_proj").T for each in ("gate", "up"))
        return residual + torch.nn.functional.silu(gate) * up @ weight("mlp.down_proj").T


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate [heads, T, D] by position, halves as pairs."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def make_eagle3(folder: Path, target: Any, vocab: int = 0, **changes: Any) -> Eagle3Reference:
    """Save a head for a model of transformers. vocab: tokens that it can guess; 0: all."""
    of, generator = target.config, torch.Generator().manual_seed(8)
    size, inner, head = of.hidden_size, 96, 16
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
        "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": of.vocab_size,
        "draft_vocab_size": vocab or of.vocab_size, "max_position_embeddings": 256, "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **changes,
    }  # fmt: skip

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(count: int = size) -> Tensor:
        return 1 + torch.randn(count, generator=generator) * 0.2

    tensors = {
        "fc.weight": weight(size, 3 * size), "norm.weight": norm(),
        "lm_head.weight": weight(vocab or of.vocab_size, size),
        "midlayer.hidden_norm.weight": norm(), "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": weight(4 * head, 2 * size),
        "midlayer.self_attn.k_proj.weight": weight(2 * head, 2 * size),
        "midlayer.self_attn.v_proj.weight": weight(2 * head, 2 * size),
        "midlayer.self_attn.o_proj.weight": weight(size, 4 * head),
        "midlayer.mlp.gate_proj.weight": weight(inner, size), "midlayer.mlp.up_proj.weight": weight(inner, size),
        "midlayer.mlp.down_proj.weight": weight(size, inner),
    }  # fmt: skip
    if vocab:
        chosen = torch.randperm(of.vocab_size, generator=generator)[:vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(vocab)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = tensors | ({"t2d": torch.ones(of.vocab_size, dtype=torch.bool)} if vocab else {})
    save_file(stored, folder / FILE)
    return Eagle3Reference(target, config, tensors)
