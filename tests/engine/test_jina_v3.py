"""jina-embeddings-v3 as published: XLM-RoBERTa with RoPE and an adapter for each task, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.errors import ModelError
from engine.models.families import read_spec
from tests.engine.test_encoders import PROMPTS, close, embedded, reference, start, states

pytest.importorskip("transformers")

TASKS = ["retrieval.query", "text-matching"]
RANK, ALPHA = 4, 3.0
CONFIG: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"],
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "model_type": "xlm-roberta",
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "lora_adaptations": TASKS,
    "lora_alpha": ALPHA,
    "lora_rank": RANK,
}


def factors(name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a matrix's change for all tasks: those of embeddings are multiplied the other way round."""
    rows, columns = value.shape
    if "embeddings" in name:
        return torch.randn(len(TASKS), rows, RANK) * 0.2, torch.randn(len(TASKS), RANK, columns) * 0.2
    return torch.randn(len(TASKS), RANK, columns) * 0.2, torch.randn(len(TASKS), rows, RANK) * 0.2


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, list[Any]]:
    """A folder in the published form, and transformers' model of each task."""
    base, folder = reference(tmp_path / "hf", "JinaEmbeddingsV3"), tmp_path / "published"
    folder.mkdir()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | CONFIG | {"rope_parameters": None}))
    stored, models = {}, []
    plain = load_file(tmp_path / "hf" / "model.safetensors")
    of_tasks: list[dict[str, Tensor]] = [{} for _ in TASKS]
    for name, value in plain.items():
        if not name.endswith(".weight") or value.dim() < 2:
            stored[f"roberta.{name}"] = value
            continue
        a, b = factors(name, value)
        module = f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        stored |= {f"{module}.original": value, f"{module}.0.lora_A": a, f"{module}.0.lora_B": b}
        change = a @ b if "embeddings" in name else b @ a
        for index, weights in enumerate(of_tasks):
            weights[name] = value + change[index] * (ALPHA / RANK)
    save_file(stored, folder / "model.safetensors")
    for task, weights in zip(TASKS, of_tasks, strict=True):
        own = tmp_path / task
        base.save_pretrained(own)
        save_file(plain | weights, own / "model.safetensors", metadata={"format": "pt"})
        models.append(type(base).from_pretrained(own).eval())
    return folder, [base, *models]


def test_embeddings_of_tasks(published: tuple[Path, list[Any]]) -> None:
    folder, models = published
    for task, model in zip((None, *TASKS), models, strict=True):
        llm = start(folder, hf_overrides={"lora_adaptation": task} if task else {})
        for prompt, found in zip(PROMPTS, embedded(llm, PROMPTS), strict=True):
            close(found, states(model, prompt).mean(0))
        llm.close()


def test_unknown_tasks_and_factors_that_do_not_fit(published: tuple[Path, list[Any]]) -> None:
    folder, _ = published
    with pytest.raises(ModelError, match="'lora_adaptation' must be one of"):
        read_spec(folder, {"lora_adaptation": "no task"})
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("Wqkv.parametrizations.weight.0.lora_B"))
    save_file(tensors | {name: tensors[name][:, :3].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="do not fit"):
        start(folder)
