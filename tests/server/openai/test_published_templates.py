"""Tool calls with published chat templates, if QUIRE_TEST_TEMPLATES names a folder of them (*.jinja)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.text.chat_template import ChatTemplate, ChatTemplateError
from server.parsing.probe import find_tool_format
from server.parsing.probe_reasoning import probe_reasoning_format
from server.parsing.written import written
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Serve

FOLDER = os.environ.get("QUIRE_TEST_TEMPLATES", "")
PATHS = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
pytestmark = pytest.mark.skipif(not PATHS, reason="QUIRE_TEST_TEMPLATES names no folder of templates")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}]
ARGUMENTS = {"city": "Paris", "days": 3}


@pytest.mark.parametrize("path", PATHS or [Path("none")], ids=lambda path: path.stem)
@pytest.mark.parametrize("has_thoughts", [False, True])
def test_a_call_in_the_templates_format(path: Path, has_thoughts: bool, serve: Serve) -> None:
    source = path.read_text()
    live = serve(FakeEngine(template=source, max_model_len=16_384), None)
    assert live.engine.tokenizer is not None
    try:
        template = ChatTemplate(source, live.engine.tokenizer.special_tokens_map)
        prompt = template.render([{"role": "user", "content": "Weather?"}], tools=TOOLS)
    except ChatTemplateError as error:
        pytest.skip(str(error))
    format, reasoning = find_tool_format("auto", template), probe_reasoning_format("auto", template)
    if format is None or format.name == "openai" or (has_thoughts and reasoning is None):
        pytest.skip("it has no calls, or no reasoning")
    text = written(format, [("get_weather", ARGUMENTS)])
    is_opened = reasoning is not None and reasoning.opened_by(prompt)
    if reasoning is not None and (has_thoughts or is_opened):
        has_thoughts = not reasoning.closed_by(prompt)
        thoughts = f"{'' if is_opened else reasoning.begin}Hm.{reasoning.end}" if has_thoughts else ""
        text = f"{thoughts}\n\n{text}"
    live.engine.answer = text
    body: dict[str, Any] = {"tools": TOOLS}
    response = live.chat(**body)
    if response.status_code == 400 and "rejected the messages" in response.text:
        pytest.skip(response.json()["error"]["message"])
    (choice,) = response.json()["choices"]
    calls = choice["message"].get("tool_calls") or []
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert found == [("get_weather", ARGUMENTS)]
    assert not choice["message"].get("content")
    assert choice["finish_reason"] == "tool_calls"
    if has_thoughts:
        assert choice["message"]["reasoning"] == "Hm."
