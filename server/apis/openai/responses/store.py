"""Stored responses, which clients can retrieve or continue. In memory, bounded by their actual size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.generation.request import Message

MAX_BYTES = 256 << 20
# Overhead of objects, keys and ids besides the content.
RESPONSE_BYTES, TURN_BYTES, ITEM_BYTES, EVENT_BYTES = 1000, 300, 300, 50

_decode = msgspec.msgpack.Decoder(list[Message]).decode
Items = dict[str, bytes]  # JSON by item id, oldest first


def encoded(items: Iterable[dict[str, Any]]) -> Items:
    """Encode items for storage."""
    return {item["id"]: _exact(msgspec.json.encode(item)) for item in items}


def items_bytes(items: Items) -> int:
    """Return the memory that items take, in bytes."""
    return sum(len(item_id) + len(item) + ITEM_BYTES for item_id, item in items.items())


class Turn:
    """The messages that a response added to a conversation. Responses with a common history use the same turns."""

    __slots__ = ("_messages", "num_holders", "previous")

    def __init__(self, messages: list[Message], previous: Turn | None) -> None:
        self._messages, self.previous = _exact(msgspec.msgpack.encode(messages)), previous
        self.num_holders = 0  # stored responses and later turns that refer to this turn

    @property
    def num_bytes(self) -> int:
        return len(self._messages) + TURN_BYTES

    def conversation(self) -> list[Message]:
        """Return all messages up to the end of this turn, without instructions."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return [message for turn in reversed(turns) for message in _decode(turn._messages)]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response."""

    body: bytes  # its JSON
    input_items: Items  # the request's new items
    output: Items
    turn: Turn
    events: Sequence[bytes] = ()  # only of background responses
    is_background: bool = False

    @staticmethod
    def of(response: dict[str, Any], input_items: Items, turn: Turn, events: Sequence[bytes] = ()) -> StoredResponse:
        """Create a stored response from the response object."""
        body, output = _exact(msgspec.json.encode(response)), encoded(response["output"])
        return StoredResponse(body, input_items, output, turn, events, bool(response.get("background")))

    @property
    def num_bytes(self) -> int:
        """Size in memory, without the messages."""
        events = sum(len(event) + EVENT_BYTES for event in self.events)
        return len(self.body) + items_bytes(self.input_items) + items_bytes(self.output) + RESPONSE_BYTES + events


def _exact(encoded: bytes) -> bytes:
    """Return a copy without spare capacity: encoders over-allocate their output by half."""
    return bytes(memoryview(encoded))


@dataclass(slots=True)
class _Owned:
    """The responses of one caller, least recently used first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    items: dict[str, str] = field(default_factory=dict)  # output item id → response id
    num_bytes: int = 0

    def hold(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_holders += 1
            if turn.num_holders > 1:
                break
            self.num_bytes += turn.num_bytes
            turn = turn.previous

    def release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders:
                break
            self.num_bytes -= turn.num_bytes
            turn = turn.previous

    def remove(self, response_id: str) -> bool:
        """Remove a response; return whether it existed."""
        response = self.responses.pop(response_id, None)
        if response is None:
            return False
        self.num_bytes -= response.num_bytes
        self.release(response.turn)
        for item_id in response.output:
            del self.items[item_id]
        return True


class ResponseStore:
    """At most `max_responses` responses, and `max_bytes` including their conversations.

    When the store is full, the caller who holds the most loses its least recently used responses.
    """

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._owners: dict[str, _Owned] = {}  # by the caller's name

    @property
    def num_bytes(self) -> int:
        return sum(owned.num_bytes for owned in self._owners.values())

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Store a response, replacing the owner's response of the same id. Evicts responses when the store is full."""
        owned = self._owners.setdefault(owner, _Owned())
        owned.hold(response.turn)
        owned.remove(response_id)
        owned.responses[response_id] = response
        owned.num_bytes += response.num_bytes
        owned.items |= dict.fromkeys(response.output, response_id)
        while self.num_bytes > self._max_bytes or self._num_responses > self._max_responses:
            most = max(self._owners, key=self._fraction)
            self.remove(most, next(iter(self._owners[most].responses)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        owned = self._owners.get(owner)
        if owned is None or response_id not in owned.responses:
            return None
        owned.responses.move_to_end(response_id)
        return owned.responses[response_id]

    def item(self, owner: str, item_id: str) -> bytes | None:
        """Return an output item as JSON, or None."""
        owned = self._owners.get(owner)
        if owned is None or item_id not in owned.items:
            return None
        return owned.responses[owned.items[item_id]].output[item_id]

    def remove(self, owner: str, response_id: str) -> bool:
        """Remove a response; return whether it existed."""
        owned = self._owners.get(owner)
        if owned is None or not owned.remove(response_id):
            return False
        if not owned.responses:
            del self._owners[owner]
        return True

    @property
    def _num_responses(self) -> int:
        return sum(len(owned.responses) for owned in self._owners.values())

    def _fraction(self, owner: str) -> float:
        """Return the fraction of the store's limits that an owner uses."""
        owned = self._owners[owner]
        return max(len(owned.responses) / max(self._max_responses, 1), owned.num_bytes / self._max_bytes)
