"""Requests with LoRA adapters: held until their adapter is in a slot of the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from engine.core.batch import EngineOutput
from engine.core.engine_request import Adapter
from engine.core.request import Request
from engine.models.errors import ModelError
from engine.stepping.recovery import client_reason, failed_output, refused_output
from engine.worker.interface import Runner

IDLE_SECONDS = 0.02  # how long to wait for an adapter if there is no other work


@dataclass(slots=True)
class _Held:
    """The requests that wait for one adapter."""

    adapter: Adapter
    requests: dict[str, Request] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    """A slot of the device."""

    adapter: Adapter | None = None
    users: set[str] = field(default_factory=set)  # ids of unfinished requests that have been queued with it
    is_leaving: bool = False  # another adapter waits for it: it gets no further requests until it is empty


@dataclass(slots=True)
class _Placing:
    """The adapter that is being copied to a slot, which is empty until it is complete."""

    adapter: Adapter
    slot: _Slot
    num_parts: int
    next_part: int = 0


class AdaptedRequests:
    """Holds requests until their adapters are in slots, and decides which adapters are in slots and in host memory.

    An adapter in a slot stays there while an unfinished request uses it, so scheduling needs no rule of its own. When
    an adapter waits for a slot and each is in use, the slot with the fewest requests leaves: new requests for its
    adapter wait behind the other one. So no adapter waits for ever, however many requests another one gets.
    """

    def __init__(
        self, runner: Callable[[], Runner], num_slots: int, max_loaded: int, queue: Callable[[Request], None]
    ) -> None:
        """`runner`: returns the runner with the slots. `num_slots`: 0: adapters are not served. `max_loaded`: adapters
        in host memory. `queue`: queues a request whose adapter is in a slot.
        """
        self._runner, self._queue, self._max_loaded = runner, queue, max(max_loaded, num_slots)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._used: OrderedDict[str, None] = OrderedDict()  # versions of adapters in slots, least recently used first
        # In host memory, or being read; the least recently used first.
        self._loaded: OrderedDict[str, tuple[Adapter, Future[Any]]] = OrderedDict()
        self._placing: _Placing | None = None
        self._held: dict[str, _Held] = {}  # by version, in order of the oldest request
        self._adapter_of: dict[str, str] = {}  # request id → version, of all unfinished requests

    def forget_adapters(self) -> None:
        """The runner and its adapters are gone; no request is unfinished."""
        self._slots = [_Slot() for _ in self._slots]
        self._used.clear()
        self._loaded.clear()

    def _check_served(self) -> None:
        if not self._slots:
            raise ValueError("adapters are not served: start the engine with enable_lora")

    @property
    def num_held(self) -> int:
        """Requests that wait for their adapters."""
        return sum(len(held.requests) for held in self._held.values())

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names of adapters with requests in the scheduler, and of those for which requests wait."""
        running = [slot.adapter.name for slot in self._slots if slot.adapter is not None and slot.users]
        return sorted(running), sorted(held.adapter.name for held in self._held.values())

    def usable(self, adapter: Adapter) -> Future[str]:
        """Begin to read an adapter into host memory. The result says why it cannot be used; empty: it can.
        Raises `ValueError` if adapters are not served.
        """
        self._check_served()
        reason: Future[str] = Future()

        def done(ready: Future[Any]) -> None:
            error = ready.exception()
            if error is None or isinstance(error, ModelError):
                reason.set_result("" if error is None else str(error))
            else:
                reason.set_exception(error)

        self.load(adapter).add_done_callback(done)
        return reason

    def load(self, adapter: Adapter) -> Future[Any]:
        """Begin to read an adapter into host memory, if it is not there. The result is a `ModelError` if it is bad."""
        version = adapter.version
        found = self._loaded.get(version)
        if found is not None and found[1].done() and found[1].exception() is not None:
            self._forget(version)  # a second attempt
            found = None
        if found is None:
            self._make_room()
            found = self._loaded[version] = adapter, self._runner().load_adapter(adapter)
        self._loaded.move_to_end(version)
        return found[1]

    def _make_room(self) -> bool:
        """Drop adapters from host memory until there is room for one more; those that wait for a slot stay.
        Returns whether there is room.
        """
        done = [version for version, (_, ready) in self._loaded.items() if ready.done()]
        unwanted = [version for version in done if version not in self._held or version in self._used]
        for version in unwanted[: max(len(self._loaded) + 1 - self._max_loaded, 0)]:
            self._forget(version)
        return len(self._loaded) < self._max_loaded

    def _forget(self, version: str) -> None:
        adapter, _ = self._loaded.pop(version)
        self._runner().drop_adapter(adapter)

    def holds(self, request_id: str) -> bool:
        version = self._adapter_of.get(request_id)
        return version in self._held and request_id in self._held[version].requests

    def add(self, request: Request) -> None:
        """Hold a request until its adapter is in a slot. Raises `ValueError` if adapters are not served."""
        self._check_served()
        adapter = request.engine_request.adapter
        assert adapter is not None
        self._adapter_of[request.request_id] = adapter.version
        held = self._held.setdefault(adapter.version, _Held(adapter))
        held.requests[request.request_id] = request

    def remove(self, request_id: str) -> bool:
        """Forget a request. Returns whether it was held."""
        version = self._adapter_of.pop(request_id, None)
        if version is None:
            return False
        if (slot := self._slot_of(version)) is not None:
            slot.users.discard(request_id)
        held = self._held.get(version)
        was_held = held is not None and held.requests.pop(request_id, None) is not None
        if held is not None and not held.requests:
            del self._held[version]
            if self._placing is not None and self._placing.adapter.version == version:
                self._placing = None  # its slot is empty
        return was_held

    def remove_finished(self, outputs: Iterable[EngineOutput]) -> None:
        """Forget the requests of final outputs."""
        if self._adapter_of:
            for output in outputs:
                if output.finish_reason is not None:
                    self.remove(output.request_id)

    def queue_ready(self, idle: bool) -> list[EngineOutput]:
        """Queue the requests whose adapters are in slots, and fill free slots. `idle`: there is no other work.

        Returns the outputs of requests whose adapters cannot be used.
        """
        if not self._held:
            return []
        if idle:
            self._wait()
        outputs = []
        for version, held in list(self._held.items()):
            slot = self._slot_of(version)
            if slot is None:
                if version not in self._loaded:
                    if self._make_room():
                        self.load(held.adapter)
                    continue
                _, ready = self._loaded[version]
                if not ready.done():
                    continue
                if (failed := ready.exception()) is not None:
                    outputs += self._refuse(held, failed)
                    continue
                try:
                    slot = self._place(held.adapter, idle)
                except Exception as error:
                    outputs += self._refuse(held, error)
                    continue
                if slot is None:
                    continue
            elif slot.is_leaving and self._is_waited_for():
                continue
            outputs += self._queue_all(held, slot)
        return outputs

    def _wait(self) -> None:
        """Wait a moment for an adapter that is being read, if all held requests wait for such."""
        futures = [self._loaded[version][1] for version in self._held if version in self._loaded]
        if futures and not any(future.done() for future in futures):
            wait(futures, IDLE_SECONDS, FIRST_COMPLETED)

    def _slot_of(self, version: str) -> _Slot | None:
        if version not in self._used:
            return None
        return next(slot for slot in self._slots if slot.adapter is not None and slot.adapter.version == version)

    def _free_slot(self) -> _Slot | None:
        """Return an empty slot, or the one of the least recently used adapter without requests."""
        if (empty := next((slot for slot in self._slots if slot.adapter is None), None)) is not None:
            return empty
        slots = (self._slot_of(version) for version in self._used)
        return next((slot for slot in slots if slot is not None and not slot.users), None)

    def _is_waited_for(self) -> bool:
        """Return whether an adapter that is in host memory waits for a slot."""
        return any(self._slot_of(version) is None for version in self._held)

    def _let_one_leave(self) -> None:
        """Let one slot leave for each adapter that waits for one."""
        num_waiting = sum(self._slot_of(version) is None for version in self._held)  # none is being copied
        staying = [slot for slot in self._slots if not slot.is_leaving]
        if len(self._slots) - len(staying) < num_waiting and staying:
            min(staying, key=lambda slot: len(slot.users)).is_leaving = True

    def _place(self, adapter: Adapter, idle: bool) -> _Slot | None:
        """Copy the next part of an adapter to a slot, all parts if there is no other work. Returns the slot once it is
        complete; None: it is not, or no slot is free, or another adapter is being copied.
        """
        placing = self._placing
        if placing is None:
            slot = self._free_slot()
            if slot is None:
                self._let_one_leave()
                return None
            if slot.adapter is not None:
                del self._used[slot.adapter.version]
            slot.adapter, slot.is_leaving = None, False
            placing = self._placing = _Placing(adapter, slot, self._runner().num_adapter_parts)
        if placing.adapter.version != adapter.version:
            return None
        try:
            for part in range(placing.next_part, placing.num_parts if idle else placing.next_part + 1):
                self._runner().place_adapter(adapter, self._slots.index(placing.slot), part, placing.num_parts)
                placing.next_part = part + 1
        except BaseException:
            self._placing = None
            raise
        if placing.next_part < placing.num_parts:
            return None
        self._placing = None
        placing.slot.adapter = adapter
        self._used[adapter.version] = None
        return placing.slot

    def _queue_all(self, held: _Held, slot: _Slot) -> list[EngineOutput]:
        version = held.adapter.version
        self._used.move_to_end(version)
        slot.is_leaving = False
        del self._held[version]
        outputs = []
        for request in held.requests.values():
            try:
                slot.users.add(request.request_id)
                self._queue(request)
            except Exception as error:
                self.remove(request.request_id)
                outputs.append(failed_output(request.request_id, client_reason(error), exc_info=True))
        return outputs

    def _refuse(self, held: _Held, error: BaseException) -> list[EngineOutput]:
        self._forget(held.adapter.version)
        outputs = []
        for request_id in list(held.requests):
            self.remove(request_id)
            if isinstance(error, ModelError):
                reason = f"the adapter {held.adapter.name!r} cannot be used"
                outputs.append(refused_output(request_id, reason, str(error)))
            else:
                outputs.append(failed_output(request_id, client_reason(error)))  # type: ignore[arg-type]
        return outputs

    def check(self) -> None:
        """Assert all invariants."""
        versions = [slot.adapter.version for slot in self._slots if slot.adapter is not None]
        assert sorted(versions) == sorted(self._used)
        assert len(set(versions)) == len(versions)
        for slot in self._slots:
            assert slot.adapter is not None or not slot.users
            for request_id in slot.users:
                assert slot.adapter is not None
                assert self._adapter_of[request_id] == slot.adapter.version
        held = {request_id for each in self._held.values() for request_id in each.requests}
        used = {request_id for slot in self._slots for request_id in slot.users}
        assert not held & used
        assert held | used == self._adapter_of.keys()
