"""The benchmark of grammars: it runs to its end, and says what a user needs."""

import json
from pathlib import Path

import pytest

from benchmarks.micro import structured
from engine.errors import ConfigError

SMALL = ["--num-requests", "4", "--input-len", "8", "--output-len", "8", "--repeat", "2", "--device", "cpu"]
SMALL += ["--kv-cache-memory-bytes", "32m", "--max-model-len", "256"]


def test_it_runs(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "new" / "structured.json"
    assert structured.main([*SMALL, "--model", str(demo_model), "--output-json", str(saved)]) == 0
    result = json.loads(saved.read_text())
    assert result["ratios"].keys() == {"plain", "json", "tools"}
    assert result["ratios"]["plain"] == 1
    assert all(len(runs) == 2 and min(runs) > 0 for runs in result["runs"].values())
    assert {"command", "commit", "torch"} <= result["environment"].keys()
    assert "JSON schemas" in capsys.readouterr().out


def test_a_context_that_is_too_short_is_refused(demo_model: Path) -> None:
    with pytest.raises(ConfigError, match="more than the context holds, 256"):
        structured.main([*SMALL, "--model", str(demo_model), "--output-len", "64"])
