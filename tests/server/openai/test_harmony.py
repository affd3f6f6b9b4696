"""gpt-oss's harmony format over HTTP: what each API makes of channels, and how conversations reach the template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.settings import ServerConfig
from tests.server.openai.test_tools import TOOLS, streamed
from tests.support.live_server import Serve
from tests.support.live_server import start_answering as start
from tests.support.templates import HARMONY

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FOUR = THOUGHT + "<|channel|>final<|message|>Four."
ARGUMENTS = '{"city": "Köln"}'
CALL = THOUGHT + "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ARGUMENTS


def test_chat(serve: Serve) -> None:
    live = start(serve, HARMONY, FOUR)
    answer = live.chat().json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Four.")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT) - len("<|start|>assistant")
    found, _ = streamed(live)
    assert (found["reasoning"], found["content"]) == ("Hm.", "Four.")


def test_a_call(serve: Serve) -> None:
    live = start(serve, HARMONY, CALL)
    choice = live.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Hm.")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", ARGUMENTS)
    found, _ = streamed(live, tools=TOOLS)
    assert found["calls"] == [["weather", ARGUMENTS]]
    assert "<|" not in json.dumps({key: value for key, value in found.items() if key != "calls"})


def test_responses_and_messages(serve: Serve) -> None:
    live = start(serve, HARMONY, FOUR)
    output = live.post("/v1/responses", input="2+2").json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    body = {
        "model": "toy",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "2+2"}],
        "thinking": {"type": "adaptive"},
    }
    blocks = live.post("/v1/messages", **body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]


def test_a_conversation_with_calls_is_rendered(serve: Serve) -> None:
    live = start(serve, HARMONY, FOUR)
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in enumerate(("weather", "time"))
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "I look.", "reasoning": "Two.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "sun"},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert live.chat(messages=messages, tools=TOOLS).status_code == 200
    text = live.prompt_text()
    for part in (
        "<|channel|>analysis<|message|>Two.\n\nI look.<|end|>",
        "to=functions.weather<|channel|>commentary json<|message|>{}<|call|><|start|>functions.weather to=assistant"
        '<|channel|>commentary<|message|>"sun"<|end|>',
        'functions.time to=assistant<|channel|>commentary<|message|>"noon"<|end|><|start|>assistant',
    ):
        assert part in text


@pytest.mark.parametrize(("effort", "taken"), [("high", "high"), ("minimal", "low"), ("xhigh", "high")])
def test_efforts_that_the_format_lacks(serve: Serve, effort: str, taken: str) -> None:
    live = start(serve, HARMONY, FOUR)
    answer = live.chat(reasoning_effort=effort)
    assert f"Reasoning: {taken}<|end|>" in live.prompt_text()
    assert (f"treated as {taken}" in answer.text) is (effort != taken)


def test_a_final_message_that_is_continued(serve: Serve) -> None:
    live = start(serve, HARMONY, " and five.")
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "Four"}]
    body: dict[str, Any] = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    message = live.chat(**body).json()["choices"][0]["message"]
    assert message["content"] == " and five."
    assert live.prompt_text().endswith("<|channel|>final<|message|>Four")


def test_the_parser_may_be_named(serve: Serve) -> None:
    live = start(serve, "{{ messages[0].content }}", CALL, ServerConfig(tool_call_parser="openai"))
    assert live.chat(tools=TOOLS).json()["choices"][0]["finish_reason"] == "tool_calls"
