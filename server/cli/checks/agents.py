"""Checks of what coding agents and their SDKs need besides answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from server.cli.checks.openai_api import ASK, CHAT, TOOL, finished, first
from server.cli.checks.other_apis import HELLO, MESSAGES, RESPONSES
from server.cli.checks.runner import AbsentError, Server, Suite, want

CLOSE = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [CLOSE]},
    {"type": "custom", "name": "patch", "description": "Edits files."},
    {"type": "web_search"},
]
POLL_SECONDS = 0.1
KIND = {"type": "string", "enum": ["a", "b"]}
# Schemas that libraries generate for ordinary types, each with a check of its instances.
SCHEMAS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "a record (zod)": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "maxLength": 3},
            "additionalProperties": {"type": "null"},
        },
        lambda found: all(len(name) <= 3 and value is None for name, value in found.items()),
    ),
    "an integer of 64 bits (zod, OpenAPI)": (
        {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
        lambda found: isinstance(found, int),
    ),
    "a decimal (pydantic)": (
        {"type": "string", "maxLength": 9, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        lambda found: float(found) is not None,
    ),
    "a set of a few values (pydantic)": (
        {"type": "array", "items": KIND, "uniqueItems": True},
        lambda found: len(found) == len(set(found)),
    ),
    "one of two names": (
        {
            "type": "object",
            "properties": {"a": KIND, "b": KIND},
            "additionalProperties": False,
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        lambda found: len(found) == 1,
    ),
    "a condition": (
        {
            "type": "object",
            "properties": {"kind": KIND, "note": {"type": "null"}},
            "required": ["kind"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "b"}}},
            "then": {"required": ["note"]},
        },
        lambda found: found["kind"] == "a" or "note" in found,
    ),
}

suite = Suite()
check = suite.check


@check("agents", "namespaces, custom and hosted tools (Codex)")
def tools(server: Server) -> None:
    body = server.ask(RESPONSES, input="Say hello.", tools=TOOLS, max_output_tokens=16, store=False, optional=True)
    want(body["object"] == "response", f"the object is {body['object']!r}")


@check("agents", "a custom tool is called")
def custom_tool(server: Server) -> None:
    asked: dict[str, Any] = {"tools": [TOOLS[1]], "tool_choice": {"type": "custom", "name": "patch"}, "store": False}
    body = server.ask(RESPONSES, input="Change it.", max_output_tokens=200, optional=True, **asked)
    kinds = [item["type"] for item in body["output"]]
    want("custom_tool_call" in kinds or body["status"] == "incomplete", f"the output is {kinds}")


@check("agents", "items of other servers are accepted")
def foreign_items(server: Server) -> None:
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    }
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}
    items = [*HELLO, search, call, output]
    server.ask(RESPONSES, input=items, max_output_tokens=8, store=False, optional=True)


def schema_check(name: str, schema: dict[str, Any], holds: Callable[[Any], bool]) -> None:
    @check("agents", f"a schema of {name}")
    def _(server: Server) -> None:
        format = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body = server.ask(CHAT, messages=HELLO, response_format=format, max_tokens=200, optional=True)
        text = finished(first(body))["message"]["content"]
        want(holds(json.loads(text)), f"{text[:200]!r} is no instance")


for _name, (_schema, _holds) in SCHEMAS.items():
    schema_check(_name, _schema, _holds)


@check("agents", "log-probabilities of certain tokens (vLLM)")
def certain_tokens(server: Server) -> None:
    asked = {"logprobs": 0, "logprob_token_ids": [1, 2], "return_tokens_as_token_ids": True}
    body = server.ask("/v1/completions", prompt="Hello", max_tokens=1, optional=True, **asked)
    (tops,) = first(body)["logprobs"]["top_logprobs"]
    want({"token_id:1", "token_id:2"} <= tops.keys(), f"there are {[*tops][:5]}")


@check("agents", "a response in the background")
def background(server: Server) -> None:
    body = server.ask(RESPONSES, input="Say hello.", background=True, max_output_tokens=8, optional=True)
    if body.get("background") is not True:
        raise AbsentError("it is answered at once")
    deadline = time.monotonic() + server.timeout
    while body["status"] in ("queued", "in_progress"):
        want(time.monotonic() < deadline, f"it is still {body['status']}")
        time.sleep(POLL_SECONDS)
        body = server.get(f"{RESPONSES}/{body['id']}").json()
    want(body["status"] in ("completed", "incomplete"), f"the status is {body['status']!r}")


@check("agents", "a conversation that responses go on from")
def conversation(server: Server) -> None:
    begun = server.http.post("/v1/conversations", json={"items": [{"role": "user", "content": "Be brief."}]})
    if begun.status_code != 200:
        raise AbsentError(f"status {begun.status_code}")
    made = begun.json()["id"]
    server.ask(RESPONSES, input="Say hello.", conversation=made, max_output_tokens=8)
    items = server.get(f"/v1/conversations/{made}/items").json()["data"]
    want(len(items) == 3, f"it has {len(items)} items after a question and an answer")
    want(server.http.delete(f"/v1/conversations/{made}").status_code == 200, "it cannot be deleted")


@check("agents", "a thread is kept or refused, never ignored (Anthropic)")
def thread(server: Server) -> None:
    server.ask(MESSAGES, messages=HELLO, max_tokens=1)
    asked = {"type": "continue", "previous_message_id": "msg_absent"}
    answer = server.post(MESSAGES, {"messages": HELLO, "max_tokens": 1, "thread": asked})
    want(answer.status_code in (400, 404), f"a thread that there is not: status {answer.status_code}")


@check("agents", "a cut tool call is no content")
def cut_call(server: Server) -> None:
    body = server.ask(CHAT, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=3, optional=True)
    choice = first(body)
    want(choice["finish_reason"] == "length", f"finish_reason: {choice['finish_reason']}")
    want(not choice["message"].get("content"), f"the content is {choice['message'].get('content')!r}")


@check("agents", "HEAD is answered as GET is")
def head(server: Server) -> None:
    want(server.http.head("/v1/models").status_code == 200, "HEAD /v1/models is refused")


@check("agents", "GET /tokenizer_info (vLLM)")
def tokenizer_info(server: Server) -> None:
    want("chat_template" in server.get("/tokenizer_info").json(), "it has no chat_template")
