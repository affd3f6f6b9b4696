"""The stub server, one for each test module, and what spares benchmarks processes."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.serving.servers import server_command
from tests.support.stub_sse import Stub, run_stub


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions and hardware are given: to find them, benchmarks start a process that imports PyTorch."""
    for module in ("offline.engines", "offline.cpu_peers", "serving.servers", "serving.image_servers"):
        machine = {"cpu_cores": 2, "cpu_isa": "x86-64-v3", "torch": "2"}
        monkeypatch.setattr(f"benchmarks.{module}.describe_machine", lambda scratch, found=machine: dict(found))


@pytest.fixture
def quick_servers(monkeypatch: pytest.MonkeyPatch, quick_quire: list[str]) -> None:
    """Servers of Quire start their engines as forks."""
    for module in ("servers", "image_servers"):
        monkeypatch.setattr(f"benchmarks.serving.{module}.server_command", _with(quick_quire))


def _with(quire: list[str]) -> Any:
    """Return what stands for `server_command`, with these words instead of `python -P -m quire`."""
    return lambda job, port: [*quire, *server_command(job, port)[4:]]


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
