"""All kernels are tested with NaN in memory that nothing has written; where Triton interprets them, no load may
read it.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.unwritten import holds_unwritten, unwritten_is_nan


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
