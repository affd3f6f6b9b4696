"""The table of choices: which kernel computes which shape on which GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels.cuda.choice import GLUON

TABLE = Path(__file__).with_name("choices.txt")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.heavy
@pytest.mark.skipif(not GLUON, reason="this Triton's Gluon is not known")
@pytest.mark.parametrize("capability", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_the_choices_are_those_of_the_table(capability: str) -> None:
    """A change of choices changes the table: `python -m tests.support.kernel_choices 80 90 >
    tests/kernels/cuda/choices.txt`.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.kernel_choices", capability]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert result.stdout.splitlines() == [line for line in lines if line.startswith(f"sm_{capability} ")]


def test_the_version_of_triton_is_asked_in_one_place() -> None:
    asking = [
        path.name for path in (ROOT / "kernels").rglob("*.py") if "__version__" in path.read_text(encoding="utf-8")
    ]
    assert asking == ["choice.py"]
