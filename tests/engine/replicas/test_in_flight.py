"""Requests that were sent and have not ended: counted by owner, with the pace of the ends."""

import pytest

from engine.replicas import in_flight
from engine.replicas.in_flight import NUM_ENDS, InFlight


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [1000.0]
    monkeypatch.setattr(in_flight, "monotonic", lambda: now[0])
    return now


def test_requests_are_counted_by_owner() -> None:
    sent = InFlight()
    for request_id, owner in (("1", "a"), ("2", "a"), ("3", "b")):
        sent.add(request_id, owner)
    assert (len(sent), sent.of("a"), sent.of("b"), sent.of("c"), sent.tenants) == (3, 2, 1, 0, {"a", "b"})
    for request_id in ("3", "3", "unknown"):
        sent.end(request_id)
    assert (len(sent), sent.of("b"), sent.tenants) == (2, 0, {"a"})


def test_the_pace_is_that_of_the_newest_ends(clock: list[float]) -> None:
    sent = InFlight()
    for number in range(2 * NUM_ENDS):
        sent.add(str(number), "a")
    assert sent.seconds_until(10) is None
    for number in range(NUM_ENDS):
        clock[0] += 100
        sent.end(str(number))
    assert sent.seconds_until(10) == pytest.approx(1000)
    for number in range(NUM_ENDS, 2 * NUM_ENDS - 1):
        clock[0] += 0.5
        sent.end(str(number))
    clock[0] += 0.5
    sent.end(str(2 * NUM_ENDS - 1))
    assert sent.seconds_until(10) == pytest.approx(5)


def test_idle_time_says_nothing_of_the_pace(clock: list[float]) -> None:
    sent = InFlight()
    for _ in range(3):
        clock[0] += 10_000
        sent.add("1", "a")
        assert sent.seconds_until(1) is None
        clock[0] += 2
        sent.end("1")
        assert sent.seconds_until(1) == pytest.approx(2)
