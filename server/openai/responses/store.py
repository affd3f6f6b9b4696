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


class ResponseStore:
    """At most `max_responses` responses, and `max_bytes` of them."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._num_bytes = 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.remove(response_id)
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        self._items |= {item["id"]: item for item in response.output_items}
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        response = self._responses.get(response_id)
        if response is not None:
            self._responses.move_to_end(response_id)
        return response

    def item(self, item_id: str) -> dict[str, Any] | None:
        """An item of an answer."""
        return self._items.get(item_id)

    def remove(self, response_id: str) -> bool:
        """Whether there was one."""
        response = self._responses.pop(response_id, None)
        if response is None:
            return False
        self._num_bytes -= response.num_bytes
        for item in response.output_items:
            del self._items[item["id"]]
        return True
