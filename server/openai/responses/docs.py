"""What the API reference says of /v1/responses."""

from __future__ import annotations

from server.docs.endpoint import CREATED, HELLO, MODEL, WEATHER, Endpoint

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

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        TAG,
        "Continue a conversation of items",
        "OpenAI's newer API. A response is kept in memory unless `store` is false, and can be continued by its id.",
        {
            "An answer": {"model": MODEL, "input": "Hello!", "max_output_tokens": 50},
            "Instructions": {"model": MODEL, "instructions": "Answer briefly.", "input": HELLO},
            "A stream": {"model": MODEL, "input": "Hello!", "stream": True},
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
    Endpoint("GET", "/v1/responses/{response_id}", TAG, "A kept response", answer=_RESPONSE, statuses=(404,)),
    Endpoint(
        "DELETE",
        "/v1/responses/{response_id}",
        TAG,
        "Forget a response",
        answer={"id": "resp_5a0c", "object": "response", "deleted": True},
        statuses=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        TAG,
        "What a kept response was asked",
        answer={
            "object": "list",
            "data": [
                {
                    "id": "mes_01",
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "Hello!"}],
                }
            ],
            "first_id": "mes_01",
            "last_id": "mes_01",
            "has_more": False,
        },
        statuses=(404,),
    ),
)
