"""A compiler for a vocabulary of bytes."""

from __future__ import annotations

import pytest

from engine.structured.grammar import Compiler, Vocabulary
from tests.support.walks import END, TOKENS


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler(lambda: Vocabulary(TOKENS, [256, END], [END]))
