"""/v1/conversations: lists of items that responses continue and extend. In memory, bounded."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import Field

from server.apis.openai.responses.items import Item, ItemReference
from server.apis.openai.responses.pages import After, Limit, Order, page
from server.apis.openai.responses.store import Items, encoded, items_bytes
from server.generation.server_state import ServerState
from server.generation.warnings import Warnings
from server.http.bodies import Body, optional
from server.http.callers import caller_of
from server.http.errors import APIError
from server.http.reading import converted
from server.http.responses import json_response
from server.owned_store import OwnedStore

MAX_BYTES = 128 << 20
MAX_ITEMS = 20  # in one request
CONVERSATION_BYTES = 1000  # overhead of objects besides the content


@dataclass(slots=True)
class StoredConversation:
    """The items and metadata of one conversation."""

    id: str
    created_at: int
    metadata: dict[str, Any]
    items: Items = field(default_factory=dict)
    _items_bytes: int = 0  # kept up to date, since there may be very many items

    @property
    def num_bytes(self) -> int:
        return CONVERSATION_BYTES + len(msgspec.json.encode(self.metadata)) + self._items_bytes

    def add(self, items: Items) -> None:
        """Add items, replacing those with the same ids."""
        replaced = {item_id: self.items[item_id] for item_id in items if item_id in self.items}
        self._items_bytes += items_bytes(items) - items_bytes(replaced)
        self.items |= items

    def remove(self, item_id: str) -> None:
        self._items_bytes -= items_bytes({item_id: self.items.pop(item_id)})

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class ConversationStore:
    """The stored conversations of all callers."""

    def __init__(self, max_conversations: int, max_bytes: int = MAX_BYTES) -> None:
        self._store = OwnedStore[StoredConversation](max_conversations, max_bytes)

    def get(self, owner: str, conversation_id: str, *path: str) -> StoredConversation:
        """Return a conversation. Raises `APIError` 404 for an unknown id. `path`: the field that contains the id."""
        found = self._store.get(owner, conversation_id)
        if found is None:
            reason = f"no stored conversation has the id {conversation_id[:100]!r}: deleted or evicted"
            raise APIError(404, reason, *path, lead=": " if path else None)
        return found

    def put(self, owner: str, conversation: StoredConversation) -> None:
        """Store a conversation; also called after a change."""
        self._store.put(owner, conversation.id, conversation, conversation.num_bytes)

    def append(self, owner: str, conversation_id: str, items: Items) -> None:
        """Append items. Does nothing if the conversation no longer exists."""
        if (found := self._store.get(owner, conversation_id)) is not None:
            found.add(items)
            self.put(owner, found)

    def remove(self, owner: str, conversation_id: str) -> None:
        self._store.remove(owner, conversation_id)


class NewItems(Body):
    """Items to add to a conversation."""

    items: Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]


class NewConversation(Body):
    """A conversation to create."""

    items: Annotated[list[Item], Field(max_length=MAX_ITEMS)] | None = optional("The first items.")
    metadata: dict[str, Any] | None = optional("Arbitrary metadata, stored with the conversation.")


class ConversationChange(Body):
    """The new metadata of a conversation."""

    metadata: dict[str, Any]

    NO_EFFECT: ClassVar[Any] = {}


def input_item(item: Any) -> dict[str, Any]:
    """Convert a request's item to its stored form: with an id, and its text as a content part."""
    given: dict[str, Any] = item.model_dump(exclude_none=True)
    if isinstance(given.get("content"), str):
        kind = "output_text" if given.get("role") == "assistant" else "input_text"
        given["content"] = [{"type": kind, "text": given["content"]}]
    status = {"status": "completed"} if given["type"] == "message" else {}
    return {"id": f"{given['type'][:3]}_{secrets.token_hex(16)}", **status, **given}


def _listed(items: list[Any]) -> Items:
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            raise APIError(400, "must be an item, not an item_reference", "items", index)
    return encoded(map(input_item, items))


def add_conversation_routes(app: FastAPI, server: ServerState, store: ConversationStore) -> None:
    @app.post("/v1/conversations", response_model=None)
    async def create_conversation(body: NewConversation, request: Request) -> Response:
        warnings, items = await converted(request, body, lambda body: _listed(body.items or []))
        owner = caller_of(request).name
        made = StoredConversation(f"conv_{secrets.token_hex(16)}", int(time.time()), body.metadata or {})
        store.put(owner, made)
        store.append(owner, made.id, items)
        return json_response(made.as_dict(), warnings)

    @app.get("/v1/conversations/{conversation_id}")
    async def get_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
        return store.get(caller_of(request).name, conversation_id).as_dict()

    @app.post("/v1/conversations/{conversation_id}", response_model=None)
    async def update_conversation(body: ConversationChange, request: Request) -> Response:
        warnings, metadata = await converted(request, body, lambda body: body.metadata)
        owner = caller_of(request).name
        found = store.get(owner, request.path_params["conversation_id"])
        found.metadata = metadata
        store.put(owner, found)
        return json_response(found.as_dict(), warnings)

    @app.delete("/v1/conversations/{conversation_id}")
    async def delete_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
        owner = caller_of(request).name
        store.get(owner, conversation_id)
        store.remove(owner, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    _add_item_routes(app, server, store)


def _add_item_routes(app: FastAPI, server: ServerState, store: ConversationStore) -> None:
    items_path = "/v1/conversations/{conversation_id}/items"

    @app.post(items_path, response_model=None)
    async def create_items(body: NewItems, request: Request) -> Response:
        warnings, items = await converted(request, body, lambda body: _listed(body.items))
        owner, conversation_id = caller_of(request).name, request.path_params["conversation_id"]
        store.get(owner, conversation_id)
        store.append(owner, conversation_id, items)
        return json_response(page(items, len(items), "asc", None), warnings)

    @app.get(items_path, response_model=None)
    async def list_items(
        conversation_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: After = None
    ) -> Response:
        found = store.get(caller_of(request).name, conversation_id)
        return json_response(page(found.items, limit, order, after), Warnings(False))

    @app.get(items_path + "/{item_id}", response_model=None)
    async def get_item(conversation_id: str, item_id: str, request: Request) -> Response:
        found = store.get(caller_of(request).name, conversation_id)
        return Response(_item(found, item_id), media_type="application/json")

    @app.delete(items_path + "/{item_id}")
    async def delete_item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
        owner = caller_of(request).name
        found = store.get(owner, conversation_id)
        _item(found, item_id)
        found.remove(item_id)
        store.put(owner, found)
        return found.as_dict()


def _item(found: StoredConversation, item_id: str) -> bytes:
    item = found.items.get(item_id)
    if item is None:
        raise APIError(404, f"the conversation has no item {item_id[:100]!r}", "item_id", lead=None)
    return item
