"""Errors of formats in a model's answers are measured on texts of its own."""

import math
from pathlib import Path

import pytest

from benchmarks.offline import accuracy


def test_differences() -> None:
    exact = accuracy.Scores([-1.0, -2.0, -3.0], [4, 5, 6])
    assert exact.perplexity == pytest.approx(math.exp(2))
    assert accuracy.Difference.of(exact, exact) == (0, 1)
    other = accuracy.Scores([-1.5, -2.0, -2.0], [4, 5, 7])
    assert accuracy.Difference.of(other, exact) == pytest.approx((0.5, 2 / 3))


def test_the_table(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main([str(tiny_model), "--formats", "int8", "--texts", "3", "--tokens", "12"]) == 0
    head, _, exact, rounded = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | weights | perplexity |")
    assert exact.startswith("| tiny | float32 | ")
    assert exact.endswith(" | 100.0% | 0.0000 |")
    cells = [cell.strip() for cell in rounded.split("|")[1:-1]]
    assert cells[:2] == ["tiny", "int8"]
    assert 0 < float(cells[4]) < 1
    assert float(cells[2]) == pytest.approx(float(exact.split("|")[3]), rel=0.2)
