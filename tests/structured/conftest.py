"""A compiler for a vocabulary of bytes, and a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from walks import END, TOKENS

from engine.structured.grammar import Compiler, Vocabulary


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler(lambda: Vocabulary(TOKENS, [256, END], [END]))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine tests' own."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parent.parent / "engine" / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.write_model(tmp_path_factory.mktemp("models") / "tiny")
    return folder
