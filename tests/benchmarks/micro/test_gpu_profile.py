"""The profile of a GPU from made-up events: idle time, the steps of a trace, the trace."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.micro.gpu_profile import FIRST_KERNEL, Event, busy, chrome_trace, save_trace, steady_steps


def step(start: float, *names: str) -> list[Event]:
    """Kernels of 8 µs, 10 µs apart, after the one with which a step begins."""
    return [
        Event(name, start + 10.0 * i, start + 10.0 * i + 8.0, stream=7) for i, name in enumerate((FIRST_KERNEL, *names))
    ]


def test_busy_time_counts_overlaps_once() -> None:
    assert busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == (4.0, 6.0)


def test_the_steps_are_from_the_middle_and_whole() -> None:
    steps = [step(100.0 * i, "decode", "sample") for i in range(11)]
    copy = Event("Memcpy", -5.0, -4.0, stream=9)  # of the step before, of which the rest is not there
    events = [copy, *(event for each in steps for event in each)]
    assert steady_steps(events[::-1]) == steps[3:8]
    assert steady_steps(events, count=20) == steps
    with pytest.raises(ValueError, match="no step"):
        steady_steps([copy])


def test_steps_with_prefill_are_avoided_where_that_is_possible() -> None:
    mixed = {3, 4, 9}
    steps = [step(100.0 * i, "_prefill_kernel" if i in mixed else "decode") for i in range(10)]
    events = [event for each in steps for event in each]
    assert steady_steps(events, count=3) == steps[5:8]
    assert steady_steps(events, count=5) == steps[2:7]


def test_the_trace(tmp_path: Path) -> None:
    early = Event("early", 1016.0, 1025.0, stream=7)  # begins while the kernel ahead still runs
    copy = Event("Memcpy", 1003.0, 1004.0, stream=9)
    first, second = step(1000.0, "decode"), step(1100.0, "decode")
    save_trace(
        chrome_trace({"decode": [[*first, early, copy], second], "other": [first]}), tmp_path / "new" / "t.json.gz"
    )
    with gzip.open(tmp_path / "new" / "t.json.gz", "rt") as file:
        rows = json.load(file)["traceEvents"]
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert [row["args"]["name"] for row in rows if row["name"] == "process_name"] == [
        "decode: 2 steps, idle 66.9%",
        "other: 1 steps, idle 11.1%",
    ]
    shown = [
        (names[row["pid"], row["tid"]], row["tid"], row["name"], row["ts"], row["dur"])
        for row in rows
        if row["ph"] == "X" and row["pid"] == 0
    ]
    assert shown == [
        ("steps", 0, "step 1", 0.0, 100.0),
        ("steps", 0, "step 2", 100.0, 18.0),
        ("stream 7", 1, FIRST_KERNEL, 0.0, 8.0),
        ("stream 7", 1, "decode", 10.0, 8.0),
        ("stream 7", 2, "early", 16.0, 9.0),
        ("stream 9", 3, "Memcpy", 3.0, 1.0),
        ("stream 7", 1, FIRST_KERNEL, 100.0, 8.0),
        ("stream 7", 1, "decode", 110.0, 8.0),
    ]
    assert {row["ph"] for row in rows} == {"X", "M"}
