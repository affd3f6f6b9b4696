"""The same conversations in every API: each message is in the prompt, whatever the chat template drops or refuses."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from server.settings import ServerConfig
from tests.support import templates
from tests.support.conversations import AGAIN, ALL, TOOL, call, called, requests_of, result, said, texts_of
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, Serve


def start(serve: Serve, template: str, **settings: Any) -> Live:
    return serve(FakeEngine(template=template, max_model_len=4096), ServerConfig(**settings))


def prompt_of(live: Live, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The prompt that the model sees, and the warnings."""
    response = live.post(path, **body)
    assert response.status_code == 200, (path, response.text)
    answer = response.json()
    tokens = answer["tokens"] if path == "/tokenize" else live.engine.requests[-1][1]
    assert live.engine.tokenizer is not None
    return live.engine.tokenizer.decode(tokens, skip_special_tokens=False), answer.get("warnings", [])


@pytest.mark.parametrize(
    "name", ["first message only", "turns only", "turns with calls", "null beside calls", "system first"]
)
def test_every_api_keeps_every_message(serve: Serve, name: str) -> None:
    live = start(serve, templates.PECULIAR[name])
    for title, messages in ALL.items():
        for path, body in requests_of(
            messages, [TOOL] if any("tool_calls" in each for each in messages) else None
        ).items():
            if path == "/v1/messages" and messages[-1]["role"] == "assistant":
                continue  # there, the answer is continued
            prompt, _ = prompt_of(live, path, body)
            assert [text for text in texts_of(messages) if text not in prompt] == [], (title, path, prompt)


def test_a_change_has_a_warning_in_every_api(serve: Serve) -> None:
    live = start(serve, templates.PECULIAR["system first"])
    strict = start(serve, templates.PECULIAR["system first"], strict=True)
    for path, body in requests_of(ALL["two systems"], None).items():
        prompt, warnings = prompt_of(live, path, body)
        assert prompt.startswith("[system]SYSONE\n\nSYSTWO[user]")
        field = "input" if path == "/v1/responses" else "messages"
        assert [each.partition(":")[0] for each in warnings] == [field], path
        assert strict.post(path, **body).status_code == 400, path
    for path, body in requests_of(ALL["system"], None).items():
        assert prompt_of(strict, path, body)[1] == []


ODD_MESSAGES: list[list[dict[str, Any]]] = [
    [said("assistant", None, content=[{"type": "refusal", "refusal": "NO"}])],
    [said("assistant", None, refusal="NO", tool_calls=None, function_call=None, audio=None)],
    [{"role": "assistant", "content": [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "YES"}]}],
    [{"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "T"}]}]}],
    [{"role": "assistant", "content": [{"type": "text", "text": ""}, {"type": "text", "text": None}]}],
    [{"role": "assistant", "content": []}],
    [{"role": "assistant"}],
    [called({"id": None, "type": None, "function": {"name": "lookup", "arguments": "{}"}}), result("R", "x")],
    [called({"function": {"name": "lookup"}}), {"role": "tool", "content": None}],
    [called(call(), content=None), {"role": "tool", "content": [{"type": "text", "text": "R"}]}],
    [
        {"role": "assistant", "content": None, "function_call": {"name": "lookup", "arguments": "{}"}},
        {"role": "function", "name": "lookup", "content": "R"},
    ],
]


@pytest.mark.parametrize("messages", ODD_MESSAGES)
def test_chat_messages_that_clients_send_back(live: Live, messages: list[dict[str, Any]]) -> None:
    body = live.post("/v1/chat/completions", messages=[said("user", "2+2?"), *messages, AGAIN], max_tokens=2)
    assert body.status_code == 200, body.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": None}]}]}),
        ("/v1/responses", {"input": [{"role": "assistant", "content": None}]}),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": '{"a'}]}),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": None, "call_id": None}]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": None}]}),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": None, "content": None}]}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": None}]}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [{"type": "text", "text": None}]}]}),
        ("/v1/messages",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": None}]}]}),
        ("/v1/messages",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": '{"a'}]}]}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": None}]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": None}]}]}),
        ("/api/chat", {"messages": [{"role": "assistant", "content": None, "tool_calls": None}]}),
        ("/api/chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]}),
    ],
)  # fmt: skip
def test_items_that_clients_send_back(live: Live, path: str, body: dict[str, Any]) -> None:
    """Each in the middle of a conversation."""
    more: dict[str, dict[str, Any]] = {
        "/v1/responses": {"max_output_tokens": 2},
        "/v1/messages": {"model": "toy", "max_tokens": 2},
    }
    name = "input" if path == "/v1/responses" else "messages"
    whole: dict[str, Any] = {name: [said("user", "2+2?"), *body[name], AGAIN], "model": "toy"} | more.get(
        path, {"stream": False}
    )
    response = live.post(path, **whole)
    assert response.status_code == 200, response.text


# ---- what Quire answers can be sent back ----

FRAGMENTS = [
    "Hello", " 👋 ", "\n\n", "<think>", "</think>", "Hm. ", "<tool_call>", "</tool_call>",
    '{"name": "lookup", "arguments": ',
    '{"city": "Köln"}', '{"city": "\\ud83d"}', "{", "}", '"', "\\", "[TOOL_CALLS]", "lookup",
    "<|channel|>analysis<|message|>",
    "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>", " to=functions.lookup", "null", "[]",
    "<function=lookup>",
    '<tool_call>\n{"name": "lookup", "arguments": {"city": "Köln"}}\n</tool_call>',
]  # fmt: skip


def sent_back(path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of an answer, as its clients append them, each call with a result."""
    match path:
        case "/v1/chat/completions":
            message = answer["choices"][0]["message"]
            return [message, *(result("R", each["id"]) for each in message.get("tool_calls") or ())]
        case "/v1/responses":
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            outputs = [{"type": "function_call_output", "call_id": each["call_id"], "output": "R"} for each in calls]
            return [*answer["output"], *outputs]
        case "/v1/messages":
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "R"} for each in calls]
            turn = {"role": "assistant", "content": answer["content"]}
            return [turn, {"role": "user", "content": results}] if results else [turn]
    message = answer["message"]
    return [message, *({"role": "tool", "content": "R"} for _ in message.get("tool_calls") or ())]


@pytest.mark.parametrize("name", ["hermes", "qwen3", "mistral", "llama3", "harmony", "thinker", "turns with calls"])
def test_any_answer_can_be_continued(serve: Serve, name: str) -> None:
    """Random answers, cut anywhere, are sent back in the API that gave them, twice."""
    live = start(serve, templates.ALL[name])
    dice = random.Random(name)
    for _ in range(6):
        text = "".join(dice.choices(FRAGMENTS, k=dice.randrange(1, 8)))
        assert live.engine.tokenizer is not None
        cut = dice.randrange(1, len(live.engine.tokenizer.encode(text)) + 2)
        live.engine.answer = text
        for path, body in requests_of([said("user", "2+2?")], [TOOL], cut).items():
            if path == "/tokenize":
                continue
            field = "input" if path == "/v1/responses" else "messages"
            for _ in range(2):
                response = live.post(path, **body)
                assert response.status_code == 200, (path, text, cut, response.text, json.dumps(body))
                body[field] = [*body[field], *sent_back(path, response.json()), AGAIN]
