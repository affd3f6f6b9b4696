"""Products of instruction sets that this CPU may lack, compiled for them and run by QEMU where both are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.instruction_set import compiler_options, missing_features

SOURCE = Path(__file__).with_name("other_cpus.cpp")
ARM = ("aarch64", "aarch64+dotprod", "aarch64+dotprod+bf16")
X86 = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v3+avxvnni", "x86-64-v4")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ARM, *X86])
def test_products(name: str, tmp_path: Path) -> None:
    machine = "aarch64" if name in ARM else "x86_64"
    compiler = shutil.which(f"{machine}-linux-gnu-g++")
    emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    runs_here = not missing_features(name)
    if compiler is None or not (runs_here or emulator):
        pytest.skip(f"needs g++ and QEMU for {machine}")
    program = tmp_path / "products"
    command = [
        compiler,
        *build.OPTIONS,
        *compiler_options(name),
        "-static",
        f"-I{build.SOURCES}",
        "-o",
        program,
        SOURCE,
    ]
    subprocess.run(command, check=True, timeout=300)
    launch = [program] if runs_here else [emulator, "-cpu", "max", program]
    shown = subprocess.run(list(map(str, launch)), capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stdout + shown.stderr
