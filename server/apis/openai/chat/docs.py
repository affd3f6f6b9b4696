"""The API reference of /v1/chat/completions."""

from __future__ import annotations

from server.apis.endpoint import CREATED, HELLO, MODEL, USAGE, WEATHER, Endpoint

TAG = "Chat"
_TOOL = {"type": "function", "function": {"name": "weather", "description": "Today's weather", "parameters": WEATHER}}

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        TAG,
        "Continue a conversation",
        "The model's chat template renders the prompt. With `stream`, the answer arrives as server-sent events ending "
        "with `[DONE]`. Tool calls and reasoning are separated from the content. A grammar enforces `response_format` "
        "and the schemas of tools.",
        {
            "An answer": {"model": MODEL, "messages": HELLO, "max_tokens": 50},
            "A stream": {
                "model": MODEL,
                "messages": HELLO,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "Sampling": {"model": MODEL, "messages": HELLO, "temperature": 0.7, "top_p": 0.9, "seed": 1, "n": 2},
            "A JSON schema": {
                "model": MODEL,
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}},
            },
            "Tools": {"model": MODEL, "messages": HELLO, "tools": [_TOOL]},
            "A forced tool call": {"model": MODEL, "messages": HELLO, "tools": [_TOOL], "tool_choice": "required"},
            "A tool's result": {
                "model": MODEL,
                "messages": [
                    {"role": "user", "content": "What is the weather in Rome?"},
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "call_1",
                                "type": "function",
                                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 24 °C"},
                ],
                "tools": [_TOOL],
            },
            "Log-probabilities": {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 3},
            "Continue an answer": {
                "model": MODEL,
                "messages": [*HELLO, {"role": "assistant", "content": "Dear"}],
                "continue_final_message": True,
            },
        },
        {
            "id": "chatcmpl-2f1b",
            "object": "chat.completion",
            "created": CREATED,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hi!", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": USAGE,
        },
        events='data: {"id":"chatcmpl-2f1b","object":"chat.completion.chunk","created":1767225600,"model":"MODEL",'
        '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        'data: {"id":"chatcmpl-2f1b","object":"chat.completion.chunk","created":1767225600,"model":"MODEL",'
        '"choices":[{"index":0,"delta":{"content":"Hi!"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
        "\n\ndata: [DONE]\n\n",
        statuses=(404,),
    ),
)
