"""Order of sums in compiled kernels, with no GPU present."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import torch, triton
import kernels
from tests.support.compile_ahead import Driver, tensor
from kernels.triton import fixed_linear, fixed_parts

triton.runtime.driver.set_active(Driver(90))
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda *_: (9, 0)
fixed_parts.num_multiprocessors = lambda device: 132
binaries, run = [], triton.runtime.jit.JITFunction.run
triton.runtime.jit.JITFunction.run = lambda *args, **options: binaries.append(run(*args, **options))
with kernels.compiling_only():
    for tokens in (1, 8192):
        x, weight = tensor(tokens, 128), tensor(384, 128)
        fixed_parts.fixed_parts(x, weight, None, tensor(tokens, 384), pieces=2)
        fixed_linear.fixed_linear(x, weight, None, tensor(tokens, 384), pieces=2)
for binary in binaries:
    lines = [line.split(" = ", 1)[1] for line in binary.result().asm["ttir"].splitlines() if "tt.dot" in line]
    print([line.split(",")[2].split(":")[0].strip() for line in lines])
"""


def test_no_product_continues_the_sum_of_another_piece(tmp_path: Path) -> None:
    """Each product begins with the same value: pieces of one round are added apart, however many programs there are."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    accumulators = [ast.literal_eval(line) for line in result.stdout.splitlines()]
    assert [len(found) for found in accumulators] == [1, 2, 2, 2]
    assert all(len(set(found)) == 1 for found in accumulators), accumulators
