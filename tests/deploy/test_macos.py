"""A Mac, as far as Linux can stand in for one: no Triton, nothing that only Linux's Python has, and no futexes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import mmap, os, platform, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError("there is no Triton for macOS")

sys.meta_path.insert(0, NoTriton())
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create"):
    delattr(os, name)
del mmap.MADV_HUGEPAGE
import torch
from engine import LLM, SamplingParams
from kernels.cpu.library import library

platform.system = lambda: "Darwin"
sys.platform = "darwin"
llm = LLM(model=sys.argv[1], device="cpu", max_model_len=128)
(output,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12))
assert library() is not None
print(library().instruction_set, output.outputs[0].text)
"""


@pytest.mark.slow
def test_generating_text(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler is installed")
    environment = os.environ | {"CXX": f"{compiler} -DQUIRE_NO_FUTEX", "QUIRE_CACHE_DIR": str(tmp_path)}
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "QUIRE_CPU_KERNELS": "native"}
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "configs" / "demo")]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("x86-64 " if os.uname().machine == "x86_64" else "aarch64 ")
    assert len(shown.stdout) > 20
