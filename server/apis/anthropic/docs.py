"""The API reference of /v1/messages."""

from __future__ import annotations

from server.apis.endpoint import HELLO, MODEL, WEATHER, Endpoint

TAG = "Messages (Anthropic)"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/messages",
        TAG,
        "Continue a conversation (Anthropic's API)",
        "For Anthropic's clients, with `http://HOST:PORT` as their base URL. Errors have Anthropic's format.",
        {
            "An answer": {"model": MODEL, "max_tokens": 50, "messages": HELLO},
            "A stream": {"model": MODEL, "max_tokens": 50, "messages": HELLO, "stream": True},
            "Thinking": {
                "model": MODEL,
                "max_tokens": 500,
                "system": "Answer briefly.",
                "messages": HELLO,
                "thinking": {"type": "adaptive"},
            },
            "Tools": {
                "model": MODEL,
                "max_tokens": 50,
                "messages": HELLO,
                "tools": [{"name": "weather", "description": "Today's weather", "input_schema": WEATHER}],
            },
        },
        {
            "id": "msg_c03d",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "Hi!"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 9,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 3,
            },
        },
        events='event: message_start\ndata: {"type":"message_start","message":{…}}\n\n'
        "event: content_block_start\n"
        'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}'
        '\n\nevent: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
        '"text":"Hi!"}}\n\nevent: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        '"usage":{…}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        TAG,
        "Count the tokens of a prompt",
        requests={"A conversation": {"model": MODEL, "messages": HELLO}},
        answer={"input_tokens": 9},
        statuses=(404,),
    ),
)
