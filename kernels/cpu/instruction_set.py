"""Instruction sets that the C++ kernels can be compiled for, by names such as `x86-64-v3` and `aarch64+dotprod`.

A name is a level, then what the kernels know to use beside it. `QUIRE_CPU_ISA` names one in place of the CPU's own.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Level → flags in /proc/cpuinfo that tell it from the one below, the highest first.
LEVELS = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v2": "cx16 popcnt sse4_1 sse4_2 ssse3",
    "x86-64": "",
}
# Level → name of an addition → its flags in /proc/cpuinfo.
ADDITIONS = {
    "x86-64-v4": {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "amx": "amx_tile amx_int8 amx_bf16"},
    "x86-64-v3": {"avxvnni": "avx_vnni"},
    "x86-64-v2": {},
    "x86-64": {},
    "aarch64": {"dotprod": "asimddp", "bf16": "bf16", "i8mm": "i8mm"},
}

# macOS's names of features → Linux's.
MACOS = {"FEAT_DotProd": "asimddp", "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm"}
# Addition → options of GCC and Clang, where not its name alone.
OPTIONS = {"amx": ("-mamx-tile", "-mamx-int8", "-mamx-bf16")}


def instruction_set() -> str:
    """Return `QUIRE_CPU_ISA`, else the CPU's own.

    ValueError: the name is not known, or the CPU lacks what it names.
    """
    own, name = detect(), os.environ.get("QUIRE_CPU_ISA", "")
    if not name:
        return own
    level, *additions = name.split("+")
    if level not in ADDITIONS or not set(additions) <= set(ADDITIONS[level]):
        known = ", ".join("+".join([level, *(f"[{name}]" for name in more)]) for level, more in ADDITIONS.items())
        raise ValueError(f"QUIRE_CPU_ISA must be one of {known}, got {name!r}")
    if missing := missing_features(name):
        raise ValueError(f"QUIRE_CPU_ISA is {name!r}, but this CPU has no {', '.join(sorted(missing))} (it has {own})")
    return name


def detect() -> str:
    """Return the highest level of this CPU, with all additions to it that the CPU has."""
    level = next((name for name in ADDITIONS if not missing_features(name)), _machine())
    own = [name for name in ADDITIONS.get(level, {}) if not missing_features(f"{level}+{name}")]
    return "+".join([level, *own])


def missing_features(name: str) -> set[str]:
    """Return what this CPU lacks of an instruction set, by Linux's names."""
    level, *additions = name.split("+")
    if not level.startswith(_machine()):
        return {level}
    levels = list(LEVELS)[list(LEVELS).index(level) :] if level in LEVELS else []
    needed = [flag for at in levels for flag in LEVELS[at].split()]
    for addition in additions:
        needed += ADDITIONS[level][addition].split()
    return {*needed} - _cpu_flags()


def compiler_options(name: str) -> list[str]:
    """Return GCC's and Clang's options for an instruction set; those for the machine at hand if there is no such."""
    level, *additions = name.split("+")
    if level == "aarch64":
        return ["-march=" + "+".join(["armv8.2-a" if additions else "armv8-a", *additions])]
    if level not in LEVELS:
        return ["-march=native"]
    return [f"-march={level}", *(option for name in additions for option in OPTIONS.get(name, (f"-m{name}",)))]


def _machine() -> str:
    """Return the kind of CPU, as the levels begin."""
    machine = platform.machine()
    return {"AMD64": "x86-64", "x86_64": "x86-64", "arm64": "aarch64"}.get(machine, machine)


@functools.cache
def _macos_features() -> set[str]:
    try:
        command = ["sysctl", "hw.optional.arm"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    values = dict(line.rsplit(".", 1)[-1].split(": ") for line in shown.splitlines() if ": " in line)
    return {name for feature, name in MACOS.items() if values.get(feature) == "1"}


def _cpu_flags() -> set[str]:
    """Return the CPU's features by Linux's names."""
    if platform.system() == "Darwin":
        return _macos_features()
    try:
        lines = CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return set()
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )
