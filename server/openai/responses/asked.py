"""A request of /v1/responses with all that it refers to: earlier responses, conversations, items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.generation.request import GenerationRequest, Message
from server.http.callers import Caller
from server.http.errors import APIError
from server.openai.responses.background import Background
from server.openai.responses.conversations import ConversationStore, input_item
from server.openai.responses.items import Item, ItemReference, items_left_out, messages_of
from server.openai.responses.protocol import ResponsesRequest
from server.openai.responses.store import Items, ResponseStore, Turn, encoded
from server.openai.responses.tools import CallableTool, callable_tools, tools_left_out

_items: TypeAdapter[Any] = TypeAdapter(list[Item])


@dataclass(frozen=True, slots=True)
class Kept:
    """What the server keeps of earlier requests."""

    responses: ResponseStore
    conversations: ConversationStore
    background: Background


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says, converted."""

    request: GenerationRequest
    previous: Turn | None  # what it goes on from
    conversation: str | None  # the id of that which it adds to
    messages: list[Message]  # what is new in the request, without instructions
    input_items: Items  # the same
    tools: list[CallableTool]
    left_out: list[tuple[tuple[str | int, ...], str]]  # what the model does not see: where it is, and why


class Converter:
    """Converts a request, in any thread."""

    def __init__(self, kept: Kept, caller: Caller, body: ResponsesRequest) -> None:
        """`APIError` 404 when what the request goes on from is not there."""
        references = [item.id for item in body.items if isinstance(item, ItemReference)]
        self._referred = {item_id: kept.responses.item(caller.name, item_id) for item_id in references}
        self._previous = _previous(kept, caller, body.previous_response_id)
        self._conversation = body.conversation_id
        self._before: list[bytes] = []  # items of the conversation
        if self._conversation is not None:
            found = kept.conversations.get(caller.name, self._conversation, "conversation")
            self._before = list(found.items.values())

    @property
    def num_bytes(self) -> int:
        """What is to be read besides the request."""
        num_bytes, turn = sum(map(len, self._before)), self._previous
        num_bytes += sum(len(item or b"") for item in self._referred.values())
        while turn is not None:
            num_bytes, turn = num_bytes + turn.num_bytes, turn.previous
        return num_bytes

    def __call__(self, body: ResponsesRequest) -> Asked:
        items = [self._resolved(item, index) for index, item in enumerate(body.items)]
        messages, input_items = messages_of(items), encoded(map(input_item, items))
        tools, left_out = callable_tools(body.tools), [*tools_left_out(body.tools), *items_left_out(items)]
        before = self._previous.conversation() if self._previous is not None else []
        if self._before:
            before = messages_of(items_of([msgspec.json.decode(item) for item in self._before]))
        request = body.neutral(before + messages, tools)
        return Asked(request, self._previous, self._conversation, messages, input_items, tools, left_out)

    def _resolved(self, item: Any, index: int) -> Any:
        if not isinstance(item, ItemReference):
            return item
        if item.id not in self._referred:  # it has been taken: a few words could ask for gigabytes
            raise APIError(400, f"the item {item.id[:100]!r} is there twice", "input", index, "id")
        if (found := self._referred.pop(item.id)) is None:
            raise APIError(404, f"there is no item {item.id[:100]!r}", "input", index, "id")
        return items_of([msgspec.json.decode(found)])[0]


def items_of(objects: list[dict[str, Any]]) -> list[Any]:
    """Items from the objects that they are in JSON."""
    return list(_items.validate_python(objects))


def _previous(kept: Kept, caller: Caller, response_id: str | None) -> Turn | None:
    if response_id is None:
        return None
    stored = kept.responses.get(caller.name, response_id)
    if stored is not None:
        return stored.turn
    if kept.background.get(caller.name, response_id) is not None:
        raise APIError(400, f"{response_id!r} is still being generated", "previous_response_id")
    reason = f"there is no response {response_id[:100]!r}: not stored, deleted, or too old"
    raise APIError(404, reason, "previous_response_id")
