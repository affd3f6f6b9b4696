"""Threads that compile grammars."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from engine.structured.compile_threads import IDLE_SECONDS, CompileThreads
from tests.support.served import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_they_give_way_to_others() -> None:
    threads = CompileThreads(1)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert 0 < threads.submit("a", priority).result() < 10, (
        "lower than others, and not without a core where all are busy"
    )
    threads.shutdown()


def test_no_tenant_waits_for_anothers_grammar() -> None:
    threads, go_on = CompileThreads(1), threading.Event()
    works = [threads.submit("a", go_on.wait) for _ in range(3)]
    try:
        assert threads.submit("b", int).result(60) == 0
        assert not works[0].done()
    finally:
        go_on.set()
        threads.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_their_priority_is_relative_to_that_of_the_process() -> None:
    """A server that runs under `nice` may not raise the priority of its threads, unless root runs it."""
    code = """
import os, threading
from engine.structured.compile_threads import CompileThreads
os.nice(10)
priority = lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
threads = CompileThreads(1)
print(threads.submit("a", priority).result())
threads.shutdown()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 10 < int(found.stdout) <= 19


def test_idle_threads_end_and_begin_again() -> None:
    now = [100.0]
    threads = CompileThreads(2, clock=lambda: now[0])
    assert not threads.release()
    go_on = threading.Event()
    work, thread = threads.submit("a", go_on.wait), threads.submit("b", threading.current_thread).result()
    now[0] += 100
    assert threads.release(), "one of them works"
    go_on.set()
    work.result()
    while threads._num_working:
        pass
    assert threads.release()
    now[0] += IDLE_SECONDS
    assert not threads.release()
    thread.join(60)
    assert not thread.is_alive()
    assert threads.submit("a", int).result() == 0
    threads.shutdown()
