"""Choice of the adapters in memory and in slots, and of the requests that wait: random workloads on a runner that only
keeps books.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import Future

import pytest

from engine.core.batch import EngineOutput
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.models.errors import ModelError
from engine.stepping.adapted import AdaptedRequests


class Books:
    """A runner whose adapters are read when the test says so, and a scheduler that runs what it gets."""

    def __init__(self, num_slots: int, max_loaded: int) -> None:
        self.slots: list[str | None] = [None] * num_slots
        self.reading: dict[str, Future[None]] = {}
        self.loaded: set[str] = set()
        self.running: dict[str, str] = {}  # request → version of its adapter
        self.placed = [("", -1)] * num_slots  # the adapter being copied, and its newest part
        self.num_adapter_parts = 1
        self.num_placed, self.max_loaded, self.most_loaded = 0, max_loaded, 0
        self.adapted = AdaptedRequests(lambda: self, num_slots, max_loaded, self.queue)  # type: ignore[arg-type, return-value]

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        assert adapter.version not in self.loaded | self.reading.keys()
        self.reading[adapter.version] = future = Future[None]()
        self.most_loaded = max(self.most_loaded, len(self.loaded) + len(self.reading))
        return future

    def read(self, version: str) -> None:
        future = self.reading.pop(version)
        self.loaded.add(version)
        if version.startswith("bad"):
            future.set_exception(ModelError("it is damaged"))
        else:
            future.set_result(None)

    def drop_adapter(self, adapter: Adapter) -> None:
        self.loaded.remove(adapter.version)

    def place_adapter(self, adapter: Adapter, slot: int, part: int, num_parts: int) -> None:
        assert adapter.version in self.loaded
        assert adapter.version not in self.slots
        assert num_parts == self.num_adapter_parts
        assert self.slots[slot] not in self.running.values(), "an adapter in use was overwritten"
        assert part == 0 or self.placed[slot] == (adapter.version, part - 1)
        self.slots[slot], self.placed[slot] = None, (adapter.version, part)
        if part == num_parts - 1:
            self.slots[slot], self.placed[slot] = adapter.version, ("", -1)
            self.num_placed += 1

    def queue(self, request: Request) -> None:
        adapter = request.engine_request.adapter
        assert adapter is not None
        assert adapter.version in self.slots
        self.running[request.request_id] = adapter.version

    def finish(self, request_id: str) -> None:
        del self.running[request_id]
        self.adapted.remove_finished([EngineOutput(request_id, [], "stop")])

    def add(self, request_id: str, version: str) -> None:
        request = EngineRequest(request_id, [1, 2], SamplingParams(), adapter=Adapter(version, "", version))
        self.adapted.add(Request(request, frozenset(), 0))

    def step(self) -> list[EngineOutput]:
        outputs = self.adapted.queue_ready(idle=False)
        self.adapted.check()
        return outputs


@pytest.mark.parametrize("seed", range(60))
def test_every_request_runs_with_its_adapter_in_a_slot(seed: int) -> None:
    draw = random.Random(seed)
    num_slots = draw.randint(1, 4)
    books = Books(num_slots, draw.randint(num_slots, 8))
    books.num_adapter_parts = draw.randint(1, 3)
    versions = [f"good {i}" for i in range(draw.randint(1, 12))] + ["bad"]
    waiting: set[str] = set()
    for number in range(400):
        if number < 200 and draw.random() < 0.7:
            books.add(str(number), draw.choice(versions))
            waiting.add(str(number))
        for version in list(books.reading):
            if draw.random() < 0.3:
                books.read(version)
        for output in books.step():
            assert output.is_refused
            assert "the adapter 'bad' cannot be used: it is damaged" in output.error
            waiting.remove(output.request_id)
        waiting -= books.running.keys()
        for request_id in list(books.running):
            if draw.random() < 0.3:
                books.finish(request_id)
        if waiting and draw.random() < 0.05:  # aborted
            request_id = draw.choice(sorted(waiting))
            assert books.adapted.holds(request_id)
            assert books.adapted.remove(request_id)
            waiting.remove(request_id)
    assert not waiting
    assert books.adapted.num_held == 0
    assert books.most_loaded <= books.max_loaded
    assert books.num_placed


def test_no_adapter_waits_for_ever_behind_a_busy_one() -> None:
    """Requests of one adapter overlap without end, and another one wants the only slot."""
    books = Books(1, 2)
    books.add("0", "busy")
    books.step()
    books.read("busy")
    books.step()
    books.add("other", "other")
    books.step()
    books.read("other")
    for number in range(1, 5):
        books.add(str(number), "busy")  # before the one before has finished
        books.step()
        if number == 2:
            books.finish("0")
        if "other" in books.running:
            break
    assert "other" in books.running
    assert books.adapted.num_held > 0
    books.finish("other")
    books.step()
    assert set(books.running.values()) == {"busy"}


def test_an_adapter_is_copied_in_parts_between_steps_and_at_once_without_other_work() -> None:
    books = Books(2, 2)
    books.num_adapter_parts = 3
    for version, idle, steps in (("a", False, 3), ("b", True, 1)):
        books.add(version, version)
        books.step()
        books.read(version)
        for step in range(steps):
            assert version not in books.running
            books.adapted.queue_ready(idle)
            books.adapted.check()
            assert (version in books.running) == (step == steps - 1)


def test_a_busy_adapter_goes_on_while_another_one_is_read() -> None:
    books = Books(1, 2)
    books.add("0", "busy")
    books.step()
    books.read("busy")
    books.step()
    books.add("other", "other")
    books.step()
    books.add("1", "busy")
    books.step()
    assert books.running.keys() == {"0", "1"}


def test_the_least_recently_used_adapter_leaves_its_slot() -> None:
    books = Books(2, 4)
    for number, version in enumerate(["a", "b", "a", "c"]):
        books.add(str(number), version)
        books.step()
        if version in books.reading:
            books.read(version)
        books.step()
        books.finish(str(number))
    assert set(books.slots) == {"a", "c"}


def test_a_damaged_adapter_is_read_again_for_the_next_request() -> None:
    books = Books(1, 1)
    for number in range(2):
        books.add(str(number), "bad")
        books.step()
        books.read("bad")
        [output] = books.step()
        assert output.request_id == str(number)


def test_adapters_are_loaded_before_requests_want_them() -> None:
    books = Books(1, 2)
    ready = books.adapted.load(Adapter("a", "", "a"))
    books.read("a")
    assert ready.done()
    books.add("0", "a")
    books.step()
    assert books.running == {"0": "a"}
    running, held = books.adapted.names()
    assert (running, held) == (["a"], [])


def test_a_step_does_no_work_for_each_adapter_that_was_ever_used() -> None:
    calls = [_calls_of_a_step(num_adapters) for num_adapters in (200, 1000)]
    assert calls[0] == calls[1]


def _calls_of_a_step(num_adapters: int) -> int:
    """Use adapters one after the other in 64 slots. Returns the calls of a step in which 64 run and one more waits."""
    books = Books(64, 100)
    for number in range(num_adapters):
        books.add(str(number), f"adapter {number}")
        books.step()
        books.read(f"adapter {number}")
        books.step()
        if number >= 63:
            assert str(number - 63) in books.running
            books.finish(str(number - 63))
    books.add("again", f"adapter {num_adapters - 1}")
    books.add("waits", "another")
    assert len(books.loaded) <= 100
    count = 0

    def seen(frame: object, event: str, given: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(seen)
    try:
        books.adapted.queue_ready(idle=False)
    finally:
        sys.setprofile(None)
    assert {"again"} <= books.running.keys()
    return count
