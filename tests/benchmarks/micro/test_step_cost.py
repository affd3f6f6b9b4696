"""CPU time of a step: every piece is there, for every batch."""

import json
from pathlib import Path

import pytest

from benchmarks.micro import step_cost


def test_every_piece_of_every_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    assert step_cost.main(["--batch", "1", "3", "--steps", "130", "--save-result", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    pieces = {(row["loop"], row["piece"]) for row in rows}
    engine = {"schedule", "launch", "read back", "update", "publish", "rest", "all"}
    assert pieces == {("in_engine_process", piece) for piece in engine} | {
        ("offline", piece) for piece in ("engine", "rest", "all")
    }
    for loop, piece in pieces:
        assert [row["batch"] for row in rows if (row["loop"], row["piece"]) == (loop, piece)] == [1, 3]
    assert all(row["median_us"] >= row["min_us"] for row in rows)
    assert "in_engine_process: schedule" in capsys.readouterr().out
