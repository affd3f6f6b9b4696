"""The stub server, one for each test module."""

from collections.abc import Iterator

import pytest

from tests.support.stub_sse import Stub, run_stub


@pytest.fixture(scope="module")
def running_stub() -> Iterator[Stub]:
    with run_stub() as stub:
        yield stub


@pytest.fixture
def stub(running_stub: Stub) -> Stub:
    running_stub.requests.clear()
    running_stub.headers.clear()
    running_stub.num_connections = 0
    return running_stub
