"""The API reference of Ollama's API."""

from __future__ import annotations

from typing import Any

import engine as quire
from server.apis.endpoint import HELLO, MODEL, WEATHER, Endpoint

TAG = "Ollama"
_TIME = "2026-01-01T00:00:00.000000Z"
_COUNTS: dict[str, Any] = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 51000000,
    "load_duration": 0,
    "prompt_eval_count": 9,
    "prompt_eval_duration": 9000000,
    "eval_count": 3,
    "eval_duration": 12000000,
}
_DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "8.0B",
    "quantization_level": "BF16",
}
_NAMES = {"name": f"{MODEL}:latest", "model": f"{MODEL}:latest"}
_CARD = {**_NAMES, "size": 16060556376, "digest": "9f86d081", "details": _DETAILS}

ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/chat",
        TAG,
        "Continue a conversation (Ollama's API)",
        "For Ollama's clients, with `http://HOST:PORT` as the host. The answer is streamed as lines of JSON unless "
        "`stream` is false.",
        {
            "An answer": {"model": MODEL, "messages": HELLO, "stream": False, "options": {"num_predict": 20}},
            "A stream": {"model": MODEL, "messages": HELLO, "stream": True, "options": {"temperature": 0.5}},
            "Tools": {
                "model": MODEL,
                "messages": HELLO,
                "stream": False,
                "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
            },
            "A JSON schema": {"model": MODEL, "messages": HELLO, "stream": False, "format": WEATHER},
        },
        {"model": MODEL, "created_at": _TIME, "message": {"role": "assistant", "content": "Hi!"}, **_COUNTS},
        lines=f'{{"model":"MODEL","created_at":"{_TIME}","message":'
        '{"role":"assistant","content":"Hi!"},"done":false}\n'
        f'{{"model":"MODEL","created_at":"{_TIME}","message":{{"role":"assistant","content":""}},"done":true,'
        '"done_reason":"stop",…}\n',
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/api/generate",
        TAG,
        "Answer a prompt (Ollama's API)",
        "The prompt is sent as a conversation of one message. With `raw`, the text itself is continued.",
        {
            "An answer": {"model": MODEL, "prompt": "Hello!", "stream": False},
            "A text continued": {"model": MODEL, "prompt": "Once upon a time", "raw": True, "stream": False},
            "A stream": {"model": MODEL, "prompt": "Hello!", "system": "Answer briefly.", "stream": True},
        },
        {"model": MODEL, "created_at": _TIME, "response": "Hi!", **_COUNTS},
        lines=f'{{"model":"MODEL","created_at":"{_TIME}","response":"Hi!","done":false}}\n'
        f'{{"model":"MODEL","created_at":"{_TIME}","response":"","done":true,"done_reason":"stop",…}}\n',
        statuses=(404,),
    ),
    Endpoint(
        "POST",
        "/api/embed",
        TAG,
        "Compute embeddings of length 1",
        requests={"Several texts": {"model": MODEL, "input": ["One", "Two"]}},
        answer={
            "model": MODEL,
            "embeddings": [[0.6, -0.8], [0.8, 0.6]],
            "total_duration": 14000000,
            "load_duration": 0,
            "prompt_eval_count": 2,
        },
        statuses=(404, 409),
    ),
    Endpoint(
        "POST",
        "/api/embeddings",
        TAG,
        "Compute an embedding (older endpoint)",
        requests={"A text": {"model": MODEL, "prompt": "One"}},
        answer={"embedding": [1.2, -1.6]},
        statuses=(404, 409),
    ),
    Endpoint(
        "GET",
        "/api/tags",
        TAG,
        "List the served names",
        answer={"models": [{**_CARD, "modified_at": _TIME}]},
    ),
    Endpoint(
        "POST",
        "/api/show",
        TAG,
        "Describe the model and its capabilities",
        requests={"The model": {"model": MODEL}},
        answer={
            "modelfile": "",
            "parameters": "temperature 0.7",
            "template": "{% for message in messages %}…",
            "details": _DETAILS,
            "model_info": {"general.architecture": "llama"},
            "capabilities": ["completion", "tools"],
            "modified_at": _TIME,
        },
        statuses=(400, 404),
    ),
    Endpoint(
        "GET",
        "/api/ps",
        TAG,
        "List the models in memory: the served names",
        answer={"models": [{**_CARD, "expires_at": _TIME, "size_vram": 16060556376, "context_length": 4096}]},
    ),
    Endpoint(
        "GET",
        "/api/version",
        TAG,
        "The Ollama version that this API follows",
        "Clients use it to detect supported features.",
        answer={"version": "0.13.0", "quire": quire.__version__},
    ),
)
