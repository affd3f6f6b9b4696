"""Stop strings match the visible answer: not reasoning, markup, calls or the gaps between, in every API, whole or
streamed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import templates
from tests.support.conversations import TOOL
from tests.support.fake_engine import FakeEngine, make_tokenizer
from tests.support.live_server import Live, Serve

HARMONY = (
    "<|channel|>analysis<|message|>Hmm. Question: why? OK<|end|><|start|>assistant"
    "<|channel|>final<|message|>It equals 4 apples."
)
THINKER = "Okay, restate it. Question: 2+2? Adding both.\n</think>\n\nThe sum: 4 apples."
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"city": "x END y"}}\n</tool_call>'


def start(serve: Serve, template: str, answer: str) -> Live:
    live = serve(FakeEngine(template=template, max_model_len=2048))
    live.engine.answer = answer
    return live


def streamed(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = live.post(path, **body, stream=True).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(each) for each in data]


def answers(live: Live, stop: list[str]) -> list[tuple[str, str]]:
    """The content and what ended it, in each API, whole and streamed."""
    messages = [{"role": "user", "content": "2+2?"}]
    chat: dict[str, Any] = {"messages": messages, "stop": stop, "temperature": 0, "max_tokens": 200}
    choice = live.post("/v1/chat/completions", **chat).json()["choices"][0]
    found = [(choice["message"]["content"] or "", choice["finish_reason"])]
    choices = [each["choices"][0] for each in streamed(live, "/v1/chat/completions", chat)]
    found.append(("".join(c["delta"].get("content") or "" for c in choices), choices[-1]["finish_reason"]))
    several = live.post("/v1/chat/completions", **chat, n=3, seed=0).json()["choices"][0]
    found.append((several["message"]["content"] or "", several["finish_reason"]))
    body: dict[str, Any] = {"model": "toy", "messages": messages, "stop_sequences": stop, "max_tokens": 200}
    answer = live.post("/v1/messages", **body, thinking={"type": "adaptive"}).json()
    content = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    found.append((content, "stop" if answer["stop_reason"] in ("stop_sequence", "end_turn") else answer["stop_reason"]))
    answer = live.post("/v1/responses", input="2+2?", stop=stop, max_output_tokens=200).json()
    texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    found.append(("".join(texts), "stop" if answer["status"] == "completed" else answer["status"]))
    options = {"stop": stop, "num_predict": 200}
    answer = live.post("/api/chat", model="toy", messages=messages, options=options, stream=False).json()
    found.append((answer["message"]["content"], answer["done_reason"]))
    return found


@pytest.mark.parametrize(
    ("template", "answer", "stop", "content"),
    [
        ("harmony", HARMONY, "assistant", "It equals 4 apples."),
        ("harmony", HARMONY, "channel", "It equals 4 apples."),
        ("harmony", HARMONY, "l", "It equa"),
        ("harmony", HARMONY, "<|end|>", "It equals 4 apples."),
        ("thinker", THINKER, "Question:", "The sum: 4 apples."),
        ("thinker", THINKER, "\n\n", "The sum: 4 apples."),
        ("thinker", THINKER, "4", "The sum: "),
        ("thinker", THINKER, "apples.", "The sum: 4 "),
        ("thinker", THINKER, "The", ""),
    ],
)
def test_every_api(serve: Serve, template: str, answer: str, stop: str, content: str) -> None:
    live = start(serve, templates.ALL[template], answer)
    assert answers(live, [stop]) == [(content, "stop")] * 6
    live.wait_idle()


def test_calls_and_gaps_have_no_stop_strings(serve: Serve) -> None:
    live = start(serve, templates.HERMES, f"I look it up.\n\n{CALL}")
    for stop in ("END", "\n\n", "lookup", "tool_call"):
        choice = live.chat(tools=[TOOL], stop=stop, max_tokens=300).json()["choices"][0]
        assert choice["message"]["content"] == "I look it up."
        assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
    choice = live.chat(tools=[TOOL], stop="it", max_tokens=300).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("I look ", "stop", "it")
    assert "tool_calls" not in choice["message"] or not choice["message"]["tool_calls"]


def test_tokens_log_probabilities_and_usage_end_with_the_stop_string(serve: Serve) -> None:
    live = start(serve, templates.THINKER, THINKER)
    for include in (False, True):
        body = live.chat(stop=["4 a"], include_stop_str_in_output=include, logprobs=True, return_token_ids=True).json()
        choice = body["choices"][0]
        seen = THINKER[: THINKER.index("4 a") + 3]
        assert choice["message"]["content"] == "The sum: " + "4 a" * include
        assert "".join(each["token"] for each in choice["logprobs"]["content"]) == seen
        assert body["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(seen)
        assert choice["stop_reason"] == "4 a"
    live.wait_idle()


def test_early_stop_strings_do_not_count(serve: Serve) -> None:
    live = start(serve, templates.THINKER, THINKER)
    for least, content in ((THINKER.index("4"), "The sum: "), (THINKER.index("4") + 1, "The sum: 4 apples.")):
        assert live.chat(stop="4", min_tokens=least).json()["choices"][0]["message"]["content"] == content


def test_the_text_of_a_special_token(serve: Serve) -> None:
    """It is left out of the text, and stops it all the same."""
    engine = FakeEngine()
    engine.tokenizer = make_tokenizer(special=["<file_sep>"])
    engine.answer = "return a + b<file_sep>other.py stuff"
    live = serve(engine)
    for include, text in ((False, "return a + b"), (True, "return a + b<file_sep>")):
        choice = live.complete(stop="<file_sep>", include_stop_str_in_output=include, max_tokens=60).json()["choices"][
            0
        ]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "<file_sep>")
        choice = live.chat(stop="<file_sep>", include_stop_str_in_output=include, max_tokens=60).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    thinker = FakeEngine(template=templates.THINKER)
    thinker.tokenizer = make_tokenizer(templates.THINKER, special=["<file_sep>"])
    thinker.answer = "Hm.<file_sep></think>a<file_sep>b"
    live = serve(thinker)
    assert live.chat(stop="<file_sep>", max_tokens=60).json()["choices"][0]["message"]["content"] == "a"
