"""A compiler for a vocabulary of bytes."""

from __future__ import annotations

import pytest
from walks import END, TOKENS

from engine.structured.grammar import Compiler, Vocabulary


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler(lambda: Vocabulary(TOKENS, [256, END], [END]))
