"""Gemma with images: its text model. Gemma 4's configuration, as published and as transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.shard import Stage
from tests.oracles.families import CASES, MAX_ERROR, SHAPE, make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.support.loaded import load as load_model

transformers = pytest.importorskip("transformers")

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
AUDIO = {"subsampling_conv_channels": [4, 2], "output_proj_dims": 16} | TOWER
WITH_IMAGES: dict[str, Any] = {
    "gemma3": ("Gemma3", {"vision_config": TOWER | {"image_size": 32, "patch_size": 8}, "mm_tokens_per_image": 4}),
    "gemma4_moe": (
        "Gemma4",
        {
            "vision_config": TOWER | {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16},
            "audio_config": AUDIO,
        },
    ),
    "gemma4_small": ("Gemma4", {}),
}


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, read_spec(folder), dtype=torch.float32, device="cpu", max_model_len=256, **options)


def change(folder: Path, **changes: Any) -> None:
    """Fields of config.json; ...: without it."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_text_model_of_one_with_images(tmp_path: Path, name: str) -> None:
    family, more = WITH_IMAGES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(text_config={**SHAPE, **CASES[name][1]}, **more)
    oracle = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    oracle.save_pretrained(tmp_path)
    prompt = make_prompts()[1]
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    (got,) = decode(load(tmp_path), [prompt], 1)
    assert (got.logits - expected).abs().max() <= MAX_ERROR


@pytest.mark.parametrize(("top", "inner"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_whole_models_field_ties_the_head(tmp_path: Path, name: str, top: bool, inner: bool) -> None:
    family, more = WITH_IMAGES[name]
    torch.manual_seed(0)
    text = {**SHAPE, **CASES[name][1], "tie_word_embeddings": inner}
    config = getattr(transformers, f"{family}Config")(text_config=text, tie_word_embeddings=top, **more)
    oracle = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    oracle.save_pretrained(tmp_path)
    change(tmp_path, tie_word_embeddings=top)
    prompt = make_prompts()[1]
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    (got,) = decode(load(tmp_path), [prompt], 1)
    assert (got.logits - expected).abs().max() <= MAX_ERROR


@pytest.mark.parametrize("name", ["gemma4_moe", "gemma4_small"])
def test_the_published_spelling_of_head_sizes(tmp_path: Path, name: str) -> None:
    make_checkpoint(name, tmp_path)
    spec = read_spec(tmp_path)
    published = {key: CASES[name][1].get(key) for key in ("global_head_dim", "num_global_key_value_heads")}
    change(tmp_path, per_layer_config=..., **published)
    assert read_spec(tmp_path) == spec
    change(tmp_path, global_head_dim=128)
    assert read_spec(tmp_path) != spec


def test_what_layers_that_share_their_cache_do_not_use_is_not_loaded(tmp_path: Path) -> None:
    """Published checkpoints hold key and value projections of all layers."""
    make_checkpoint("gemma4_small", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.5.self_attn.k_proj.weight": torch.zeros(64, 128)}, file)
    assert load(tmp_path).layers[5].attention.spec.kv_of == 1
    save_file(load_file(file) | {"model.layers.1.self_attn.x_proj.weight": torch.zeros(64, 128)}, file)
    with pytest.raises(ModelError, match="x_proj"):
        load(tmp_path)


def test_layers_that_share_their_cache_are_in_one_stage(tmp_path: Path) -> None:
    make_checkpoint("gemma4_small", tmp_path)
    with pytest.raises(ModelError, match="must be in one stage"):
        load(tmp_path, stage=Stage(0, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"num_kv_shared_layers": 6}, "'num_kv_shared_layers' must be at most 5"),
        ({"num_kv_shared_layers": 5}, r"'num_kv_shared_layers' \(5\) leaves no full_attention"),
        ({"vocab_size_per_layer_input": 100}, "must not be below 'vocab_size'"),
        ({"per_layer_config": {"1": 3}}, "'per_layer_config' must be an object of objects"),
        ({"enable_moe_block": True}, "'num_experts' is missing"),
        ({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": 3}, "'text_config' must be an object"),
    ],
)
def test_configurations_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_checkpoint("gemma4_small", tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)
