"""When an owner that has left is expected."""

import pytest

from engine.core.visits import AWAY_SECONDS, EARLY, REMEMBERED, Visits
from tests.engine.test_state import Clock

NOW = 0.0  # within so many seconds


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


def test_an_owner_that_was_there_once_may_come_at_any_time(visits: Visits, clock: Clock) -> None:
    visits.came("a")
    assert not visits.expects(clock.now, NOW), "it is there"
    visits.left("a")
    assert visits.expects(clock.now, NOW)
    clock.now += AWAY_SECONDS - 0.1
    assert visits.expects(clock.now, NOW)
    clock.now += 0.2
    assert not visits.expects(clock.now, NOW)


def test_a_regular_one_is_expected_after_most_of_its_shortest_pause(visits: Visits, clock: Clock) -> None:
    visit(visits, clock, 3, 2, 4)
    assert not visits.expects(clock.now + 2 * EARLY - 0.01, NOW)
    assert visits.expects(clock.now + 2 * EARLY - 0.01, 0.1)
    assert visits.expects(clock.now + 2 * EARLY, NOW)
    assert visits.expects(clock.now + AWAY_SECONDS - 0.1, NOW)


def test_pauses_long_ago_do_not_count(visits: Visits, clock: Clock) -> None:
    visit(visits, clock, 0.1, 5, 5, 5, 5)
    assert not visits.expects(clock.now + 1, NOW)


def test_staying_away_for_long_says_nothing_of_pauses(visits: Visits, clock: Clock) -> None:
    visit(visits, clock, 2, AWAY_SECONDS + 1, AWAY_SECONDS + 1)
    assert not visits.expects(clock.now, NOW)
    assert visits.expects(clock.now + 2 * EARLY, NOW)


def test_owners_without_number_are_not_all_remembered(visits: Visits, clock: Clock) -> None:
    visits.came("a")
    for number in range(REMEMBERED):
        visits.came(str(number))
    visits.left("a")
    assert not visits.expects(clock.now, NOW)
    visits.left("1")
    assert visits.expects(clock.now, NOW)
