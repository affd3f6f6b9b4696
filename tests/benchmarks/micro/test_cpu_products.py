"""Products of the CPU's own kernels, measured and compared with float64."""

import json
from pathlib import Path

import pytest

from benchmarks.micro import cpu_products
from engine.errors import ConfigError

SMALL = ["--rows", "64", "--channels", "128", "--tokens", "1", "3", "--seconds", "0.001", "--rounds", "1"]


def test_every_format_is_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert cpu_products.main([*SMALL, "--output-json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["format"], row["tokens"]) for row in rows] == [
        (name, n) for name in cpu_products.FORMATS for n in (1, 3)
    ]
    assert all(row["gflops"] > 0 and row["right"] for row in rows)
    assert "WRONG" not in capsys.readouterr().out


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_products.WORKER, "1")
    monkeypatch.setitem(cpu_products.LIMITS, "float32", 0.0)
    small = cpu_products.Flags(rows=64, channels=128, tokens=("2",), seconds=0.001, formats=("float32",))
    assert [row["right"] for row in cpu_products.measure(small)] == [False]


@pytest.mark.parametrize(("option", "value"), [("--formats", "fp8"), ("--channels", "130"), ("--tokens", "few")])
def test_options(option: str, value: str) -> None:
    with pytest.raises(ConfigError):
        cpu_products.main([option, value])
