"""What every endpoint does, with examples: the words and data of the API reference. Knows no code behind it.

In the examples `MODEL` stands for the name of the model that is served.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "MODEL"


@dataclass(frozen=True)
class Endpoint:
    """A method and a path."""

    method: str
    path: str
    tag: str
    summary: str
    description: str = ""
    requests: dict[str, Any] = field(default_factory=dict)  # title → JSON body
    answer: Any = None  # JSON of a whole answer to the first of them; None: see `text`
    text: str | None = None  # an answer that is no JSON
    events: str | None = None  # the beginning and the end of a stream
    statuses: tuple[int, ...] = ()  # errors besides those that all endpoints of the tag may give


_HELLO = [{"role": "user", "content": "Hello!"}]
_WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "Today's weather", "parameters": _WEATHER}}
_CREATED = 1767225600
_USAGE = {
    "prompt_tokens": 9,
    "total_tokens": 12,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_CARD = {
    "id": MODEL,
    "object": "model",
    "created": _CREATED,
    "owned_by": "quire",
    "root": MODEL,
    "parent": None,
    "max_model_len": 4096,
    "permission": [],
}
_RESPONSE = {
    "id": "resp_5a0c",
    "object": "response",
    "created_at": _CREATED,
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

CHAT, TEXT, RESPONSES, MESSAGES, EMBEDDINGS, MODELS, SERVICE = (
    "Chat",
    "Text",
    "Responses",
    "Messages (Anthropic)",
    "Embeddings",
    "Models and tokens",
    "Service",
)

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        CHAT,
        "Continue a conversation",
        "The prompt is made by the model's chat template. With `stream` the answer comes as server-sent events, the last "
        "of which is `[DONE]`. Tool calls and reasoning are told apart from the content. `response_format` and the schemas "
        "of tools are kept to by a grammar.",
        {
            "An answer": {"model": MODEL, "messages": _HELLO, "max_tokens": 50},
            "A stream": {
                "model": MODEL,
                "messages": _HELLO,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "Sampling": {"model": MODEL, "messages": _HELLO, "temperature": 0.7, "top_p": 0.9, "seed": 1, "n": 2},
            "An answer by a JSON schema": {
                "model": MODEL,
                "messages": _HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": _WEATHER}},
            },
            "Tools": {"model": MODEL, "messages": _HELLO, "tools": [_TOOL]},
            "A call that must be": {"model": MODEL, "messages": _HELLO, "tools": [_TOOL], "tool_choice": "required"},
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
            "Log-probabilities": {"model": MODEL, "messages": _HELLO, "logprobs": True, "top_logprobs": 3},
            "Continue an answer": {
                "model": MODEL,
                "messages": [*_HELLO, {"role": "assistant", "content": "Dear"}],
                "continue_final_message": True,
            },
        },
        {
            "id": "chatcmpl-2f1b",
            "object": "chat.completion",
            "created": _CREATED,
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
            "usage": _USAGE,
        },
        events='data: {"id":"chatcmpl-2f1b","object":"chat.completion.chunk","created":1767225600,"model":"MODEL",'
        '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        'data: {"id":"chatcmpl-2f1b","object":"chat.completion.chunk","created":1767225600,"model":"MODEL",'
        '"choices":[{"index":0,"delta":{"content":"Hi!"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
        "\n\ndata: [DONE]\n\n",
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        TEXT,
        "Continue a text",
        "`prompt` is a text, token ids, or a list of either; each gets `n` answers.",
        {
            "An answer": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20},
            "Several prompts": {"model": MODEL, "prompt": ["One", "Two"], "n": 2, "stop": ["\n"]},
            "Token ids": {"model": MODEL, "prompt": [1, 2, 3], "logprobs": 2},
            "A stream": {"model": MODEL, "prompt": "Once upon a time", "stream": True, "echo": True},
        },
        {
            "id": "cmpl-90aa",
            "object": "text_completion",
            "created": _CREATED,
            "model": MODEL,
            "choices": [
                {"index": 0, "text": " there was", "logprobs": None, "finish_reason": "length", "stop_reason": None}
            ],
            "usage": _USAGE,
        },
        events='data: {"id":"cmpl-90aa","object":"text_completion","created":1767225600,"model":"MODEL","choices":'
        '[{"index":0,"text":" there","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\ndata: [DONE]\n\n',
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        RESPONSES,
        "Continue a conversation of items",
        "OpenAI's newer API. A response is kept in memory unless `store` is false, and can be continued by its id.",
        {
            "An answer": {"model": MODEL, "input": "Hello!", "max_output_tokens": 50},
            "Instructions": {"model": MODEL, "instructions": "Answer briefly.", "input": _HELLO},
            "A stream": {"model": MODEL, "input": "Hello!", "stream": True},
            "Tools": {
                "model": MODEL,
                "input": "Hello!",
                "tools": [{"type": "function", "name": "weather", "parameters": _WEATHER}],
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
        RESPONSES,
        "Count the tokens of a prompt",
        requests={"A text": {"model": MODEL, "input": "Hello!"}},
        answer={"object": "response.input_tokens", "input_tokens": 9},
        statuses=(404,),
    ),
    Endpoint("GET", "/v1/responses/{response_id}", RESPONSES, "A kept response", answer=_RESPONSE, statuses=(404,)),
    Endpoint(
        "DELETE",
        "/v1/responses/{response_id}",
        RESPONSES,
        "Forget a response",
        answer={"id": "resp_5a0c", "object": "response", "deleted": True},
        statuses=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        RESPONSES,
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
    Endpoint(
        "POST",
        "/v1/messages",
        MESSAGES,
        "Continue a conversation, in Anthropic's words",
        "For Anthropic's clients, with `http://HOST:PORT` as their base URL. Errors have Anthropic's shape here.",
        {
            "An answer": {"model": MODEL, "max_tokens": 50, "messages": _HELLO},
            "A stream": {"model": MODEL, "max_tokens": 50, "messages": _HELLO, "stream": True},
            "Thinking": {
                "model": MODEL,
                "max_tokens": 500,
                "system": "Answer briefly.",
                "messages": _HELLO,
                "thinking": {"type": "adaptive"},
            },
            "Tools": {
                "model": MODEL,
                "max_tokens": 50,
                "messages": _HELLO,
                "tools": [{"name": "weather", "description": "Today's weather", "input_schema": _WEATHER}],
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
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}'
        '\n\nevent: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
        '"text":"Hi!"}}\n\nevent: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        '"usage":{…}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        MESSAGES,
        "Count the tokens of a prompt",
        requests={"A conversation": {"model": MODEL, "messages": _HELLO}},
        answer={"input_tokens": 9},
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        EMBEDDINGS,
        "Texts to vectors",
        "Of the served model's final hidden states: of the last token, or the mean of all (`pooling`). `input` is a text, "
        "token ids, or a list of either. Any model gives vectors; those of models trained for embeddings are good ones.",
        {
            "A text": {"model": MODEL, "input": "Once upon a time"},
            "Several texts": {"model": MODEL, "input": ["One", "Two"], "encoding_format": "base64"},
            "Token ids": {"model": MODEL, "input": [[1, 2, 3], [4]], "pooling": "mean"},
            "A conversation": {"model": MODEL, "messages": _HELLO},
        },
        {
            "id": "embd-41f0",
            "object": "list",
            "created": _CREATED,
            "data": [{"index": 0, "object": "embedding", "embedding": [0.6, -0.8]}],
            "model": MODEL,
            "usage": {**_USAGE, "completion_tokens": 0, "total_tokens": 9},
        },
        statuses=(404, 409),
    ),
    Endpoint(
        "GET",
        "/v1/models",
        MODELS,
        "The models",
        "Every name that the model is served by is one; `max_model_len` is the most tokens of prompt and answer.",
        answer={"object": "list", "data": [_CARD]},
    ),
    Endpoint("GET", "/v1/models/{name}", MODELS, "One model", answer=_CARD, statuses=(404,)),
    Endpoint(
        "POST",
        "/tokenize",
        MODELS,
        "Text or a conversation to token ids",
        requests={
            "A text": {"model": MODEL, "prompt": "Hello!", "return_token_strs": True},
            "A conversation": {"model": MODEL, "messages": _HELLO},
        },
        answer={"count": 2, "max_model_len": 4096, "tokens": [9707, 0], "token_strs": ["Hello", "!"]},
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/detokenize",
        MODELS,
        "Token ids to text",
        requests={"Token ids": {"model": MODEL, "tokens": [1, 2]}},
        answer={"prompt": "Hello!"},
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/requests/{request_id}/abort",
        SERVICE,
        "End a request",
        "By the `id` of its answer; a request may choose the end of that itself, as `request_id`. Its client gets what "
        "there is, with the `finish_reason` `abort`.",
        answer={"id": "chatcmpl-2f1b", "aborted": True},
        statuses=(404,),
    ),
    Endpoint(
        "GET",
        "/load",
        SERVICE,
        "How busy the server is",
        "`server_load`: requests that are being answered. Also as `/v1/load`.",
        answer={
            "server_load": 3,
            "num_requests_running": 2,
            "num_requests_waiting": 1,
            "kv_cache_usage": 0.25,
            "num_blocks": 1000,
            "num_free_blocks": 750,
        },
    ),
    Endpoint("GET", "/v1/load", SERVICE, "How busy the server is", answer={"server_load": 3}),
    Endpoint("GET", "/health", SERVICE, "Whether the engine runs", "The body is empty.", text="", statuses=(503,)),
    Endpoint("GET", "/ping", SERVICE, "The same", text="", statuses=(503,)),
    Endpoint("POST", "/ping", SERVICE, "The same", text="", statuses=(503,)),
    Endpoint("GET", "/version", SERVICE, "The server's version", answer={"version": "0.1.0"}),
    Endpoint(
        "GET",
        "/metrics",
        SERVICE,
        "Counters for Prometheus",
        "Under vLLM's names.",
        text='vllm:num_requests_running{engine="0",model_name="MODEL"} 2.0\n',
    ),
)
