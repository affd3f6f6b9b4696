"""Finding a model: folders, and what the Hub answers."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors

from engine.models import download as download_module
from engine.models.errors import ModelError
from engine.models.hub import resolve_model


def message(name: Any, **options: Any) -> Any:
    with pytest.raises(ModelError) as error:
        resolve_model(str(name), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_local_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_folder_without_config(tmp_path: Path) -> None:
    assert f"{tmp_path}: holds no config.json (it holds nothing)" in message(tmp_path)
    (tmp_path / "original").mkdir()
    (tmp_path / "weights.bin").touch()
    assert "(it holds original/, weights.bin)" in message(tmp_path)
    for i in range(20):
        (tmp_path / f"a{i:02}").touch()
    assert "a07 and 14 more" in message(tmp_path)


def test_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    assert "model.pt: is a file; give a .gguf file, or the folder" in message(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/mine", "a/b/c", "~/nothing-here", "white space"])
def test_neither_folder_nor_name(name: str) -> None:
    assert message(name).startswith(f"{name}: there is no such folder")


def test_offline_and_not_cached(tmp_path: Path) -> None:
    text = message("no-one/nothing", download_dir=str(tmp_path))
    assert text.startswith("no-one/nothing: neither a local folder nor in the cache")
    assert "HF_HUB_OFFLINE" in text


@pytest.mark.parametrize(
    ("error", "status", "want"),
    [
        (errors.GatedRepoError, 403, "gated; ask for it at https://huggingface.co/o/m, then set HF_TOKEN"),
        (errors.RepositoryNotFoundError, 404, "neither a local folder nor a model of the Hub; check the spelling"),
        (errors.RevisionNotFoundError, 404, "has no revision 'v9'"),
        (errors.HfHubHTTPError, 500, "the download failed (first line); try again"),
    ],
)
def test_what_the_hub_answers(monkeypatch: pytest.MonkeyPatch, error: Any, status: int, want: str) -> None:
    def answer(*args: Any, **kwargs: Any) -> None:
        raise error("first line\nsecond", response=httpx.Response(status, request=httpx.Request("GET", "https://h")))

    monkeypatch.setattr(download_module, "snapshot_download", answer)
    assert message("o/m", revision="v9").startswith("o/m: ")
    assert want in message("o/m", revision="v9")


def test_network_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(download_module, "snapshot_download", fail)
    assert "the download failed (ReadTimeout)" in message("o/m")


@pytest.mark.parametrize("weights", [True, False])
def test_what_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: bool) -> None:
    from huggingface_hub.utils import filter_repo_objects

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").touch()
    asked: dict[str, Any] = {}

    def download(repo: Any, **options: Any) -> Any:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(download_module, "snapshot_download", download)
    assert resolve_model("o/m", revision="main", download_dir="cache", weights=weights) == tmp_path
    assert (asked["repo"], asked["revision"], asked["cache_dir"]) == ("o/m", "main", "cache")
    offered = [
        "config.json",
        "model-1.safetensors",
        "consolidated.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    ]
    offered += [
        "pytorch_model.bin",
        "original/params.json",
        "onnx/model.onnx",
        "1_Pooling/config.json",
        "README.md",
        "model.safetensors.index.json",
    ]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    taken = set(filter_repo_objects(offered, **patterns))
    text = {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "1_Pooling/config.json",
    }
    assert taken == text | ({"model-1.safetensors"} if weights else set())


def test_without_safetensors_the_file_of_pytorch_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[list[str]] = []

    def download(repo: Any, *, allow_patterns: list[str], **options: Any) -> Any:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(download_module, "snapshot_download", download)
    assert resolve_model("o/m") == tmp_path
    assert "*.safetensors" in asked[0]
    assert asked[1:] == [["pytorch_model.bin"]]
