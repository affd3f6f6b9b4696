"""Checks of Ollama's API."""

from __future__ import annotations

import json
from typing import Any

import httpx

from server.cli.checks.runner import AbsentError, Server, Suite, want

HELLO = [{"role": "user", "content": "Say hello."}]
SHORT = {"num_predict": 8}

suite = Suite()
check = suite.check


def _lines(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the objects of a stream."""
    response = server.post(path, body)
    if response.status_code in (404, 405, 501):
        raise AbsentError(f"status {response.status_code}")
    want(response.status_code == 200, f"status {response.status_code}")
    kind = response.headers.get("content-type", "")
    want(kind.startswith("application/x-ndjson"), f"the content type is {kind!r}, not application/x-ndjson")
    want(response.text.endswith("\n"), "the last line has no end")
    return [json.loads(line) for line in response.text.splitlines()]


@check("Ollama", "the models: /api/tags, /api/show, /api/ps")
def ollama_models(server: Server) -> None:
    names = [card["name"] for card in server.get("/api/tags").json()["models"]]
    want(names, "there are none")
    shown = server.ask("/api/show", model=names[0])
    want({"details", "model_info", "capabilities"} <= shown.keys(), "/api/show says too little")
    want("models" in server.get("/api/ps").json(), "/api/ps lists no models")
    want(server.get("/api/version").json()["version"], "there is no version")


@check("Ollama", "a chat, whole and streamed")
def ollama_chat(server: Server) -> None:
    body = server.ask("/api/chat", messages=HELLO, stream=False, options=SHORT)
    want(body["message"]["role"] == "assistant", "it is no message of the assistant")
    want(body["done"] is True, "the answer is not done")
    want(0 < body["eval_count"] <= 8, f"num_predict=8 gave {body['eval_count']} tokens")
    lines = _lines(server, "/api/chat", messages=HELLO, options=SHORT)
    want([line["done"] for line in lines] == [False] * (len(lines) - 1) + [True], "not the last line alone is done")
    want(lines[-1]["done_reason"] in ("stop", "length"), f"done_reason: {lines[-1]['done_reason']!r}")


@check("Ollama", "a prompt answered")
def ollama_generate(server: Server) -> None:
    lines = _lines(server, "/api/generate", prompt="Say hello.", options={**SHORT, "temperature": 0})
    whole = server.ask("/api/generate", prompt="Say hello.", stream=False, options={**SHORT, "temperature": 0})
    text = "".join(line["response"] for line in lines)
    want(text == whole["response"], "the stream has another text than the whole answer")


@check("Ollama", "embeddings")
def ollama_embeddings(server: Server) -> None:
    body = server.ask("/api/embed", input=["one", "two"], optional=True)
    want(len(body["embeddings"]) == 2, "two texts did not give two embeddings")


@check("Ollama", "errors as a text")
def ollama_error(server: Server) -> None:
    answer: httpx.Response = server.post("/api/chat", {"messages": HELLO, "model": "no such model"})
    want(answer.status_code == 404, f"status {answer.status_code} instead of 404")
    if not isinstance(answer.json().get("error"), str):
        # Skips the check if the endpoint is missing.
        server.ask("/api/chat", messages=HELLO, stream=False, options=SHORT)
        want(False, "the error is no text")
