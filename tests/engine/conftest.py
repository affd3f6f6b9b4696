"""The tiny model, for tests of the engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def make_model() -> Callable[[Path], Path]:
    """To have one that may be damaged."""
    return write_model
