"""The time from the command to the first token: one real start, and the table."""

import runpy
from pathlib import Path

import pytest

from benchmarks.serving import startup
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = runpy.run_path(str(ROOT / "tests" / "support" / "tiny_model.py"))["write_model"](tmp_path / "tiny")
    figures = startup.start("quire", str(model), tmp_path / "log.txt")
    assert 0 < figures["answers"] <= figures["ready"] <= figures["first_token"]
    shown = startup.table({"quire": [figures]})
    assert "| engine | port answers, s | ready, s | first token, s |" in shown
    assert f"| quire | {figures['answers']:.2f} ({figures['answers']:.2f}) |" in shown


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quire did not start: .*there is no such folder"):
        startup.start("quire", "/no/where", tmp_path / "log.txt")


def test_engines_are_checkouts() -> None:
    assert startup.StartupFlags(engines=(f"quire,quire@{ROOT}",)).engines == ("quire", f"quire@{ROOT}")
    for wrong in ("vllm", "quire@/no/where"):
        with pytest.raises(ConfigError, match="engines must be quire or quire@FOLDER"):
            startup.StartupFlags(engines=(wrong,))
