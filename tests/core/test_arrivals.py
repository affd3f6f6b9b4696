"""When a tenant that has left is expected."""

import math

import pytest

from engine.core.fairness.arrivals import AWAY_SECONDS, EARLY, MAX_TENANTS, Arrivals
from tests.engine.replicas.test_state import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def arrivals(clock: Clock) -> Arrivals:
    return Arrivals(clock)


def visit(arrivals: Arrivals, clock: Clock, *pauses: float) -> None:
    """It comes and leaves at once, waits for each of the pauses, and does so again after it."""
    arrivals.arrived("a")
    arrivals.departed("a")
    for pause in pauses:
        clock.now += pause
        arrivals.arrived("a")
        arrivals.departed("a")


def seconds(arrivals: Arrivals, clock: Clock) -> float:
    return arrivals.seconds_to_next(clock.now)


def test_a_tenant_that_was_there_once_may_come_at_any_time(arrivals: Arrivals, clock: Clock) -> None:
    arrivals.arrived("a")
    assert seconds(arrivals, clock) == math.inf, "it is there"
    arrivals.departed("a")
    assert seconds(arrivals, clock) == 0
    clock.now += AWAY_SECONDS - 0.1
    assert seconds(arrivals, clock) == 0
    clock.now += 0.2
    assert seconds(arrivals, clock) == math.inf


def test_a_regular_one_is_expected_after_most_of_its_shortest_pause(arrivals: Arrivals, clock: Clock) -> None:
    visit(arrivals, clock, 3, 2, 4)
    assert seconds(arrivals, clock) == 2 * EARLY
    clock.now += 2 * EARLY
    assert seconds(arrivals, clock) == 0


def test_the_next_one_of_several(arrivals: Arrivals, clock: Clock) -> None:
    visit(arrivals, clock, 3)
    arrivals.arrived("b")
    assert seconds(arrivals, clock) == 3 * EARLY
    arrivals.departed("b")
    assert seconds(arrivals, clock) == 0


def test_a_pause_ends_when_the_request_comes_to_the_server(arrivals: Arrivals, clock: Clock) -> None:
    """Else each long step for which a request waits would make the next one look further away."""
    visit(arrivals, clock, 1)
    clock.now += 3
    arrivals.arrived("a", arrival=clock.now - 2.5)
    arrivals.departed("a")
    assert seconds(arrivals, clock) == 0.5 * EARLY
    arrivals.arrived("a", arrival=clock.now - 1)
    arrivals.departed("a")
    assert seconds(arrivals, clock) == 0, "it came before the last one was done"


def test_pauses_long_ago_do_not_count(arrivals: Arrivals, clock: Clock) -> None:
    visit(arrivals, clock, 0.1, 5, 5, 5, 5)
    assert seconds(arrivals, clock) == 5 * EARLY


def test_staying_away_for_long_says_nothing_of_pauses(arrivals: Arrivals, clock: Clock) -> None:
    visit(arrivals, clock, 2, AWAY_SECONDS + 1, AWAY_SECONDS + 1)
    assert seconds(arrivals, clock) == 2 * EARLY


def test_only_the_most_recent_tenants_are_tracked(arrivals: Arrivals, clock: Clock) -> None:
    arrivals.arrived("a")
    for number in range(MAX_TENANTS):
        arrivals.arrived(str(number))
    arrivals.departed("a")
    assert seconds(arrivals, clock) == math.inf
    arrivals.departed("1")
    assert seconds(arrivals, clock) == 0
