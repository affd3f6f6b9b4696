"""What the clients meet: the bundled model behind `quire serve`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served import blocks_in_use, serve


@pytest.fixture(scope="session")
def quire(demo_model: Path) -> Iterator[str]:
    """The server's URL."""
    with serve(demo_model, "--served-model-name", "demo") as url:
        yield url
        assert blocks_in_use(url) == 0
