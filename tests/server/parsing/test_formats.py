"""Every format of tool calls: what its grammar allows is read back as it was meant, however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from engine.structured.grammar import Compiler, Vocabulary
from server.parsing.formats import GENERIC, TOOL_FORMATS, ToolFormat
from server.parsing.pieces import Blocks, CallArguments, CallStart, Content
from server.parsing.tools import ToolReader
from server.parsing.written import written
from tests.support.tool_calls import call_grammar, marked_walk, random_arguments, random_schema
from tests.support.walks import END, TOKENS, follows

FORMATS = {each.name: each for each in (*TOOL_FORMATS.values(), GENERIC) if each.name != "openai"}  # test_harmony.py
NAMES = ("get_weather", "f", "ns.read-file2")
each_format = pytest.mark.parametrize("name", FORMATS)
number = pytest.mark.parametrize("num_cases", [6, pytest.param(200, marks=pytest.mark.slow)])
COMPILER = Compiler(lambda: Vocabulary(TOKENS, [256, END], [END]))
Calls = list[tuple[str, dict[str, Any]]]


def tools_and_calls(dice: random.Random, num_calls: int) -> tuple[dict[str, Any], Calls]:
    tools = {name: random_schema(dice) for name in NAMES}
    chosen = dice.choices(NAMES, k=num_calls)
    return tools, [(name, random_arguments(dice, tools[name])) for name in chosen]


def parts_of(text: str, dice: random.Random) -> list[str]:
    parts = []
    while text:
        size = dice.choice((1, 2, 3, 7, 20))
        parts.append(text[:size])
        text = text[size:]
    return parts


def read(format: ToolFormat, tools: dict[str, Any], parts: list[str], cut: bool = False) -> tuple[ToolReader, Blocks]:
    reader, blocks = ToolReader(format, tools, None), Blocks()
    for index, part in enumerate(parts, 1):
        blocks.extend(reader.push(part, index == len(parts), cut))
    return reader, blocks


def found(blocks: Blocks) -> list[Any]:
    """Content, and calls with the text of their arguments."""
    return [(block.name, block.text) if block.kind is CallStart else block.text for block in blocks.all]


def calls_of(blocks: Blocks) -> Calls:
    return [(block.name, json.loads(block.text)) for block in blocks.all if block.kind is CallStart]


def is_ambiguous(format: ToolFormat, tools: dict[str, Any], calls: Calls) -> bool:
    """Return whether a text of a call contains a mark of its format, or reads as another type that its schema
    allows.
    """
    marks = [mark for text in format.texts for mark in text.split() if len(mark) > 2]
    texts = [text for _, arguments in calls for text in strings(arguments)]
    return format.arguments is not None and any(
        text.strip() in ("", "null", "None") or any(mark in text for mark in marks) for text in texts
    )


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


@each_format
@number
def test_calls_are_allowed_and_read(name: str, num_cases: int) -> None:
    format, dice = FORMATS[name], random.Random(name)
    for case in range(num_cases):
        tools, calls = tools_and_calls(dice, 1 + case % 3)
        if is_ambiguous(format, tools, calls):
            continue
        text = written(format, calls)
        grammar = call_grammar(format, tools)
        assert follows(COMPILER.compile(grammar), text), text
        _, whole = read(format, tools, [text])
        assert calls_of(whole) == calls, text
        assert not whole.text(Content)
        for parts in (list(text), parts_of(text, dice)):
            assert found(read(format, tools, parts)[1]) == found(whole), text
        if not format.bare:
            _, blocks = read(format, tools, list(f"Let me see.\n{text}"))
            assert found(blocks) == ["Let me see.", *found(whole)]


@each_format
@number
def test_a_cut_call_leaves_no_markup_in_the_content(name: str, num_cases: int) -> None:
    format, dice = FORMATS[name], random.Random(name)
    for case in range(max(num_cases // 3, 2)):
        tools, calls = tools_and_calls(dice, 1 + case % 2)
        if is_ambiguous(format, tools, calls):
            continue
        text = written(format, calls)
        _, whole = read(format, tools, [text])
        # The start of an answer that may be text or a call; the grammar decides only with its first words.
        first = text.index(calls[0][0]) + len(calls[0][0]) + 3 if format.bare else 2
        for end in range(first, len(text), 1 if num_cases > 10 else 3):
            reader, blocks = read(format, tools, [text[:end]], cut=True)
            assert not blocks.text(Content), text[:end]
            for block, complete in zip(blocks.all, whole.all, strict=False):
                assert block.name == complete.name
                assert complete.text.startswith(block.text), text[:end]
            last = blocks.all[-1] if blocks.all else None
            is_whole = last is not None and found(blocks) == found(whole)[: len(blocks.all)]
            assert reader.is_cut or is_whole or end < len(format.begin), text[:end]


@each_format
@number
def test_whatever_the_grammar_allows_is_valid(name: str, num_cases: int) -> None:
    format, dice = FORMATS[name], random.Random(name)
    num_read = 0
    for _ in range(max(num_cases // 4, 2)):
        tools = {each: random_schema(dice) for each in NAMES[:2]}
        matcher = COMPILER.compile(call_grammar(format, tools))
        for _ in range(3):
            text = marked_walk(matcher, dice, format.texts)
            if text is None:
                continue
            _, blocks = read(format, tools, [text])
            assert not blocks.text(Content), text
            assert found(read(format, tools, list(text))[1]) == found(blocks), text
            for tool, arguments in calls_of(blocks):
                jsonschema.validate(arguments, tools[tool])
                num_read += 1
    assert num_read


@each_format
@number
def test_damaged_answers(name: str, num_cases: int) -> None:
    """No exception, and the pieces do not depend on how the text arrives."""
    format, dice = FORMATS[name], random.Random(name)
    for _ in range(num_cases):
        tools, calls = tools_and_calls(dice, 2)
        text = list("Hm. " * (not format.bare) + written(format, calls))
        for _ in range(dice.randint(1, 5)):
            at = dice.randrange(len(text))
            match dice.randrange(3):
                case 0:
                    del text[at : at + dice.randint(1, 12)]
                case 1:
                    text[at:at] = dice.choice([*format.texts, '"', "\\", "{", "}", "]", "</", "\n"])
                case 2:
                    text[at:at] = text[at : at + 30]
            text = text or ["x"]
        damaged = "".join(text)
        _, whole = read(format, tools, [damaged])
        for parts in (list(damaged), parts_of(damaged, dice)):
            assert found(read(format, tools, parts)[1]) == found(whole), damaged


LIST = {"type": "object", "properties": {"x": {"type": "array"}, "y": {"type": "string"}}}
INSIDE = (
    "<tool_call>\n<function=f>\n<parameter=x>\n[{}]\n</parameter>\n<parameter=y>\nz\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"</parameter>\\n<parameter=z>"', ["</parameter>\n<parameter=z>"]),
        ('"\n</parameter>\n</function>\n"', None),
        ("1, 2", [1, 2]),
    ],
)
def test_a_mark_inside_a_value(value: str, expected: Any) -> None:
    """It ends the value unless JSON goes on after it; if nothing completes the JSON, it was the end."""
    text = INSIDE.replace("{}", value)
    _, whole = read(FORMATS["qwen3_coder"], {"f": LIST}, [text])
    for size in (1, 2, 5):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert found(read(FORMATS["qwen3_coder"], {"f": LIST}, parts)[1]) == found(whole)
    ((_, arguments),) = calls_of(whole)
    assert (arguments["x"] == expected and arguments["y"] == "z") if expected else arguments["x"].startswith("[")


def test_a_mark_inside_a_text() -> None:
    text = INSIDE.replace("\nz\n", "\na </parameter> b\n</parameter>\n\nc\n").replace("[{}]", "[]")
    _, blocks = read(FORMATS["qwen3_coder"], {"f": LIST}, list(text))
    assert calls_of(blocks) == [("f", {"x": [], "y": "a </parameter> b\n</parameter>\n\nc"})]


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", 3),
        ({"$ref": "#/$defs/s"}, "3", "3"),
        ({}, "3", 3),
        ({}, "a b", "a b"),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "boolean"}, "True", True),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, '["\\ud800"]', '["\\ud800"]'),
    ],
)
def test_types_of_arguments(schema: dict[str, Any], text: str, expected: Any) -> None:
    tool = {"type": "object", "properties": {"x": schema}, "$defs": {"s": {"type": "string"}}}
    answer = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    _, blocks = read(FORMATS["glm45"], {"f": tool}, [answer])
    assert calls_of(blocks) == [("f", {"x": expected})]


def test_a_text_is_given_out_as_it_comes() -> None:
    reader = ToolReader(FORMATS["qwen3_coder"], {"f": LIST}, None)
    pieces = reader.push('<tool_call>\n<function=f>\n<parameter=y>\nab"c\n', False)
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == '{"y": "ab\\"c'
    assert reader.push("d", False) == [CallArguments(0, "\\nd")]


def test_an_answer_that_ends_without_its_last_marks() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=y>\nz\n</parameter>"
    reader, blocks = read(FORMATS["qwen3_coder"], {"f": LIST}, [text])
    assert (calls_of(blocks), reader.is_cut) == ([("f", {"y": "z"})], False)
    reader, blocks = read(FORMATS["qwen3_coder"], {"f": LIST}, [text], cut=True)
    assert reader.is_cut
