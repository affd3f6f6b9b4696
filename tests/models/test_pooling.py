"""Files of sentence-transformers beside a model: read, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.errors import ModelError
from engine.models.pooling_config import is_embedding_model, read_pooling


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
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
        ('{"pooling_mode_cls_token": true}', "pools by cls_token; choose last or mean by --pooling"),
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
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ModelError, match="module 'Dense' is not supported; supported: Transformer, Pooling, Normalize"):
        is_embedding_model(tmp_path)
    for broken in ("{", "[1]", "[{}]", "3"):
        (tmp_path / "modules.json").write_text(broken)
        with pytest.raises(ModelError, match=r"modules\.json: is (no list of modules|not valid JSON)"):
            is_embedding_model(tmp_path)
