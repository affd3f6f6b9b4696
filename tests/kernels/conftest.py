"""All kernels are tested with NaN in memory that nothing has written; where Triton interprets them, no load may
read it.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from kernels.cpu import build, library
from kernels.cpu.instruction_set import detect, missing_features
from tests.support.unwritten import holds_unwritten, unwritten_is_nan

AMX = "x86-64-v4+avx512vnni+avx512bf16+amx"
LOWER = ("x86-64-v4", "x86-64-v3+avxvnni", "x86-64-v3", "x86-64", "aarch64")  # forms without some instructions
SETS = [detect(), *(name for name in (AMX, *LOWER) if not missing_features(name))]


@pytest.fixture(params=[*dict.fromkeys(SETS), "no compiler"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The CPU's kernels in each form that this CPU can run, by instruction set; then as without a compiler."""
    library.library.cache_clear()
    if request.param == "no compiler":
        monkeypatch.setattr(build, "find_compiler", lambda: None)
    else:
        monkeypatch.setenv("QUIRE_CPU_ISA", request.param)
        if library.library() is None:
            pytest.skip("no compiler is installed")
    yield request.param
    library.library.cache_clear()


@pytest.fixture(autouse=True)
def nothing_unwritten_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if find_spec("triton"):
        import_module("tests.support.quick_interpreter").quicken()
        builder = import_module("triton.runtime.interpreter").InterpreterBuilder
        load = builder.create_masked_load

        def checked(self: Any, ptrs: Any, mask: Any, *options: Any, **named: Any) -> Any:
            loaded = load(self, ptrs, mask, *options, **named)
            assert not holds_unwritten(loaded.data[mask.data.astype(bool)]), (
                "a kernel reads memory that nothing has written"
            )
            return loaded

        monkeypatch.setattr(builder, "create_masked_load", checked)
    with unwritten_is_nan():
        yield
