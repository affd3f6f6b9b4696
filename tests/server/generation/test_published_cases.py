"""Requests and templates that were seen to fail, and published templates, if they are there: see `FOLDERS`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.conversations import ALL, TOOL, requests_of, texts_of
from tests.support.fake_engine import FakeEngine, GrammarEngine, make_tokenizer
from tests.support.live_server import Live, Serve

# The folders of the templates (NAME.jinja) and of the cases (NAME.json, with `template_or_model` and `request`).
FOLDERS = {name: Path(os.environ.get(f"QUIRE_TEST_{name}", "/nonexistent")) for name in ("TEMPLATES", "CASES")}
OTHER_NAMES = {"ByteDance-Seed/Seed-OSS-36B-Instruct": "ByteDance-Seed-OSS"}  # model → name of the file
OWN = "own: {"  # begin of a template in a case
HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>")


def templates() -> Iterator[Path]:
    yield from sorted(FOLDERS["TEMPLATES"].glob("*.jinja"))


def template_of(case: dict[str, Any]) -> Path | None:
    """Return the template of a case: a file's name is the model's, with - for /, or its last part."""
    words = str(case["template_or_model"]).split(" ")[0]
    if words in OTHER_NAMES:
        return FOLDERS["TEMPLATES"] / f"{OTHER_NAMES[words]}.jinja"
    names = {
        letters(words),
        letters(words.rpartition("/")[2]),
        letters(words.rpartition("/")[2].replace("-", "Fun", 1)),
    }
    found = [path for path in templates() if letters(path.stem).startswith(tuple(names))]
    return min(found, key=lambda path: len(path.stem)) if found and "/" in words else None


def letters(name: str) -> str:
    return re.sub("[^a-z0-9.]", "", name.lower())


def all_cases() -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDERS["CASES"].glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def cases() -> Iterator[dict[str, Any]]:
    for case in all_cases():
        request = case["request"]
        kinds = ("F1", "F2", "F4", "F6", "F7", "F8", "F10", "F11", "M1", "M5")
        if case["id"].split("-")[0] in kinds and "body" in request:
            yield case


def engine(template: Path | str | None) -> FakeEngine:
    """`template`: its file or its text."""
    text = template.read_text(encoding="utf-8") if isinstance(template, Path) else template
    options: dict[str, Any] = {"template": text} if text is not None else {}
    made = FakeEngine(max_model_len=32768, **options)
    assert made.tokenizer is not None
    made.tokenizer.special_tokens_map["bos_token"] = "<|bos|>"  # most templates have it
    return made


def prompt_of(live: Live, path: str, answer: dict[str, Any]) -> str:
    tokens = answer["tokens"] if path == "/tokenize" else live.engine.requests[-1][1]
    assert live.engine.tokenizer is not None
    return live.engine.tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.skipif(not FOLDERS["CASES"].is_dir(), reason="QUIRE_TEST_CASES names no folder")
def test_every_case_is_answered(serve: Serve) -> None:
    num_cases = 0
    for case in cases():
        given, path = case["request"]["body"], case["request"]["path"]
        words = case["template_or_model"]
        template = words.removeprefix("own: ") if words.startswith(OWN) else template_of(case)
        if template is None and not words.startswith("any"):
            continue
        live = serve(engine(template))
        response = live.post(path, **{**given, **({"model": "toy"} if "model" in given else {})})
        assert response.status_code == 200, (case["id"], response.text)
        prompt = prompt_of(live, path, response.json())
        wanted = [str(each.get("content") or "") for each in given.get("messages", given.get("input", []))]
        wanted += [str(given.get("instructions") or "")]
        lost = [text for text in wanted if text and not text.startswith("[") and text not in prompt]
        assert not lost, (case["id"], prompt)
        if "Paris" in json.dumps(given):
            assert "Paris" in prompt, (case["id"], prompt)
        if "WHYCALL" in json.dumps(given):
            assert "WHYCALL" in prompt, (case["id"], prompt)
        num_cases += 1
    assert num_cases > 20


@pytest.mark.slow
@pytest.mark.skipif(not FOLDERS["TEMPLATES"].is_dir(), reason="QUIRE_TEST_TEMPLATES names no folder")
def test_published_templates_in_every_api(serve: Serve) -> None:
    """No message is lost, nothing is refused, and what is changed has a warning."""
    for path in templates():
        live = serve(engine(path))
        for title, messages in ALL.items():
            tools = [TOOL] if any("tool_calls" in each for each in messages) else None
            for api, body in requests_of(messages, tools).items():
                if api == "/v1/messages" and messages[-1]["role"] == "assistant":
                    continue  # there, the answer is continued
                response = live.post(api, **body)
                assert response.status_code == 200, (path.stem, title, api, response.text)
                answer = response.json()
                prompt = prompt_of(live, api, answer)
                lost = [text for text in texts_of(messages) if text not in prompt]
                assert not lost, (path.stem, title, api, prompt)
                assert not any("leaves out" in each for each in answer.get("warnings", ())), (path.stem, title, answer)


def scripted(kind: str) -> list[dict[str, Any]]:
    """The cases of a kind that have a script; one without content where there are none, for a test that is skipped."""
    found = [each for each in all_cases() if each["id"].startswith(kind) and "script" in each and template_of(each)]
    return found or [{"id": "none"}]


@pytest.mark.skipif(not FOLDERS["CASES"].is_dir(), reason="QUIRE_TEST_CASES names no folder")
@pytest.mark.parametrize("case", scripted("F3"), ids=lambda case: str(case["id"]))
def test_stop_strings_of_answers_with_reasoning(case: dict[str, Any], serve: Serve) -> None:
    template = template_of(case)
    assert template is not None
    live = serve(engine(template))
    if "gpt-oss" in template.stem:
        live.engine.tokenizer = make_tokenizer(template.read_text(encoding="utf-8"), HARMONY_TOKENS)
    live.engine.answer = case["script"]
    quoted = re.search("content: '(.*)'", case["expected"])
    whole = re.split(r"<\|message\|>|</think>\s*", case["script"])[-1]
    body = case["request"]["body"] | {"max_tokens": 200}
    message = live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["content"] == (quoted[1] if quoted else whole), message
    assert not re.search(r"<\||think>", message["content"] + message["reasoning"]), message
    assert streamed_calls(live, body)[0] == message["content"]


def calls_of(path: str, answer: dict[str, Any]) -> tuple[str, list[tuple[str, Any]], str]:
    """The content, the calls and what ended them in an answer of an API."""
    if path == "/v1/chat/completions":
        (choice,) = answer["choices"]
        found = [each["function"] for each in choice["message"].get("tool_calls") or ()]
        calls = [(each["name"], json.loads(each["arguments"])) for each in found]
        return choice["message"].get("content") or "", calls, choice["finish_reason"]
    if path == "/v1/messages":
        texts = [each["text"] for each in answer["content"] if each["type"] == "text"]
        calls = [(each["name"], each["input"]) for each in answer["content"] if each["type"] == "tool_use"]
        return "".join(texts), calls, answer["stop_reason"]
    if path == "/v1/responses":
        texts = [part["text"] for each in answer["output"] if each["type"] == "message" for part in each["content"]]
        items = [each for each in answer["output"] if each["type"] == "function_call"]
        return "".join(texts), [(each["name"], json.loads(each["arguments"])) for each in items], answer["status"]
    found = [each["function"] for each in answer["message"].get("tool_calls") or ()]
    return answer["message"]["content"], [(each["name"], each["arguments"]) for each in found], answer["done_reason"]


def streamed_calls(live: Live, body: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of a streamed chat completion."""
    lines = live.post("/v1/chat/completions", **body, stream=True).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith('data: {"')]
    names, texts = dict[int, str](), dict[int, str]()
    for each in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        names[each["index"]] = each["function"].get("name") or names[each["index"]]
        texts[each["index"]] = texts.get(each["index"], "") + (each["function"].get("arguments") or "")
    calls = [(name, json.loads(texts[index])) for index, name in names.items()]
    return "".join(delta.get("content") or "" for delta in deltas), calls


@pytest.mark.skipif(not FOLDERS["CASES"].is_dir(), reason="QUIRE_TEST_CASES names no folder")
@pytest.mark.parametrize("case", scripted("M1"), ids=lambda case: str(case["id"]))
def test_a_call_as_the_model_writes_it(case: dict[str, Any], serve: Serve) -> None:
    template = template_of(case)
    assert template is not None
    live = serve(GrammarEngine(template=template.read_text(encoding="utf-8"), max_model_len=32768))
    assert live.engine.tokenizer is not None
    live.engine.tokenizer.special_tokens_map["bos_token"] = "<|bos|>"
    live.engine.answer = case["script"]
    given = case["request"]["body"]
    wanted = [("get_weather", {"city": "Paris", "days": 3})]
    for path, body in requests_of(given["messages"], given["tools"], max_tokens=300).items():
        if path == "/tokenize":
            continue
        if "</think>" not in case["script"]:
            body.pop("thinking", None)  # its prompt would open the reasoning, which the script does not close
        response = live.post(path, **body)
        assert response.status_code == 200, (path, response.text)
        content, calls, end = calls_of(path, response.json())
        assert (content.strip(), calls) == ("", wanted), (path, response.text)
        assert end in ("tool_calls", "tool_use", "completed", "stop"), (path, end)
    assert streamed_calls(live, given) == ("", wanted)
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        content, calls = streamed_calls(live, given | {"tool_choice": choice})
        assert (content.strip(), calls[0][0], calls[0][1]["city"]) == ("", "get_weather", "Paris"), choice


@pytest.mark.slow
@pytest.mark.skipif(not FOLDERS["CASES"].is_dir(), reason="QUIRE_TEST_CASES names no folder")
def test_deviations_from_harmony(serve: Serve) -> None:
    """Wherever an answer is cut, no markup is shown, whole or streamed."""
    for case in scripted("F5"):
        template = template_of(case)
        assert template is not None
        live = serve(engine(template))
        live.engine.tokenizer = make_tokenizer(template.read_text(encoding="utf-8"), HARMONY_TOKENS)
        live.engine.answer = case["script"]
        given = case["request"]["body"]
        ends = re.findall("'(.*?)'", case["expected"])
        for max_tokens in (*range(1, 71), 200):
            body = given | {"max_tokens": max_tokens}
            message = live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
            shown = (message.get("reasoning") or "", message["content"] or "")
            assert not any("<|" in text for text in shown), (case["id"], max_tokens, shown)
            assert streamed_calls(live, body)[0] == shown[1], (case["id"], max_tokens)
        assert not ends or list(shown) == ends, case["id"]
