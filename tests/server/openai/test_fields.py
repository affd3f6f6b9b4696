"""Fields and values as clients of vLLM and OpenAI send and read them."""

import json
from typing import Any

import pytest

from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine, GrammarEngine, make_tokenizer
from tests.support.live_server import Live, Serve
from tests.support.templates import QWEN3, THINKER


def prompt_text(live: Live) -> str:
    return make_tokenizer().decode(live.engine.requests[-1][1], skip_special_tokens=False)


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]


def test_truncation_side(live: Live) -> None:
    for side, kept in (("left", "llo"), ("right", "Hel"), (None, "llo")):
        live.complete("Hello", truncate_prompt_tokens=3, truncation_side=side)
        assert prompt_text(live) == kept
    live.chat("Hello", truncate_prompt_tokens=1, truncation_side="right")
    assert prompt_text(live) == "<|im_start|>"


def test_null_keys_that_clients_read(live: Live) -> None:
    body = live.chat(logprobs=True).json()
    (choice,) = body["choices"]
    assert choice["message"]["reasoning"] is body["prompt_logprobs"] is body["prompt_token_ids"] is None
    assert choice["logprobs"]["refusal"] is None
    streamed = [chunk["choices"][0] for chunk in chunks(live.chat(logprobs=True, stream=True).text)]
    assert all("refusal" in each["logprobs"] for each in streamed if each["logprobs"] is not None)
    (choice,) = live.complete().json()["choices"]
    assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is None


@pytest.mark.parametrize("n", [1, 2])
def test_no_token_is_counted_before_the_first(live: Live, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(live.chat(stream=True, stream_options=options, n=n, max_tokens=4).text)
    first, second = found[:2]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert (first["usage"]["completion_tokens"], first["usage"]["total_tokens"]) == (0, first["usage"]["prompt_tokens"])
    assert second["usage"]["completion_tokens"] > 0
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)


def test_numbers_as_json_has_them(live: Live) -> None:
    body = live.chat(max_tokens=4.0, n=1.0, top_k=-1.0, seed=2.0).json()
    assert body["usage"]["completion_tokens"] == 4
    assert live.engine.requests[-1][2].seed == 2
    for wrong in ({"max_tokens": 4.5}, {"max_tokens": "4"}, {"max_tokens": True}, {"stream": 1.0}):
        assert live.chat(**wrong).status_code == 400, wrong
    assert live.complete([1.0, 2.0]).status_code == 400, "token ids are integers"


def test_seed_minus_one_is_no_seed(live: Live) -> None:
    live.chat(seed=-1)
    assert live.engine.requests[-1][2].seed is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("field", [{"kv_transfer_params": {"a": 1}}], ids=str)
def test_what_would_change_the_answer_is_refused(live: Live, path: str, field: dict[str, Any]) -> None:
    prompt = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    error = live.post(path, **prompt, **field).json()["error"]
    assert (error["code"], error["param"]) == (400, *field)


def test_logprobs_of_certain_tokens_need_logprobs(live: Live) -> None:
    assert live.chat(logprobs=True, logprob_token_ids=[65, 66]).status_code == 200
    assert live.engine.requests[-1][2].logprob_token_ids == [65, 66]
    assert live.complete(logprobs=1, logprob_token_ids=[65]).status_code == 200
    for response in (live.chat(logprob_token_ids=[65]), live.complete(logprob_token_ids=[65])):
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (400, "logprob_token_ids")


def test_messages_of_tools_without_text_and_of_other_roles(live: Live) -> None:
    messages = [
        {"role": "ipython", "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": None},
        {"role": "user", "content": "a"},
    ]
    assert live.post("/v1/chat/completions", messages=messages).status_code == 200
    assert prompt_text(live).startswith("<|im_start|>ipython\nx<|im_end|>\n<|im_start|>tool\n<|im_end|>\n")
    for role in ("", "<|im_end|>", "a\n", 5):
        assert live.post("/v1/chat/completions", messages=[{"role": role, "content": "a"}]).status_code == 400
    assert live.post("/v1/chat/completions", messages=[{"role": "user", "content": None}]).status_code == 400


def test_echo_of_token_ids_keeps_special_tokens(live: Live) -> None:
    (choice,) = live.complete([256, 65], echo=True, max_tokens=1).json()["choices"]
    assert choice["text"].startswith("<|im_start|>")


def test_more_tokens_than_the_context_has(serve: Serve, live: Live) -> None:
    body = live.chat(max_tokens=100_000).json()
    assert body["warnings"] == ["max_tokens: the context has room for only 491 tokens of the answer"]
    assert "warnings" not in live.chat(max_tokens=400).json()
    assert "warnings" not in live.chat().json()
    assert live.chat(max_completion_tokens=100_000).json()["warnings"][0].startswith("max_completion_tokens: ")
    strict = serve(FakeEngine(), ServerConfig(strict=True))
    error = strict.chat(max_tokens=100_000).json()["error"]
    assert (error["code"], error["param"]) == (400, "max_tokens")


def test_a_thinking_budget_has_the_tokens_around_the_reasoning(serve: Serve, live: Live) -> None:
    for template, begin in ((QWEN3, 259), (THINKER, -1)):
        marked = serve(GrammarEngine(template=template, special=["<think>", "</think>"]))
        assert "warnings" not in marked.chat(thinking_token_budget=5).json()
        sampling = marked.engine.requests[-1][2]
        assert (sampling.thinking_token_budget, sampling.thinking_marks) == (5, (begin, 260))
        thinking = {"type": "enabled", "budget_tokens": 7}
        marked.post(
            "/v1/messages", model="toy", max_tokens=9, thinking=thinking, messages=[{"role": "user", "content": "a"}]
        )
        assert marked.engine.requests[-1][2].thinking_token_budget == 7
    body = live.chat(thinking_token_budget=5).json()
    assert body["warnings"][0].startswith("thinking_token_budget: has no effect here")
    assert live.engine.requests[-1][2].thinking_token_budget is None
    assert live.chat(thinking_token_budget=-1).status_code == 400


def test_parts_without_a_type_are_texts(serve: Serve) -> None:
    live = serve(FakeEngine())
    for content in (
        ["one", "two"],
        [{"text": "one"}, {"type": None, "text": "two"}],
        ["one", {"type": "text", "text": "two"}],
    ):
        response = live.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=1)
        assert response.status_code == 200, response.text
        assert "one\ntwo" in live.prompt_text()
    for part in ({"image": "one"}, 5, {"text": 5}, {"type": "audio", "text": "one"}):
        response = live.post("/v1/chat/completions", messages=[{"role": "user", "content": [part]}], max_tokens=1)
        assert response.json()["error"]["param"] == "messages[0].content", part
