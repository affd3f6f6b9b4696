"""Files of measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.result_files import WIDTH, save


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"runs": [], "more": {}, "seconds": [0.1 * i for i in range(60)], "what": 'a "quoted" – name'},
        {"runs": [{"name": f"run {i}", "seconds": [0.123456789] * i, "of": {"a": None, "b": [i]}} for i in range(9)]},
        [{"engine": "quire", "rounds": [{"tokens": i, "is_right": True} for i in range(9)]}],
    ],
)
def test_a_file_holds_what_was_saved_in_few_lines(result: Any, tmp_path: Path) -> None:
    path = tmp_path / "results" / "file.json"
    save(result, path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(path.read_text(encoding="utf-8")) == result
    assert max(map(len, lines)) <= WIDTH + 5
    assert len(lines) <= 3 * len(json.dumps(result)) / WIDTH + 2
