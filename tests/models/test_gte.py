"""gte's encoders, whose code comes with the model, against a plain one in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from engine import LLM
from engine.models.errors import ModelError
from engine.models.families import read_spec

HIDDEN, HEADS, SIZE, INNER, LAYERS, VOCAB = 64, 4, 16, 96, 2, 120
CONFIG: dict[str, Any] = {
    "architectures": ["NewModel"],
    "model_type": "new",
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "hidden_act": "gelu",
    "max_position_embeddings": 256,
    "type_vocab_size": 1,
    "position_embedding_type": "rope",
    "rope_theta": 20000,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "layer_norm_eps": 1e-12,
    "pack_qkv": True,
    "pad_token_id": 1,
    "dtype": "float32",
}


def make(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        shapes |= {
            f"{at}attention.qkv_proj.weight": (3 * HIDDEN, HIDDEN),
            f"{at}attention.qkv_proj.bias": (3 * HIDDEN,),
        }
        shapes |= {f"{at}attention.o_proj.weight": (HIDDEN, HIDDEN), f"{at}attention.o_proj.bias": (HIDDEN,)}
        shapes |= {f"{at}mlp.up_gate_proj.weight": (2 * INNER, HIDDEN)}
        shapes |= {f"{at}mlp.down_proj.weight": (HIDDEN, INNER), f"{at}mlp.down_proj.bias": (HIDDEN,)}
        norms += [f"{at}attn_ln", f"{at}mlp_ln"]
    shapes |= {f"{name}.{part}": (HIDDEN,) for name in norms for part in ("weight", "bias")}
    tensors = {
        name: torch.randn(shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {name: tensor.double() for name, tensor in tensors.items()}


def plain_encoder(w: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Compute the last hidden states [n, hidden] as the published code says."""
    n, factor = len(ids), CONFIG["rope_scaling"]["factor"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    base = CONFIG["rope_theta"] * factor
    frequencies = 1 / base ** (torch.arange(0, SIZE, 2).double() / SIZE) / factor ** (2 / SIZE)
    angles = torch.cat([torch.arange(n).double()[:, None] * frequencies] * 2, 1)[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    x = norm(
        w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0],
        "embeddings.LayerNorm",
    )
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        qkv = F.linear(x, w[f"{at}attention.qkv_proj.weight"], w[f"{at}attention.qkv_proj.bias"])
        q, k, v = (part.view(n, HEADS, SIZE) for part in qkv.split(HIDDEN, -1))
        scores = torch.einsum("qhd,khd->hqk", turned(q), turned(k)) * SIZE**-0.5
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, HIDDEN)
        x = norm(x + F.linear(out, w[f"{at}attention.o_proj.weight"], w[f"{at}attention.o_proj.bias"]), f"{at}attn_ln")
        up, gate = F.linear(x, w[f"{at}mlp.up_gate_proj.weight"]).split(INNER, -1)
        x = norm(
            x + F.linear(F.gelu(gate) * up, w[f"{at}mlp.down_proj.weight"], w[f"{at}mlp.down_proj.bias"]), f"{at}mlp_ln"
        )
    return x


def test_hidden_states_are_those_of_the_plain_encoder(tmp_path: Path) -> None:
    weights = make(tmp_path)
    prompts = [[(7 * i + k * k) % (VOCAB - 3) + 2 for k in range(n)] for i, n in enumerate((1, 16, 200, 33))]
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True)
    for pooling in ("cls", "last"):
        for prompt, found in zip(
            prompts, llm.embed(prompts, use_tqdm=False, pooling=pooling, normalize=False), strict=True
        ):  # type: ignore[call-arg,arg-type]
            want = plain_encoder(weights, prompt)[0 if pooling == "cls" else -1].float()
            torch.testing.assert_close(torch.tensor(found.outputs.embedding), want, atol=2e-5, rtol=1e-5)
    llm.close()


@pytest.mark.parametrize(
    "changes",
    [{"position_embedding_type": "absolute"}, {"logn_attention_scale": True}, {"rope_scaling": {"type": "dynamic"}}],
)
def test_what_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ModelError, match=next(iter(changes))):
        read_spec(tmp_path)
