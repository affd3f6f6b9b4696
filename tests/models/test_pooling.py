"""Files of sentence-transformers beside a model: read, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.errors import ModelError
from engine.models.pooling_config import (
    dense_layers,
    is_embedding_model,
    max_seq_length,
    read_pooling,
    read_prompts,
)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({}, "last"),
        (None, "last"),
    ],
)
def test_pooling(tmp_path: Path, config: dict[str, Any] | None, pooling: str) -> None:
    if config is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_pooling(tmp_path) == pooling


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"pooling_mode_max_tokens": true}', "pools by max_tokens; choose last, mean or cls by --pooling"),
        ('{"pooling_mode_mean_tokens": true, "include_prompt": false}', "'include_prompt' must be true"),
        ('{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}', "pools by mean_tokens, max_tokens"),
        ('{"pooling_mode": "weightedmean"}', "pools by weightedmean"),
    ],
)
def test_other_pooling(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        read_pooling(tmp_path)


def test_embedding_models(tmp_path: Path) -> None:
    assert not is_embedding_model(tmp_path)
    modules = [{"idx": 0, "type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert is_embedding_model(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.LSTM"}]))
    with pytest.raises(ModelError, match="module 'LSTM' is not supported; supported: Transformer, Pooling, Dense, Nor"):
        is_embedding_model(tmp_path)
    for broken in ("{", "[1]", "[{}]", "3"):
        (tmp_path / "modules.json").write_text(broken)
        with pytest.raises(ModelError, match=r"modules\.json: is (no list of modules|not valid JSON)"):
            is_embedding_model(tmp_path)


def test_prompts(tmp_path: Path) -> None:
    assert read_prompts(tmp_path).prefix(None) == ""
    with pytest.raises(ValueError, match="is unknown: the model has no prompts, got 'query'"):
        read_prompts(tmp_path).prefix("query")
    for content, message in (
        ({"prompts": ["a"]}, "'prompts' must be an object of texts"),
        ({"prompts": {"a": ""}, "default_prompt_name": "b"}, "'default_prompt_name' 'b' is not among its prompts"),
    ):
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match=message):
            read_prompts(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"out_features": 3, "activation_function": "torch.nn.modules.activation.Softplus"}, "'activation_function'"),
        ({"out_features": 0, "activation_function": "torch.nn.modules.linear.Identity"}, "'out_features' must be"),
    ],
)
def test_dense_modules_that_cannot_be(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        dense_layers(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([modules[0] | {"path": "../other"}]))
    with pytest.raises(ModelError, match="is not the name of a folder"):
        dense_layers(tmp_path)


def test_texts_that_are_made_lower_case_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
    with pytest.raises(ModelError, match="'do_lower_case' must be false"):
        max_seq_length(tmp_path)
