"""The CPU's kernels are tested as they run here, and as they run where no compiler is installed."""

from collections.abc import Iterator

import pytest

from kernels.cpu import library


@pytest.fixture(params=["compiled", "no compiler"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "no compiler":
        monkeypatch.setattr(library, "find_compiler", lambda: None)
    elif library.library() is None:
        pytest.skip("no compiler is installed")
    library.library.cache_clear()
    yield request.param
    library.library.cache_clear()
