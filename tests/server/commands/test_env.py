"""`quire env`: what a bug report needs, and no secrets."""

import pytest
import torch

import engine
from server.cli.main import main


def test_it_shows_versions_and_settings_but_no_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "hush")
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "4k")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert "hush" not in out
    assert rows["quire"].startswith(engine.__version__)
    assert rows["torch"] == torch.__version__
    assert rows["QUIRE_MAX_MODEL_LEN"] == "4k"
    assert rows["QUIRE_API_KEY"] == rows["HF_TOKEN"] == "(set)"
    assert {"cpu", "memory", "system", "driver"} <= rows.keys()
