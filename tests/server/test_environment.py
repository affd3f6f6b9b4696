"""Packages of the same names as Quire's, of other programs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from server.cli import environment
from server.cli import main as cli
from server.cli.environment import foreign_package


def test_our_own_packages_are_no_strangers() -> None:
    assert foreign_package() is None


def test_packages_elsewhere_are_named(tmp_path: Path) -> None:
    told = foreign_package(tmp_path)
    assert told is not None
    assert told.startswith("the package 'kernels' in ")
    assert "uv tool install ." in told


def test_a_package_that_was_overwritten_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in environment.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f'"""Quire\'s {name}."""\n' if name != "engine" else "another = True\n"
        )
    specs = {name: type("Spec", (), {"origin": str(tmp_path / name / "__init__.py")}) for name in environment.PACKAGES}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    owners = {"engine": ["quire", "engine-x"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2")
    told = foreign_package(tmp_path)
    assert told is not None
    assert told.startswith(f"the package 'engine' in {tmp_path / 'engine'} is that of engine-x 1.2, not Quire's")


def test_the_command_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "foreign_package", lambda: "the package 'kernels' is not Quire's")
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "quire: error: the package 'kernels' is not Quire's\n"
