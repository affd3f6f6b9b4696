"""The format of tool calls, found by rendering calls with the chat template."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.text.chat_template import ChatTemplate, ChatTemplateError
from server.parsing.formats import PARSER_NAMES, TOOL_FORMATS, ToolFormat
from server.parsing.probe import PROBED, find_tool_format
from server.parsing.written import read, written
from tests.support.templates import HERMES, LLAMA3, MISTRAL, QWEN3, THINKER
from tests.support.tool_templates import LISTED, SHAPES

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = {"f": SCHEMA, "g": SCHEMA}
CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"x": "a b", "n": 3}), ("g", {"x": "c"})]
PUBLISHED = os.environ.get("QUIRE_TEST_TEMPLATES")  # a folder of published templates, *.jinja
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def found(source: str) -> ToolFormat:
    format = find_tool_format("auto", ChatTemplate(source))
    assert format is not None
    return format


@pytest.mark.parametrize("shape", SHAPES)
def test_an_unlisted_format_is_put_together(shape: str) -> None:
    source, text = SHAPES[shape]
    format = found(source)
    assert format.name == PROBED
    assert written(format, CALLS) == text
    assert read(format, text, TOOLS) == ("", CALLS)
    assert read(format, f"Well.\n\n{text}", TOOLS) == ("Well.", CALLS)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (HERMES, "hermes"),
        (QWEN3, "hermes"),
        (LLAMA3, "llama3_json"),
        (MISTRAL, "mistral"),
        ("tools [TOOL_CALLS] [ARGS]", "mistral_args"),
        (THINKER, None),
        ("the tool <tool_call>\n<function=name>\n<parameter=x>", "qwen3_coder"),
        ("", None),
    ],
)
def test_a_listed_format_is_found(source: str, name: str | None) -> None:
    template = ChatTemplate(source)
    format = find_tool_format("auto", template)
    assert (format.name if format else None) == name
    assert find_tool_format("none", template) is None
    assert find_tool_format("mistral", template) is TOOL_FORMATS["mistral"]


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_format_is_told_by_its_calls(name: str) -> None:
    format = found(LISTED[name])
    assert format.name == name
    assert read(format, written(format, CALLS), TOOLS) == ("", CALLS)


def test_a_listed_format_takes_the_white_space_of_the_template() -> None:
    format = found(HERMES.replace("\\n</tool_call>'", "</tool_call>'"))
    assert format.name == "hermes"
    assert format.separator == "<tool_call>"
    assert written(format, CALLS[1:]) == '<tool_call>\n{"name": "g", "arguments": {"x": "c"}}</tool_call>'


def test_one_call_in_a_message() -> None:
    assert found(LLAMA3).single
    assert not found(HERMES).single


def test_a_template_that_writes_calls_in_no_known_way() -> None:
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function }}{% endfor %}{% endfor %}"
    assert find_tool_format("auto", ChatTemplate(source)) is None


def test_the_names_of_vllms_parsers() -> None:
    for name in (
        "qwen3_xml",
        "glm45",
        "kimi_k2",
        "deepseek_v31",
        "llama4_pythonic",
        "phi4_mini_json",
        "xlam",
        "granite",
    ):
        assert find_tool_format(name, None) is PARSER_NAMES[name]


@pytest.mark.skipif(PUBLISHED is None, reason="QUIRE_TEST_TEMPLATES names no folder")
def test_published_templates() -> None:
    known: list[str] = []
    unknown: list[str] = []
    for path in sorted(Path(PUBLISHED or "").glob("*.jinja")):
        source = path.read_text()
        if "tools" not in source:
            continue
        try:
            format = find_tool_format("auto", ChatTemplate(source, SPECIAL))
        except ChatTemplateError:
            continue
        (known if format is not None else unknown).append(path.name)
    assert len(known) >= 0.95 * (len(known) + len(unknown)), unknown
