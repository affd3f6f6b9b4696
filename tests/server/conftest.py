"""Fixtures for tests that talk to a live server."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, run_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Live]:
    with run_server(FakeEngine()) as live:
        yield live


@pytest.fixture
def live(shared_server: Live) -> Iterator[Live]:
    """The server that most tests share; its engine is as new."""
    engine = shared_server.engine
    engine.__init__()  # type: ignore[misc]
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def serve() -> Iterator[Callable[..., Live]]:
    """Further servers, with settings of their own: `serve(FakeEngine(...), ServerConfig(...))`."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(run_server(*args, **kwargs))
