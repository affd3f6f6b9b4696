"""Processes compile kernels into Triton's cache, and where they cannot, threads do, with no GPU present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
COMPILE = """
import os, signal, sys, threading
import torch, triton
from triton.compiler import ASTSource
import kernels
from kernels.triton import norm
from tests.support import compile_ahead

triton.runtime.driver.set_active(compile_ahead.Driver(90))
norm.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
compiled = []
make_ir = ASTSource.make_ir
ASTSource.make_ir = lambda self, *args: compiled.append(self.name) or make_ir(self, *args)
with kernels.compile_processes(2) as processes:
    group = processes._process.pid
    if "killed" in sys.argv:
        os.killpg(group, signal.SIGKILL)
        processes._process.wait()
    with kernels.compiling_only(processes):
        compile_ahead.norm(torch.bfloat16)
        compile_ahead.parts_of_channels() if "gluon" in sys.argv else None
[thread.join() for thread in threading.enumerate() if thread.name == "quire-compile-processes"]
try:
    os.killpg(group, 0)
    print("some are left" if "killed" not in sys.argv else f"{len(compiled)} compiled here")
except ProcessLookupError:
    print(len(compiled), "compiled here")
"""


def compiled_here(cache: Path, *how: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILE, *how]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-8000:]
    return result.stdout.strip()


@pytest.mark.timeout(600)
def test_processes_fill_the_cache(tmp_path: Path) -> None:
    """With Triton's and Gluon's kernels, some of which call the same functions: Triton's keys would depend on which of
    these a process has met before.
    """
    assert compiled_here(tmp_path, "gluon") == "0 compiled here"
    for name, count in {"_rms_norm_kernel": 1, "_add_kernel": 3, "_dense_quantized_kernel": 1}.items():
        assert len(list(tmp_path.rglob(f"{name}.cubin"))) == count
    assert compiled_here(tmp_path, "killed") == "0 compiled here"  # it is all in the cache


@pytest.mark.timeout(600)
def test_kernels_are_compiled_here_when_processes_have_died(tmp_path: Path) -> None:
    assert compiled_here(tmp_path, "killed") == "4 compiled here"
    assert len(list(tmp_path.rglob("*.cubin"))) == 4
