"""`quire pull`: it downloads what serving needs, and nothing of a model that cannot be served."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.models.catalog import check_local
from engine.models.errors import ModelError
from engine.processing.input_processor import InputProcessor
from server.cli.main import main


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> list[dict[str, Any]]:
    """A Hub of one model; the downloads from it."""
    asked: list[dict[str, Any]] = []

    def download(repo: str, **options: Any) -> str:
        asked.append({"repo": repo, **options})
        return str(tmp_path if repo == "strange/one" else tiny_model)

    monkeypatch.setattr("engine.models.download.snapshot_download", download)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    return asked


def test_it_prints_where_the_model_is(
    hub: list[dict[str, Any]], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "tiny/one", "--revision", "v1", "--download-dir", "/models"]) == 0
    assert capsys.readouterr().out.strip() == str(tiny_model)
    assert [("*.safetensors" in each["allow_patterns"]) for each in hub] == [False, True]
    assert {(each["repo"], each["revision"], each["cache_dir"]) for each in hub} == {("tiny/one", "v1", "/models")}


def test_weights_of_a_model_that_cannot_be_served_are_not_downloaded(
    hub: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "strange/one"]) == 1
    assert "'MambaForCausalLM' is not supported" in capsys.readouterr().err
    assert ["*.safetensors" in each["allow_patterns"] for each in hub] == [False]


def test_the_same_where_it_is_served(hub: list[dict[str, Any]], tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="'MambaForCausalLM' is not supported"):
        InputProcessor.load(EngineConfig(model="strange/one"))
    assert ["*.safetensors" in each["allow_patterns"] for each in hub] == [False]
    assert InputProcessor.load(EngineConfig(model="tiny/one")).folder == tiny_model
    assert ["*.safetensors" in each["allow_patterns"] for each in hub[1:]] == [False, True]


def test_a_model_of_the_hub_is_not_looked_up_before_it_is_loaded(hub: list[dict[str, Any]]) -> None:
    for name in ("strange/one", "strange/one:Q4_K_M", "strange/one/folder/file.gguf"):
        check_local(name)
    assert hub == []
