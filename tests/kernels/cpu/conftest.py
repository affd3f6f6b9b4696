"""The CPU's kernels are tested for each form that this CPU can run, and as they run where no compiler is installed."""

from collections.abc import Iterator

import pytest

from kernels.cpu import build, library
from kernels.cpu.instruction_set import detect, missing_features

LOWER = ("x86-64-v4", "x86-64-v3+avxvnni", "x86-64-v3", "x86-64", "aarch64")  # forms without some instructions
AMX = "x86-64-v4+avx512vnni+avx512bf16+amx"

SETS = [detect(), *(name for name in (AMX, *LOWER) if not missing_features(name))]


@pytest.fixture(params=[*dict.fromkeys(SETS), "no compiler"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An instruction set, or "no compiler"."""
    library.library.cache_clear()
    if request.param == "no compiler":
        monkeypatch.setattr(build, "find_compiler", lambda: None)
    else:
        monkeypatch.setenv("QUIRE_CPU_ISA", request.param)
        if library.library() is None:
            pytest.skip("no compiler is installed")
    yield request.param
    library.library.cache_clear()
