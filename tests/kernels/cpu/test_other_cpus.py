"""Products of instruction sets that this CPU may lack, compiled for them and run by QEMU where both are installed.

QEMU knows no AMX: its instructions are emulated in C++, in a program for AVX-512.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.instruction_set import compiler_options, missing_features

SOURCE = Path(__file__).with_name("other_cpus.cpp")
ARM = ("aarch64", "aarch64+dotprod", "aarch64+dotprod+bf16", "aarch64+dotprod+bf16+i8mm")
BESIDE_AMX = "x86-64-v4+avx512vnni+avx512bf16"
X86 = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v3+avxvnni", "x86-64-v4", BESIDE_AMX)
AMX_IN_SOFTWARE = [f"-D__AMX_{part}__" for part in ("TILE", "INT8", "BF16")]
AMX_IN_SOFTWARE += ["-include", str(SOURCE.with_name("emulated_amx.h"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ARM, *X86, f"{BESIDE_AMX}+amx"])
def test_products(name: str, tmp_path: Path) -> None:
    in_software = name.endswith("+amx") and bool(missing_features(name))
    name = name.removesuffix("+amx") if in_software else name
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
        *(AMX_IN_SOFTWARE if in_software else ()),
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
