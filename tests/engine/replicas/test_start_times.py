"""The file that remembers how long starts took."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.replicas import start_times
from engine.replicas.start_times import expected_seconds, remember


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "quire"))
    return tmp_path / "quire"


def test_starts_are_remembered_by_their_settings(folder: Path) -> None:
    first, second = EngineConfig(model="a"), EngineConfig(model="a", enforce_eager=True)
    assert expected_seconds(first) is None
    remember(first, 12.5)
    remember(second, 3.0)
    remember(first, 11.0)
    assert (expected_seconds(first), expected_seconds(second)) == (11.0, 3.0)
    assert [file.name for file in folder.iterdir()] == ["starts.json"]
    assert "model" not in (folder / "starts.json").read_text()


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_times, "MAX_ENTRIES", 2)
    for model in "abc":
        remember(EngineConfig(model=model), 1.0)
    assert [expected_seconds(EngineConfig(model=model)) for model in "abc"] == [None, 1.0, 1.0]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', "\\xff"])
def test_a_broken_file_is_no_harm(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "starts.json").write_text(content)
    assert expected_seconds(EngineConfig(model="a")) is None
    remember(EngineConfig(model="a"), 2.0)
    assert expected_seconds(EngineConfig(model="a")) == 2.0


def test_a_folder_that_cannot_be_written_is_no_harm(folder: Path) -> None:
    folder.write_text("a file")
    remember(EngineConfig(model="a"), 2.0)
    assert expected_seconds(EngineConfig(model="a")) is None
