"""When a lost engine process is started again, and when one is taken to hang."""

from pathlib import Path

from engine.replicas.heartbeat import Heartbeat
from engine.replicas.supervisor import MAX_DELAY_SECONDS, WINDOW_SECONDS, RestartPolicy, Watchdog
from tests.engine.replicas.test_state import Clock


def test_the_first_restart_comes_at_once_and_later_ones_wait() -> None:
    policy = RestartPolicy(8, Clock())
    delays = [policy.next_delay() for _ in range(9)]
    assert delays == [0, 1, 2, 4, 8, 16, MAX_DELAY_SECONDS, MAX_DELAY_SECONDS, None]


def test_restarts_long_ago_do_not_count() -> None:
    clock = Clock()
    policy = RestartPolicy(2, clock)
    assert policy.next_delay() == 0
    clock.now += WINDOW_SECONDS / 2
    assert policy.next_delay() == 1
    assert policy.next_delay() is None
    clock.now += WINDOW_SECONDS / 2
    assert policy.next_delay() == 1, "only the second one is within the window"


def test_without_restarts_the_first_loss_is_the_last() -> None:
    assert RestartPolicy(0, Clock()).next_delay() is None


def test_silence_is_measured_from_the_last_beat() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    assert watchdog.look(7, 1) == 0
    for seconds in (1, 2, 3):
        clock.now += 1
        assert watchdog.look(7, 1) == seconds
    clock.now += 1
    assert watchdog.look(8, 1) == 0


def test_time_in_which_nothing_looked_does_not_count() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.look(7, 1)
    clock.now += 3600  # the machine slept, or the event loop was held up
    assert watchdog.look(7, 1) == 2
    clock.now -= 50
    assert watchdog.look(7, 1) <= 2


def test_a_heartbeat_is_read_in_another_mapping(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    reader = Heartbeat(file)
    writer = Heartbeat(file)
    file.unlink()
    assert reader.read() == 0
    writer.beat()
    writer.beat()
    assert reader.read() == 2
