"""The benchmark of experts: without a GPU it runs a small layer to its end."""

import json
from pathlib import Path

import pytest

from benchmarks.micro import experts, kernels


def test_the_sweep_runs_and_prints_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    saved = tmp_path / "experts.json"
    assert (
        kernels.main(["--sweep", "experts", "--tokens", "1", "3", "--shapes", "tiny", "--output-json", str(saved)]) == 0
    )
    rows = json.loads(saved.read_text())["rows"]
    assert [(row["form"], row["tokens"]) for row in rows] == [
        (form, tokens) for form in experts.SHAPES["tiny"].forms for tokens in (1, 3)
    ]
    assert all(row["floor_us"] > 0 for row in rows)
    assert all(row["us"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert printed.startswith("floors by ")
    assert printed.count("us, floor") == len(rows)
