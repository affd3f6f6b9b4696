"""jina-embeddings-v2, whose code comes with the model, against a plain encoder in float64."""

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

HIDDEN, HEADS, SIZE, INNER, LAYERS, VOCAB = 96, 6, 16, 128, 2, 120
SLOPES = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]  # of six heads: four of four, two of eight
CONFIG: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "hidden_act": "gelu",
    "feed_forward_type": "geglu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "position_embedding_type": "alibi",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "dtype": "float32",
}


def make(folder: Path, prefix: str = "", **changes: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "pooler.dense.weight": (HIDDEN, HIDDEN),
        "pooler.dense.bias": (HIDDEN,),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{at}attention.{name}.weight": (HIDDEN, HIDDEN), f"{at}attention.{name}.bias": (HIDDEN,)}
        shapes |= {f"{at}mlp.gated_layers.weight": (2 * INNER, HIDDEN), f"{at}mlp.wo.weight": (HIDDEN, INNER)}
        shapes |= {f"{at}mlp.wo.bias": (HIDDEN,)}
        norms += [f"{at}attention.output.LayerNorm", f"{at}mlp.layernorm"]
    shapes |= {f"{name}.{part}": (HIDDEN,) for name in norms for part in ("weight", "bias")}
    tensors = {
        name: torch.randn(shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5) for name, shape in shapes.items()
    }
    stored = {f"{prefix}{name}": each for name, each in tensors.items()}
    stored |= {"classifier.weight": torch.randn(1, HIDDEN), "classifier.bias": torch.randn(1)} if prefix else {}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return {name: each.double() for name, each in (tensors | stored).items()}


def plain_encoder(w: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Compute the last hidden states [n, hidden] as the published code does."""
    n = len(ids)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs().double()
    bias = -torch.tensor(SLOPES).double()[:, None, None] * distance
    types = w["embeddings.token_type_embeddings.weight"][0]
    x = norm(w["embeddings.word_embeddings.weight"][ids] + types, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, f"{at}attention.self.{name}").view(n, HEADS, SIZE).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        mixed = (q @ k.mT * SIZE**-0.5 + bias).softmax(-1) @ v
        out = linear(mixed.transpose(0, 1).reshape(n, HIDDEN), f"{at}attention.output.dense")
        x = norm(x + out, f"{at}attention.output.LayerNorm")
        gate, up = linear(x, f"{at}mlp.gated_layers").split(INNER, -1)
        x = norm(x + linear(F.gelu(gate) * up, f"{at}mlp.wo"), f"{at}mlp.layernorm")
    return x


PROMPTS = [[(7 * i + k * k) % (VOCAB - 3) + 2 for k in range(n)] for i, n in enumerate((1, 16, 200, 33))]


def start(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **settings)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ranks", [1, 2])
def test_hidden_states_are_those_of_the_plain_encoder(ranks: int, tmp_path: Path) -> None:
    weights = make(tmp_path)
    llm = start(tmp_path, tensor_parallel_size=ranks)
    found = llm.embed(PROMPTS, use_tqdm=False, normalize=False)  # type: ignore[arg-type]
    for prompt, each in zip(PROMPTS, found, strict=True):
        want = plain_encoder(weights, prompt).mean(0).float()
        torch.testing.assert_close(torch.tensor(each.outputs.embedding), want, atol=2e-5, rtol=1e-5)
    llm.close()


def test_scores_of_a_reranker(tmp_path: Path) -> None:
    changes = {"architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    weights = make(tmp_path, "bert.", **changes)
    llm = start(tmp_path)
    for prompt, each in zip(PROMPTS, llm.classify(PROMPTS, use_tqdm=False), strict=True):  # type: ignore[arg-type]
        pooled = F.linear(
            plain_encoder(weights, prompt)[0], weights["pooler.dense.weight"], weights["pooler.dense.bias"]
        )
        want = F.linear(pooled.tanh(), weights["classifier.weight"], weights["classifier.bias"]).sigmoid()
        assert each.outputs.probs == pytest.approx(want.tolist(), abs=1e-5)
    llm.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "absolute"}, "'position_embedding_type' must be alibi"),
        ({"feed_forward_type": "original"}, "'feed_forward_type' must be geglu"),
        ({"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--x.Y"}}, "norms of queries and keys"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)
