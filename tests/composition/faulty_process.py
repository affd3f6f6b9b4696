"""An engine process with the faults that its parent asks for."""

from __future__ import annotations

import pytest

from engine.replicas import process
from tests.composition import faults

if __name__ == "__main__":
    faults.apply(faults.wanted(), pytest.MonkeyPatch())
    process.main()
