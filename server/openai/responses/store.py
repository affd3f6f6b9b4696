"""Responses that clients may ask for again or go on from. In memory and bounded: the least recently used ones go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from server.generation.request import Message

MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response."""

    body: bytes  # its JSON
    messages: list[Message]  # the conversation, its answer included, without instructions
    input_items: list[dict[str, Any]]  # what was new in the request
    output_items: list[dict[str, Any]]
    num_bytes: int  # of what is new in it


Key = tuple[str, str]  # the name of the caller that owns it, and its id


class ResponseStore:
    """At most `max_responses` responses, and `max_bytes` of them."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[Key, StoredResponse] = OrderedDict()
        self._items: dict[Key, dict[str, Any]] = {}
        self._num_bytes = 0

    def put(self, key: Key, response: StoredResponse) -> None:
        self.remove(key)
        self._responses[key] = response
        self._num_bytes += response.num_bytes
        self._items |= {(key[0], item["id"]): item for item in response.output_items}
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._responses)))

    def get(self, key: Key) -> StoredResponse | None:
        response = self._responses.get(key)
        if response is not None:
            self._responses.move_to_end(key)
        return response

    def item(self, key: Key) -> dict[str, Any] | None:
        """An item of an answer."""
        return self._items.get(key)

    def remove(self, key: Key) -> bool:
        """Whether there was one."""
        response = self._responses.pop(key, None)
        if response is None:
            return False
        self._num_bytes -= response.num_bytes
        for item in response.output_items:
            del self._items[key[0], item["id"]]
        return True
