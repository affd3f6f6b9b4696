"""The benchmark of sampling: it runs to its end on any device."""

import json
from pathlib import Path

import pytest

from benchmarks.micro import sampling


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "sampling.json"
    command = ["--batch", "1", "3", "--vocab-size", "400", "--device", "cpu", "--output-json", str(saved)]
    assert sampling.main(command) == 0
    result = json.loads(saved.read_text())
    assert len(result["rows"]) == 2 * 2 * len(sampling.FILTERS)
    assert all(min(row["us"], row["plain_us"]) > 0 for row in result["rows"])
    assert "top_k 20, top_p 0.95" in capsys.readouterr().out
