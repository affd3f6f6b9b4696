"""When an owner that has left is expected."""

import math

import pytest

from engine.core.fairness.arrivals import AWAY_SECONDS, EARLY, REMEMBERED, Visits
from tests.engine.test_state import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def visits(clock: Clock) -> Visits:
    return Visits(clock)


def visit(visits: Visits, clock: Clock, *pauses: float) -> None:
    """It comes and leaves at once, waits for each of the pauses, and does so again after it."""
    visits.came("a")
    visits.left("a")
    for pause in pauses:
        clock.now += pause
        visits.came("a")
        visits.left("a")


def seconds(visits: Visits, clock: Clock) -> float:
    return visits.seconds_to_next(clock.now)


def test_an_owner_that_was_there_once_may_come_at_any_time(visits: Visits, clock: Clock) -> None:
    visits.came("a")
    assert seconds(visits, clock) == math.inf, "it is there"
    visits.left("a")
    assert seconds(visits, clock) == 0
    clock.now += AWAY_SECONDS - 0.1
    assert seconds(visits, clock) == 0
    clock.now += 0.2
    assert seconds(visits, clock) == math.inf


def test_a_regular_one_is_expected_after_most_of_its_shortest_pause(visits: Visits, clock: Clock) -> None:
    visit(visits, clock, 3, 2, 4)
    assert seconds(visits, clock) == 2 * EARLY
    clock.now += 2 * EARLY
    assert seconds(visits, clock) == 0


def test_the_next_one_of_several(visits: Visits, clock: Clock) -> None:
    visit(visits, clock, 3)
    visits.came("b")
    assert seconds(visits, clock) == 3 * EARLY
    visits.left("b")
    assert seconds(visits, clock) == 0


def test_a_pause_ends_when_the_request_comes_to_the_server(visits: Visits, clock: Clock) -> None:
    """Else each long step for which a request waits would make the next one look further away."""
    visit(visits, clock, 1)
    clock.now += 3
    visits.came("a", arrival=clock.now - 2.5)
    visits.left("a")
    assert seconds(visits, clock) == 0.5 * EARLY
    visits.came("a", arrival=clock.now - 1)
    visits.left("a")
    assert seconds(visits, clock) == 0, "it came before the last one was done"


def test_pauses_long_ago_do_not_count(visits: Visits, clock: Clock) -> None:
    visit(visits, clock, 0.1, 5, 5, 5, 5)
    assert seconds(visits, clock) == 5 * EARLY


def test_staying_away_for_long_says_nothing_of_pauses(visits: Visits, clock: Clock) -> None:
    visit(visits, clock, 2, AWAY_SECONDS + 1, AWAY_SECONDS + 1)
    assert seconds(visits, clock) == 2 * EARLY


def test_owners_without_number_are_not_all_remembered(visits: Visits, clock: Clock) -> None:
    visits.came("a")
    for number in range(REMEMBERED):
        visits.came(str(number))
    visits.left("a")
    assert seconds(visits, clock) == math.inf
    visits.left("1")
    assert seconds(visits, clock) == 0
