"""A stand-in for the server behind the chat page: the API's shapes with canned answers.

Run it by hand to work on the page: python -m tests.support.page_stub --port 8001
"""

import argparse
import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

STATIC = Path(__file__).resolve().parents[2] / "server" / "static"
MODEL = "quire-demo"

ANSWER = """A **paged** KV cache keeps attention keys and values in small *blocks*, much as an operating system \
keeps memory in pages.

1. Every request gets a **block table**, a list of the blocks it owns.
2. A new token takes the next free slot, found as `block_id * block_size + offset`.
3. When a request ends its blocks return to the free list:
   - no copying,
   - no holes larger than one block.

```python
def slot(block_table: list[int], position: int, block_size: int = 16) -> int:
    return block_table[position // block_size] * block_size + position % block_size
```

So memory is wasted only in the last block of each sequence, and two requests that share a beginning \
can share its blocks."""

STORY = """Mira kept the lighthouse at the end of the long stone pier. Every evening she climbed the ninety steps, \
lit the lamp, and counted the boats until all of them were home.

One night a boat was missing. She turned the light to the rocks in the north and waited. At last a small sail came \
out of the fog, and the fisherman waved his hat.

“I was not afraid,” he said when he stood on the pier. “I could see that you were still awake.”"""

THOUGHTS = """The user wants to know how a paged cache keeps its promises. Let me go through it.

First the block table: it maps positions to blocks, so nothing has to be contiguous.
Then the free list: what is released last is found again first."""

HOSTILE = '<img src=x onerror="document.title=1"> <b>bold?</b> [bad](javascript:alert(1)) and **[good](https://example.org/)**.'


def answer_to(question: str, messages: list[dict[str, Any]]) -> str:
    question = question.lower()
    if "story" in question:
        return STORY
    if "hostile" in question:
        return HOSTILE
    if "echo" in question:
        return f"```json\n{json.dumps(messages)}\n```"
    if numbers := re.findall(r"\d+", question):
        return f"{' plus '.join(numbers)} is **{sum(map(int, numbers))}**."
    if "long" in question:
        return "\n\n".join([ANSWER, STORY] * 3)
    return ANSWER


def build_app(api_key: str | None, delay: float) -> FastAPI:
    app = FastAPI()
    app.mount("/static", StaticFiles(directory=STATIC))

    def unauthorized(request: Request) -> bool:
        return api_key is not None and request.headers.get("authorization") != f"Bearer {api_key}"

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/v1/models", response_model=None)
    def models(request: Request) -> JSONResponse:
        if unauthorized(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        card = {"id": MODEL, "object": "model", "created": 1, "root": MODEL, "parent": None, "max_model_len": 2048}
        return JSONResponse({"object": "list", "data": [card]})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> JSONResponse | StreamingResponse:
        if unauthorized(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        body = await request.json()
        question = body["messages"][-1]["content"]
        if "refuse" in question:
            message = "This model's maximum context length is 2048 tokens. However, your prompt contains 3101 tokens."
            error = {"message": message, "type": "BadRequestError", "param": "messages", "code": 400}
            return JSONResponse({"error": error}, 400)
        text = answer_to(question, body["messages"])
        pieces = re.findall(r"\s*\S{1,6}", text)[: body.get("max_tokens", 10_000)]
        thoughts = re.findall(r"\s*\S{1,6}", THOUGHTS) if "think" in question else []
        breaks = "break" in question
        return StreamingResponse(sse(thoughts, pieces, breaks, delay), media_type="text/event-stream; charset=utf-8")

    return app


async def sse(thoughts: list[str], pieces: list[str], breaks: bool, delay: float) -> AsyncIterator[bytes]:
    """The events of one answer, in network chunks whose borders fall inside lines and inside characters."""
    events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"reasoning": thought, "reasoning_content": thought}) for thought in thoughts]
    events += [chunk({"content": piece}, "stop" if piece is pieces[-1] else None) for piece in pieces]
    usage = {"prompt_tokens": 12, "completion_tokens": len(pieces), "total_tokens": 12 + len(pieces)}
    events.append(json.dumps({"choices": [], "usage": usage}))
    if breaks:
        error = {"message": "The engine stopped.", "type": "InternalServerError", "param": None, "code": 500}
        events = [*events[: len(events) // 3], json.dumps({"error": error})]
    for event in [*events, "[DONE]"]:
        raw = f": keep-alive\n\ndata: {event}\n\n".encode()
        cut = len(raw) * 2 // 3
        yield raw[:cut]
        await asyncio.sleep(delay)
        yield raw[cut:]


def chunk(delta: dict[str, str], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return json.dumps(body, ensure_ascii=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--api-key")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds within each event")
    flags = parser.parse_args()
    uvicorn.run(build_app(flags.api_key, flags.delay), host="127.0.0.1", port=flags.port, log_level="warning")
