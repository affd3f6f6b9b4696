"""The API reference of /v1/responses and /v1/conversations."""

from __future__ import annotations

from typing import Any

from server.apis.endpoint import CREATED, HELLO, MODEL, WEATHER, Endpoint

TAG = "Responses"
_RESPONSE = {
    "id": "resp_5a0c",
    "object": "response",
    "created_at": CREATED,
    "status": "completed",
    "model": MODEL,
    "output": [
        {
            "id": "msg_77f1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hi!", "annotations": [], "logprobs": []}],
        }
    ],
    "previous_response_id": None,
    "usage": {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    },
}
_ITEMS: dict[str, Any] = {
    "object": "list",
    "data": [
        {
            "id": "mes_01",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": "Hello!"}],
        }
    ],
    "first_id": "mes_01",
    "last_id": "mes_01",
    "has_more": False,
}
_CONVERSATIONS = "Conversations"
_CONVERSATION_PATH = "/v1/conversations/{conversation_id}"
_CONVERSATION = {"id": "conv_1c2d", "object": "conversation", "created_at": CREATED, "metadata": {"topic": "demo"}}

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        TAG,
        "Continue a conversation of items",
        "OpenAI's newer API. A response is stored in memory unless `store` is false, and can be continued by its id.",
        {
            "An answer": {"model": MODEL, "input": "Hello!", "max_output_tokens": 50},
            "Instructions": {"model": MODEL, "instructions": "Answer briefly.", "input": HELLO},
            "A stream": {"model": MODEL, "input": "Hello!", "stream": True},
            "In the background": {"model": MODEL, "input": "Hello!", "background": True},
            "Tools": {
                "model": MODEL,
                "input": "Hello!",
                "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}],
            },
        },
        _RESPONSE,
        events='event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{…}}\n\n'
        'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
        '"item_id":"msg_77f1","output_index":0,"content_index":0,"delta":"Hi!","logprobs":[]}\n\n'
        'event: response.completed\ndata: {"type":"response.completed","sequence_number":8,"response":{…}}\n\n',
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        TAG,
        "Count the tokens of a prompt",
        requests={"A text": {"model": MODEL, "input": "Hello!"}},
        answer={"object": "response.input_tokens", "input_tokens": 9},
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/responses/compact",
        TAG,
        "Compact a conversation",
        "The model summarises the conversation in one item. The user's messages are kept unchanged.",
        {"A conversation": {"model": MODEL, "input": HELLO}},
        {
            "id": "resp_5a0c",
            "object": "response.compaction",
            "created_at": CREATED,
            "output": [*_ITEMS["data"], {"id": "cmp_01", "type": "compaction", "encrypted_content": "quire:…"}],
            "usage": _RESPONSE["usage"],
        },
        statuses=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}",
        TAG,
        "Get a stored response, or one running in the background",
        "With `stream=true`, returns the events of a background response after number `starting_after`.",
        answer=_RESPONSE,
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/responses/{response_id}/cancel",
        TAG,
        "Cancel a response running in the background",
        answer=_RESPONSE | {"status": "cancelled", "background": True},
        statuses=(404,),
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{response_id}",
        TAG,
        "Delete a stored response",
        answer={"id": "resp_5a0c", "object": "response", "deleted": True},
        statuses=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        TAG,
        "List the input items of a stored response",
        answer=_ITEMS,
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/conversations",
        _CONVERSATIONS,
        "Create a conversation",
        "Responses with `conversation` continue it and append their items. In memory; limited like responses.",
        {"With a first item": {"items": HELLO, "metadata": {"topic": "demo"}}},
        _CONVERSATION,
    ),
    Endpoint("GET", _CONVERSATION_PATH, _CONVERSATIONS, "Get a conversation", answer=_CONVERSATION, statuses=(404,)),
    Endpoint(
        "POST",
        _CONVERSATION_PATH,
        _CONVERSATIONS,
        "Update a conversation's metadata",
        requests={"Metadata": {"metadata": {"topic": "demo"}}},
        answer=_CONVERSATION,
        statuses=(404,),
    ),
    Endpoint(
        "DELETE",
        _CONVERSATION_PATH,
        _CONVERSATIONS,
        "Delete a conversation",
        answer={"id": "conv_1c2d", "object": "conversation.deleted", "deleted": True},
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        _CONVERSATION_PATH + "/items",
        _CONVERSATIONS,
        "Add items",
        requests={"A message": {"items": HELLO}},
        answer=_ITEMS,
        statuses=(404,),
    ),
    Endpoint("GET", _CONVERSATION_PATH + "/items", _CONVERSATIONS, "List items", answer=_ITEMS, statuses=(404,)),
    Endpoint(
        "GET",
        _CONVERSATION_PATH + "/items/{item_id}",
        _CONVERSATIONS,
        "Get an item",
        answer=_ITEMS["data"][0],
        statuses=(404,),
    ),
    Endpoint(
        "DELETE",
        _CONVERSATION_PATH + "/items/{item_id}",
        _CONVERSATIONS,
        "Delete an item",
        answer=_CONVERSATION,
        statuses=(404,),
    ),
)
