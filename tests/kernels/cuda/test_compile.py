"""Every kernel compiles for each generation of GPUs, with no GPU present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(3000)  # a minute on a quiet machine
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["90", "--once"], id="90, the first launch of each"),
        *(pytest.param([each], marks=pytest.mark.slow, id=each) for each in ("80", "86", "89", "90", "100", "120")),
    ],
)
def test_every_kernel_compiles(arguments: list[str], tmp_path: Path) -> None:
    """The first launches are kept between runs, by Triton's own keys of sources, constants and version: only kernels
    that changed are compiled again.
    """
    cache = Path(os.environ["QUIRE_CACHE_DIR"]) / "compiled-ahead" if "--once" in arguments else tmp_path
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.support.compile_ahead", *arguments]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-8000:]
