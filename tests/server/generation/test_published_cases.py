"""Requests and templates that were seen to fail, and published templates, if they are there: see `FOLDERS`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.conversations import ALL, TOOL, requests_of, texts_of
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

# The folders of the templates (NAME.jinja) and of the cases (NAME.json, with `template_or_model` and `request`).
FOLDERS = {name: Path(os.environ.get(f"QUIRE_TEST_{name}", "/nonexistent")) for name in ("TEMPLATES", "CASES")}
Serve = Callable[..., Live]


def templates() -> Iterator[Path]:
    yield from sorted(FOLDERS["TEMPLATES"].glob("*.jinja"))


def template_of(case: dict[str, Any]) -> Path | None:
    """The template of a case: a file's name is the model's, with - for /."""
    words = str(case["template_or_model"]).split(" ")[0]
    names = (words.replace("/", "-"), words.rpartition("/")[2])
    found = [path for path in templates() if path.stem.startswith(names)]
    return found[0] if found and "/" in words else None


def cases() -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDERS["CASES"].glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        request = case["request"]
        kinds = ("F1", "F2", "F4", "F6", "F7", "F8", "F10", "F11", "M1", "M5")
        if case["id"].split("-")[0] in kinds and "body" in request:
            yield case


def engine(template: Path | None) -> FakeEngine:
    options: dict[str, Any] = {"template": template.read_text(encoding="utf-8")} if template is not None else {}
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
        template = template_of(case)
        if template is None and not case["template_or_model"].startswith("any"):
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
