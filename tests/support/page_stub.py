"""A stand-in for the server behind the chat page: the API's shapes with canned answers, which words in questions
choose.

Run it by hand to work on the page: python -m tests.support.page_stub --port 8001
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from server.app import create_app
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine

STATIC = Path(__file__).resolve().parents[2] / "server" / "static"

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

RICH = r"""| Strategy | Memory wasted | Copies | Remark |
|:--|--:|:-:|---|
| Contiguous | 60–80 % | none | reserves the longest answer for every request |
| Paged | under **4 %** | none | `block_table` finds the slot |

The share that is wasted is \(w = \frac{b/2}{n}\), and attention is

$$\mathrm{softmax}\left(\frac{QK^\top}{\sqrt{d}}\right)V = \sum_{i=1}^{n} \alpha_i v_i$$

- [x] blocks of 16 tokens
- [ ] larger pages for long contexts

```python
def slot(block_table: list[int], position: int) -> int:
    # the block, then the offset within it
    return block_table[position // 16] * 16 + position % 16
```

The figures are those of a published study[^1].

[^1]: W. Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, 2023.
"""

THOUGHTS = """The user wants to know how a paged cache keeps its promises. Let me go through it.

First the block table: it maps positions to blocks, so nothing has to be contiguous.
Then the free list: what is released last is found again first."""

HOSTILE = (
    '<img src=x onerror="document.title=1"> <b>bold?</b> [bad](javascript:alert(1)) '
    "and **[good](https://example.org/)**."
)

METRICS = """vllm:num_requests_running{{model_name="m",engine="0"}} 3.0
vllm:num_requests_waiting{{model_name="m",engine="0"}} 2.0
vllm:kv_cache_usage_perc{{model_name="m",engine="0"}} 0.25
vllm:prefix_cache_queries_total{{model_name="m",engine="0"}} 200.0
vllm:prefix_cache_hits_total{{model_name="m",engine="0"}} 150.0
quire:prefix_misses_total{{engine="0",model_name="m",reason="not_seen"}} 12.0
quire:prefix_misses_total{{engine="0",model_name="m",reason="other_tokens"}} 1200.0
quire:prefix_misses_total{{engine="0",model_name="m",reason="evicted"}} 0.0
vllm:spec_decode_num_draft_tokens_total{{model_name="m",engine="0"}} 400.0
vllm:spec_decode_num_accepted_tokens_total{{model_name="m",engine="0"}} 350.0
vllm:generation_tokens_total{{model_name="m",engine="0"}} {generated}
vllm:prompt_tokens_total{{model_name="m",engine="0"}} 500.0
"""


@dataclass
class Stub:
    """Orders for the stand-in, and the requests that it got."""

    delay: float = 0.0  # seconds within each event
    api_key: str | None = None
    models: list[str] = field(default_factory=lambda: ["quire-demo"])
    reads: list[str] = field(default_factory=lambda: ["text"])  # of all models
    writes: list[str] = field(default_factory=lambda: ["text"])
    ready: dict[str, Any] = field(default_factory=lambda: {"phase": "ready"})
    answers: dict[str, str] = field(default_factory=dict)  # of questions, word for word
    requests: list[dict[str, Any]] = field(default_factory=list)  # the bodies of chat completions
    generated: int = 0  # tokens, which the metrics count
    growth: int = 300  # of these with each look at the metrics

    def answer_to(self, question: str, messages: list[dict[str, Any]]) -> str:
        if question in self.answers:
            return self.answers[question]
        if match := re.match(r"endless (\d+)", question):
            return endless(int(match[1]))
        for word, text in {"story": STORY, "hostile": HOSTILE, "table": RICH}.items():
            if word in question.lower():
                return text
        if "echo" in question:
            return f"```json\n{json.dumps(messages)}\n```"
        if numbers := re.findall(r"\d+", question):
            return f"{' plus '.join(numbers)} is **{sum(map(int, numbers))}**."
        return "\n\n".join([ANSWER, STORY] * 3) if "long" in question else ANSWER


def endless(num_tokens: int) -> str:
    """A long answer of every kind of block, of about so many tokens as `pieces_of` cuts them."""
    blocks = [ANSWER, RICH.partition("The figures")[0], STORY]
    text: list[str] = []
    total = 0
    while total < num_tokens:
        text.append(blocks[len(text) % 3])
        total += len(pieces_of(text[-1]))
    return "\n\n".join(text)


def pieces_of(text: str) -> list[str]:
    return re.findall(r"\s*\S{1,6}|\s+$", text)


def build_app(stub: Stub) -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.mount("/static", StaticFiles(directory=STATIC))
    description = create_app(FakeEngine(), ServerConfig()).openapi()

    def unauthorized(request: Request) -> bool:
        return stub.api_key is not None and request.headers.get("authorization") != f"Bearer {stub.api_key}"

    @app.middleware("http")
    async def guard(request: Request, go_on: Any) -> Response:
        free = request.url.path == "/" or request.url.path.startswith(("/static", "/health", "/readyz"))
        if not free and unauthorized(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await go_on(request)

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/openapi.json")
    def openapi() -> JSONResponse:
        return JSONResponse(description)

    @app.get("/health", response_model=None)
    def health() -> Response:
        return Response(status_code=200 if stub.ready["phase"] == "ready" else 503)

    @app.get("/readyz")
    def readyz() -> JSONResponse:
        return JSONResponse(stub.ready, 200 if stub.ready["phase"] == "ready" else 503)

    @app.get("/metrics", response_model=None)
    def metrics() -> Response:
        stub.generated += stub.growth
        return PlainTextResponse(METRICS.format(generated=stub.generated))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        return JSONResponse({"count": len(json.dumps((await request.json())["messages"])) // 4, "max_model_len": 2048})

    @app.get("/v1/models")
    def models() -> JSONResponse:
        cards = [
            {
                "id": name,
                "object": "model",
                "root": name,
                "max_model_len": 2048,
                "input_modalities": stub.reads,
                "output_modalities": stub.writes,
            }
            for name in stub.models
        ]
        return JSONResponse({"object": "list", "data": cards})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        body = await request.json()
        stub.requests.append(body)
        return answer(stub, body)

    return app


def answer(stub: Stub, body: dict[str, Any]) -> Response:
    last = body["messages"][-1]
    question = last["content"]
    if isinstance(question, list):  # with images
        question = " ".join(part.get("text", "") for part in question)
    if "refuse" in question:
        message = "This model's maximum context length is 2048 tokens. However, your prompt contains 3101 tokens."
        error = {"message": message, "type": "BadRequestError", "param": "messages", "code": 400}
        return JSONResponse({"error": error}, 400)
    if dies := "engine dies" in question:
        stub.ready = {"phase": "restarting", "fraction": None, "seconds_left": 3.0, "num_restarts": 1}
    deltas: list[dict[str, Any]] = []
    finish: str | None = "stop"
    if body.get("tools") and last["role"] == "user" and "call" in question:
        name = body["tools"][-1]["function"]["name"]
        arguments = json.dumps({"expression": "(17 + 25) * 3"})
        call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": name, "arguments": ""}}
        deltas = [{"tool_calls": [call]}]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in pieces_of(arguments)]
        finish = "tool_calls"
    else:
        if "think" in question:
            deltas += [{"reasoning": thought, "reasoning_content": thought} for thought in pieces_of(THOUGHTS)]
        text = f"The tool said {question}." if last["role"] == "tool" else stub.answer_to(question, body["messages"])
        text = " and so it goes on." if body.get("continue_final_message") else text
        pieces = pieces_of(text)
        limit = body.get("max_tokens", 10**9)
        finish = "length" if len(pieces) > limit else "stop"
        deltas += [{"content": piece} for piece in pieces[:limit]]
    finish = "abort" if "abort" in question else None if "cut short" in question else finish
    breaks = dies or "break" in question
    stream = sse(stub, body, deltas, finish, breaks)
    return StreamingResponse(stream, media_type="text/event-stream; charset=utf-8")


async def sse(
    stub: Stub, body: dict[str, Any], deltas: list[dict[str, Any]], finish: str | None, breaks: bool
) -> AsyncIterator[bytes]:
    """The events of one answer, in network chunks whose borders fall inside lines and inside characters."""
    events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk(delta, logprobs=bool(body.get("logprobs"))) for delta in deltas]
    if finish is not None:
        events.append(chunk({"content": ""}, finish))
    details = {"cached_tokens": 8}
    usage = {"prompt_tokens": 12, "completion_tokens": len(deltas), "total_tokens": 12 + len(deltas)}
    times = {"queue_time_ms": 1.5, "prefill_time_ms": 2.0, "time_to_first_token_ms": 120.0, "tokens_per_second": 50.0}
    events.append(json.dumps({"choices": [], "usage": {**usage, "prompt_tokens_details": details}, "metrics": times}))
    if breaks:
        error = {"message": "The engine stopped.", "type": "InternalServerError", "param": None, "code": 500}
        events = [*events[: len(events) // 3], json.dumps({"error": error})]
    for event in [*events, "[DONE]"]:
        raw = f": keep-alive\n\ndata: {event}\n\n".encode()
        if not stub.delay:
            yield raw
            continue
        cut = len(raw) * 2 // 3
        yield raw[:cut]
        await asyncio.sleep(stub.delay)
        yield raw[cut:]


def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: bool = False) -> str:
    found = None
    if logprobs and "content" in delta:
        top = [{"token": delta["content"], "logprob": -0.1}, {"token": " other", "logprob": -2.5}]
        found = {"content": [{**top[0], "top_logprobs": top}]}
    choice = {"index": 0, "delta": delta, "logprobs": found, "finish_reason": finish}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    return json.dumps(body, ensure_ascii=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--api-key")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds within each event")
    flags = parser.parse_args()
    stub = Stub(flags.delay, flags.api_key)
    uvicorn.run(build_app(stub), host="127.0.0.1", port=flags.port, log_level="warning")
