"""The text models of checkpoints that also read images: names, configurations, the line at start-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.families.multimodal import MODELS
from engine.models.quantization import Quantization, Scheme
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.support.loaded import load as load_model

pytest.importorskip("transformers")


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, read_spec(folder), dtype=torch.float32, device="cpu", max_model_len=256)
    return decode(model, make_prompts()[1:2], 1)[0].logits


def wrap(folder: Path, architecture: str, field: str, prefix: str) -> None:
    """Turn the checkpoint of a text model into that of a multimodal one: field "": fields among the others."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    whole = {"architectures": [architecture]} | ({field: text} if field else {**text, "model_type": "x"})
    path.write_text(json.dumps(whole | {"vision_config": {"depth": 1}} | {"architectures": [architecture]}))
    tensors = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"vision_model.a.weight": torch.zeros(1)}, folder / "model.safetensors")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_methods_of_text_models_leave_encoders_floats(method: str, tmp_path: Path) -> None:
    text = {
        "model_type": "mistral", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
        "intermediate_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }  # fmt: skip
    quantization = {"quant_method": method, "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "vision_config": {},
        "quantization_config": quantization,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_spec(tmp_path).quantization
    assert found is not None
    assert found.scheme("model.layers.0.self_attn.q_proj") is not None
    for name in ("vision_tower.transformer.layers.0.attention.q_proj", "multi_modal_projector.linear_1"):
        assert found.scheme(f"model.{name}") is None


def test_the_quantisation_of_a_text_model_leaves_encoders_floats(tmp_path: Path) -> None:
    """Kimi K2.5 is published so: the text model's part of config.json has it."""
    text = {
        "model_type": "mistral", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
        "intermediate_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    config: dict[str, Any] = {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}
    names = "vision_tower.transformer.layers.0.attention.q_proj", "multi_modal_projector.linear_1"
    for whole, is_float in (({}, True), ({"quantization_config": text["quantization_config"]}, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text} | whole))
        found = read_spec(tmp_path).quantization
        assert found is not None
        assert found.scheme("model.layers.0.self_attn.q_proj") is not None
        assert [found.scheme(f"model.{name}") is None for name in names] == [is_float] * 2


@pytest.mark.parametrize(
    ("name", "architecture", "field", "prefix"),
    [
        ("qwen3", "InternVLChatModel", "llm_config", "language_model."),
        ("qwen2", "GotOcr2ForConditionalGeneration", "", ""),
        ("llama4", "Llama4ForConditionalGeneration", "text_config", "language_model."),
    ],
)
def test_a_published_layout(
    name: str, architecture: str, field: str, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(name, tmp_path)
    expected = logits(tmp_path)
    wrap(tmp_path, architecture, field, prefix)
    with caplog.at_level("INFO"):
        assert torch.equal(logits(tmp_path), expected)
    assert caplog.messages == [f"{tmp_path}: text only: 1 tensors for images or sound are not loaded"]


@pytest.mark.parametrize("architecture", MODELS)
def test_text_that_is_absent_or_unknown(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ModelError, match="'text_config' must be an object, got None"):
        read_spec(tmp_path)
    path.write_text(json.dumps({"architectures": [architecture], "text_config": {"model_type": "mamba"}}))
    with pytest.raises(ModelError, match=r"its text model, 'mamba', is not supported: it needs state-space \(Mamba\)"):
        read_spec(tmp_path)


def test_the_patterns_of_a_quantisation_name_the_checkpoints_modules() -> None:
    """They hold under the checkpoint's names, which Quire replaces."""
    scheme = Scheme(layout="plain", kind="e4m3")
    names = (("model.language_model.", "model."),)
    ignored: Any = ("model.language_model.layers.0.mlp.gate", r"re:.*language_model\.layers\.1\.", "lm_head")
    found = Quantization(method="fp8", schemes=((("Linear",), scheme),), ignored=ignored, names=names)
    modules = ("layers.0.mlp.gate", "layers.0.mlp.up", "layers.1.mlp.up", "layers.11.mlp.up")
    assert [found.scheme(f"model.{each}") for each in modules] == [None, scheme, None, scheme]
    assert found.scheme("lm_head") is None
