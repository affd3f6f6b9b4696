"""Small random checkpoints of block drafters, and a reference implementation by the published formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.oracles.drafters import FILE, rms_norm

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "windows": {
        "architectures": ["DFlashDraftModel"], "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
    },
    "own head": {"architectures": ["DFlashDraftModel"], "draft_vocab_size": 90},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"], "selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2,
        "conv_group_size": 16,
    },
    "dspark": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 6},
}  # fmt: skip
HEADS, KV_HEADS, HEAD_DIM, INNER, NUM_LAYERS, BLOCK, THETA, EPS = 4, 2, 16, 96, 2, 5, 10000.0, 1e-6


class BlockReference:
    """A block drafter over the whole text each time."""

    def __init__(self, target: Any, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """`target`: of transformers."""
        self._target, self._config, self._tensors = target, config, tensors
        self._windows = [
            config["sliding_window"] if kind == "sliding_attention" else 0
            for kind in config.get("layer_types", ["full_attention"] * NUM_LAYERS)
        ]

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], num: int) -> list[int]:
        """Return the greedy guesses of what follows."""
        t, from_anchor = self._tensors, "markov_rank" in self._config
        states = self._target.model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        ids = self._config["dflash_config"]["target_layer_ids"]
        context = torch.cat([states[i + 1][0] for i in ids], -1) @ t["fc.weight"].T
        context = rms_norm(context, t["hidden_norm.weight"], EPS)
        length = num + (not from_anchor)
        block = [token_ids[-1]] + [self._config["dflash_config"]["mask_token_id"]] * (length - 1)
        x = t.get("embed_tokens.weight", self._target.model.embed_tokens.weight)[torch.tensor(block)]
        for i in range(NUM_LAYERS):
            x = self._sublayer(i, x, "attention", context)
            x = self._sublayer(i, x, "mlp", context)
        hidden = rms_norm(x, t["norm.weight"], EPS)[length - num :]
        return self._path(hidden, token_ids[-1])

    def _sublayer(self, i: int, x: Tensor, kind: str, context: Tensor) -> Tensor:
        t, root = self._tensors, f"layers.{i}."
        norm = "input_layernorm" if kind == "attention" else "post_attention_layernorm"
        given = rms_norm(x, t[f"{root}{norm}.weight"], EPS)
        factors = None
        if "selector_rank" in self._config:
            factors = given @ t[f"{root}{kind}_conv.kernel_projection.weight"].T
            given = self._conv(given, factors, f"{root}{kind}_conv.base_kernel", 0)
        out = self._attention(i, given, context) if kind == "attention" else self._mlp(root, given)
        if factors is not None:
            out = self._conv(out, factors, f"{root}{kind}_conv.base_kernel", 1)
        return x + out

    def _conv(self, x: Tensor, factors: Tensor, name: str, side: int) -> Tensor:
        """Each channel of each token: the sum over taps of (stored + projected factor) · the token so far before."""
        taps, group = self._config["conv_kernel_size"], self._config["conv_group_size"]
        projected = factors.view(len(x), 2, taps, -1)[:, side]
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for tap in range(min(taps, token + 1)):
                factors_of_token = self._tensors[name][side, tap] + projected[token, tap].repeat_interleave(group)
                out[token] += factors_of_token * x[token - tap]
        return out

    def _attention(self, i: int, x: Tensor, context: Tensor) -> Tensor:
        t, root, start = self._tensors, f"layers.{i}.self_attn.", len(context)
        both = torch.cat((context, x))
        q = (x @ t[root + "q_proj.weight"].T).view(len(x), HEADS, HEAD_DIM).transpose(0, 1)
        k, v = (
            (both @ t[f"{root}{name}_proj.weight"].T).view(len(both), KV_HEADS, HEAD_DIM).transpose(0, 1)
            for name in ("k", "v")
        )
        q, k = rms_norm(q, t[root + "q_norm.weight"], EPS), rms_norm(k, t[root + "k_norm.weight"], EPS)
        positions = torch.arange(len(both))
        q, k = _rotated(q, positions[start:]), _rotated(k, positions)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        scores = q @ k.mT * HEAD_DIM**-0.5
        if window := self._windows[i]:
            distance = (positions[start:, None] - positions).abs()
            scores = scores.masked_fill(distance >= window, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        return out @ t[root + "o_proj.weight"].T

    def _mlp(self, root: str, x: Tensor) -> Tensor:
        gate, up = (x @ self._tensors[f"{root}mlp.{each}_proj.weight"].T for each in ("gate", "up"))
        return torch.nn.functional.silu(gate) * up @ self._tensors[f"{root}mlp.down_proj.weight"].T

    def _path(self, hidden: Tensor, before: int) -> list[int]:
        t, found = self._tensors, list[int]()
        for state in hidden:
            if "lm_head.weight" in t:
                guess = int((t["lm_head.weight"] @ state).argmax())
                before = guess + int(t["d2t"][guess])
            else:
                logits = self._target.lm_head.weight @ state
                if "markov_rank" in self._config:
                    logits = logits + t["markov_head.markov_w2.weight"] @ t["markov_head.markov_w1.weight"][before]
                if "selector_rank" in self._config:
                    best = logits.topk(self._config["selector_top_k"]).indices.tolist()
                    projected = t["candidate_selector.hidden_projection.weight"] @ state
                    path = t["candidate_selector.predecessor_codebook"][before] * projected
                    successors = t["candidate_selector.successor_codebook"]
                    before = max(best, key=lambda each: float(logits[each] + path @ successors[each]))
                else:
                    before = int(logits.argmax())
            found.append(before)
        return found


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [heads, n, D] by position, halves as pairs."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half)
    first, second = x.split(half, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def make_block_drafter(kind: str, folder: Path, target: Any, **changes: Any) -> BlockReference:
    """Save a drafter of a kind for a model of transformers."""
    of, generator = target.config, torch.Generator().manual_seed(8)
    size, vocab = of.hidden_size, of.vocab_size
    config = {
        "model_type": "qwen3", "hidden_size": size, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": NUM_LAYERS, "rms_norm_eps": EPS,
        "rope_theta": THETA, "vocab_size": vocab, "max_position_embeddings": 256, "torch_dtype": "float32",
        "hidden_act": "silu", "block_size": BLOCK, "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 3},
        **KINDS[kind], **changes,
    }  # fmt: skip

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(count: int = size) -> Tensor:
        return 1 + torch.randn(count, generator=generator) * 0.2

    tensors = {"fc.weight": weight(size, 2 * size), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for i in range(NUM_LAYERS):
        root = f"layers.{i}."
        tensors |= {f"{root}{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{root}self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in ("q", "k")}
        tensors |= {
            root + "self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, size),
            root + "self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, size),
            root + "self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, size),
            root + "self_attn.o_proj.weight": weight(size, HEADS * HEAD_DIM),
            root + "mlp.gate_proj.weight": weight(INNER, size), root + "mlp.up_proj.weight": weight(INNER, size),
            root + "mlp.down_proj.weight": weight(size, INNER),
        }  # fmt: skip
        if kind == "dflash2":
            rows = 2 * config["conv_kernel_size"] * size // config["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                tensors[f"{root}{name}.base_kernel"] = torch.randn(2, 2, size, generator=generator) * 0.3
                tensors[f"{root}{name}.kernel_projection.weight"] = weight(rows, size) * 0.3
    if kind == "dflash2":
        names = ("predecessor_codebook", "successor_codebook")
        tensors |= {f"candidate_selector.{name}": weight(vocab, 6) * 3 for name in names}
        tensors["candidate_selector.hidden_projection.weight"] = weight(6, size)
    if kind == "dspark":
        tensors |= {f"markov_head.{name}.weight": weight(vocab, 6) * 3 for name in ("markov_w1", "markov_w2")}
        tensors["confidence_head.proj.weight"] = weight(1, size + 6)
    if kind == "own head":
        chosen = torch.randperm(vocab, generator=generator)[:90].sort().values
        tensors |= {"lm_head.weight": weight(90, size), "d2t": chosen - torch.arange(90)}
        tensors["embed_tokens.weight"] = weight(vocab, size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / FILE)
    return BlockReference(target, config, tensors)
