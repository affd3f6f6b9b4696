"""Tasks of several owners on a few threads: each owner's in order, and none behind all of another's."""

import gc
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event

import pytest

from engine.utils.fair_executor import FairExecutor


def test_one_of_each_owner_alternately() -> None:
    threads, gate, order = FairExecutor(ThreadPoolExecutor(1), 1), Event(), list[str]()
    first = threads.submit("a", gate.wait, 60)
    futures = [threads.submit("a", order.append, f"a{i}") for i in range(5)]
    futures += [threads.submit(owner, order.append, f"{owner}{i}") for owner in "bc" for i in range(2)]
    gate.set()
    for each in futures:
        each.result(60)
    assert first.result()
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "a3", "a4"]
    threads.shutdown()


def test_a_group_of_tenants_gets_no_more_than_one() -> None:
    threads, gate, order = FairExecutor(ThreadPoolExecutor(1), 1), Event(), list[str]()
    first = threads.submit("a", gate.wait, 60)
    names = [f"b/{i}" for i in range(4)]
    futures = [threads.submit(tenant, order.append, tenant) for tenant in [*names, "b/0", "c", "c", "c"]]
    gate.set()
    for each in futures:
        each.result(60)
    assert first.result(60)
    assert order == ["b/0", "c", "b/1", "c", "b/2", "c", "b/3", "b/0"]
    threads.shutdown()


@pytest.mark.parametrize("group", [("a", "a/1", "a/2"), ("", "", "")], ids=["an address", "no name"])
def test_long_tasks_of_one_do_not_delay_anothers(group: tuple[str, ...]) -> None:
    """With one thread for all, and two more for those without a running task."""
    threads, gate, order = FairExecutor(ThreadPoolExecutor(3), 1, 2), Event(), list[str]()
    long = [threads.submit(tenant, gate.wait, 60) for tenant in group]
    for name in "bcb":
        threads.submit(name, order.append, name).result(60)
    assert order == ["b", "c", "b"]
    assert [each.running() for each in long] == [True, False, False], "one of the group at a time"
    gate.set()
    assert all(each.result(60) for each in long)
    threads.shutdown()


def test_errors_and_cancelled_tasks() -> None:
    threads, gate, order = FairExecutor(ThreadPoolExecutor(1), 1), Event(), list[str]()
    first = threads.submit("a", gate.wait, 60)
    failing = threads.submit("b", int, "no number")
    cancelled, last = threads.submit("b", order.append, "cancelled"), threads.submit("b", order.append, "last")
    assert cancelled.cancel()
    gate.set()
    first.result(60)
    with pytest.raises(ValueError, match="no number"):
        failing.result(60)
    last.result(60)
    assert order == ["last"]
    threads.shutdown()


def test_what_a_failed_task_was_given_is_freed_with_its_error() -> None:
    class Large:
        """Memory that a request holds."""

    def fail(large: Large) -> None:
        raise ValueError("no")

    threads, large = FairExecutor(ThreadPoolExecutor(1), 1), Large()
    freed = weakref.ref(large)
    gc.disable()
    try:
        future = threads.submit("a", fail, large)
        with pytest.raises(ValueError, match="no"):
            future.result(60)
        threads.submit("a", int).result(60)  # the thread is done with it
        del future, large
        assert freed() is None
    finally:
        gc.enable()
        threads.shutdown()


def test_what_waits_when_it_is_shut_down_is_cancelled() -> None:
    threads, gate = FairExecutor(ThreadPoolExecutor(1), 1), Event()
    threads.submit("a", gate.wait, 60)
    waiting = [threads.submit("b", int) for _ in range(3)]
    threads.shutdown()
    gate.set()
    for each in waiting:
        with pytest.raises(CancelledError):
            each.result(60)
