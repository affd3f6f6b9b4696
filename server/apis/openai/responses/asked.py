"""A request to /v1/responses, resolved: earlier responses, conversations and items that it refers to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.apis.openai.responses.background import Background
from server.apis.openai.responses.conversations import ConversationStore, input_item
from server.apis.openai.responses.items import Item, ItemReference, items_left_out, messages_of
from server.apis.openai.responses.protocol import ResponsesRequest
from server.apis.openai.responses.store import Items, ResponseStore, Turn, encoded
from server.apis.openai.responses.tools import CallableTool, callable_tools, tools_left_out
from server.generation.caller import Caller
from server.generation.request import GenerationRequest, Message
from server.http.errors import APIError

_items: TypeAdapter[Any] = TypeAdapter(list[Item])


@dataclass(frozen=True, slots=True)
class Kept:
    """The server's stores for earlier requests."""

    responses: ResponseStore
    conversations: ConversationStore
    background: Background


@dataclass(frozen=True, slots=True)
class Asked:
    """A converted request."""

    request: GenerationRequest
    previous: Turn | None  # the turn that the request continues
    conversation: str | None  # id of the conversation that the response is appended to
    messages: list[Message]  # the request's new messages, without instructions
    input_items: Items  # the request's new items
    tools: list[CallableTool]
    left_out: list[tuple[tuple[str | int, ...], str]]  # paths of what the model does not see, with reasons


class Converter:
    """Converts a request. May be called in any thread."""

    def __init__(self, kept: Kept, caller: Caller, body: ResponsesRequest) -> None:
        """Raises `APIError` 404 if the response or conversation to continue does not exist."""
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
        """Size of the stored data to read besides the request."""
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
        if item.id not in self._referred:  # a repeated reference: a short request could expand to gigabytes
            raise APIError(400, f"the item {item.id[:100]!r} is referred to twice", "input", index, "id")
        if (found := self._referred.pop(item.id)) is None:
            raise APIError(404, f"no stored item has the id {item.id[:100]!r}", "input", index, "id")
        return items_of([msgspec.json.decode(found)])[0]


def items_of(objects: list[dict[str, Any]]) -> list[Any]:
    """Convert JSON objects to items."""
    return list(_items.validate_python(objects))


def _previous(kept: Kept, caller: Caller, response_id: str | None) -> Turn | None:
    if response_id is None:
        return None
    stored = kept.responses.get(caller.name, response_id)
    if stored is not None:
        return stored.turn
    if kept.background.get(caller.name, response_id) is not None:
        raise APIError(400, f"{response_id!r} is still being generated: retry later", "previous_response_id")
    reason = f"no stored response has the id {response_id[:100]!r}: never stored, deleted or evicted"
    raise APIError(404, reason, "previous_response_id")
