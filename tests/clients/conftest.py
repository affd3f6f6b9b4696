"""Fixtures of the clients: the bundled model behind `quire serve`; and the table of those that were tried."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import table
from tests.support.served import blocks_in_use, serve

_OUTCOMES: dict[str, bool] = {}  # nodeid → whether it passed, of each test that was not skipped


@pytest.fixture(scope="session")
def quire(demo_model: Path) -> Iterator[str]:
    """The server's URL. In float32, as those have it whose scores are compared with its own."""
    with serve(demo_model, "--served-model-name", "demo", "--dtype", "float32") as url:
        yield url
        assert blocks_in_use(url) == 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or (report.when == "call" and report.passed):
        _OUTCOMES[report.nodeid] = report.passed and _OUTCOMES.get(report.nodeid, True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A module's `CLIENTS` are rows if some of its tests passed and none failed."""
    modules: dict[object, list[bool]] = {}
    for item in session.items:
        if item.nodeid in _OUTCOMES:
            modules.setdefault(getattr(item, "module", None), []).append(_OUTCOMES[item.nodeid])
    passed = [module for module, outcomes in modules.items() if all(outcomes)]
    if tried := [client for module in passed for client in getattr(module, "CLIENTS", ()) if client.is_installed]:
        table.write(tried)
