"""The public API is importable as `quire`, and its command line as a module."""

from __future__ import annotations

import subprocess
import sys

import pytest

import engine
import quire


def test_quire_has_every_public_name_of_the_engine() -> None:
    assert {name: getattr(quire, name) for name in quire.__all__} == {
        name: getattr(engine, name) for name in engine.__all__
    }
    assert quire.__version__ == engine.__version__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'llm'"):
        _ = quire.llm


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"quire {quire.__version__}", "")


def test_importing_quire_imports_no_torch() -> None:
    code = "import quire, sys; assert not {'torch', 'fastapi', 'tokenizers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
