"""The reader of tool calls: every family's form, broken forms, and any way to cut the text."""

import random
import re
import time

import pytest

from server.parsing.formats import TOOL_FORMATS
from server.parsing.pieces import Blocks, CallArguments, CallStart, Content
from server.parsing.tools import ToolReader, call_tags

Found = list[tuple[str, str]]  # ("", content) or (name, arguments)


def read(format: str, parts: list[str], max_calls: int | None = None) -> Found:
    reader, blocks = ToolReader(TOOL_FORMATS[format], {"f": None, "g": None}, max_calls), Blocks()
    for number, part in enumerate(parts, 1):
        blocks.extend(reader.push(part, number == len(parts)))
    return [(block.name, block.text) for block in blocks.all]


def cuts(text: str, rng: random.Random) -> list[str]:
    parts = []
    while text:
        size = rng.choice((1, 1, 2, 3, 5, 9))
        parts.append(text[:size])
        text = text[size:]
    return [*parts, ""] if rng.random() < 0.5 else parts


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CASES: list[tuple[str, str, Found]] = [
    ("hermes", "Just text <b>.\n", [("", "Just text <b>.\n")]),
    ("hermes", CALL, [("f", '{"x": 1}')]),
    ("hermes", f"Let me see.\n\n{CALL}", [("", "Let me see."), ("f", '{"x": 1}')]),
    ("hermes", f"{CALL}\n{CALL}", [("f", '{"x": 1}')] * 2),
    ("hermes", f"{CALL}\nThat is it.", [("f", '{"x": 1}'), ("", "That is it.")]),
    ("hermes", f"{CALL} and {CALL}", [("f", '{"x": 1}'), ("", "and"), ("f", '{"x": 1}')]),
    ("hermes", CALL.removesuffix("\n</tool_call>") + "\n" + CALL, [("f", '{"x": 1}')] * 2),
    ("hermes", '<tool_call>{"arguments": {"q": [1]}, "name": "g"}</tool_call>', [("g", '{"q": [1]}')]),
    ("hermes", '<tool_call>{"id": "1", "name": "g", "type": "function", "arguments": {}}', [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"ü\\"}"}</tool_call>', [("f", '{"a": "ü"}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "}]\\"</tool_call>\\\\", "o": {"a": [{}]}}}</tool_call>',
        [("f", '{"s": "}]\\"</tool_call>\\\\", "o": {"a": [{}]}}')],
    ),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', [("other", "{}")]),
    ("hermes", "no <tool_call>garbage</tool_call> here", [("", "no <tool_call>garbage</tool_call> here")]),
    ("hermes", '<tool_call>\n{"names": 5}</tool_call>', [("", '<tool_call>\n{"names": 5}</tool_call>')]),
    ("hermes", f"{CALL}<tool_call>x", [("f", '{"x": 1}'), ("", "<tool_call>x")]),
    ("hermes", "half a <tool_ca", [("", "half a <tool_ca")]),
    ("hermes", '<tool_call>\n{"name": "f", "arg', [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x', [("f", '{"x')]),
    (
        "minicpm5",
        '<function name="f"><param name="x"><![CDATA[a\n<b>]]></param></function>',
        [("f", '{"x": "a\\n<b>"}')],
    ),
    ("functionary_v32", 'f\n{"x": 1}', [("f", '{"x": 1}')]),
    ("functionary_v32", 'f\n{"x": 1}>>>g\n{}', [("f", '{"x": 1}'), ("g", "{}")]),
    ("functionary_v32", "f is a tool.\n{}", [("", "f is a tool.\n{}")]),
    ("functionary_v32", "all\nHello\nall\n", [("", "Hello\nall\n")]),
    ("functionary_v32", "all", [("", "all")]),
    ("functionary_v32", "allow f\n{}", [("", "allow f\n{}")]),
    ("functionary_v32", "all\n>>> 1 + 1\n2", [("", ">>> 1 + 1\n2")]),
    ("functionary_v32", 'all\nI look.>>>f\n{"x": 1}>>>g\n{}', [("", "I look."), ("f", '{"x": 1}'), ("g", "{}")]),
    ("functionary_v32", 'f\n{"x": 1}>>>all\nDone.', [("f", '{"x": 1}'), ("", "Done.")]),
    ("minicpm5", '<function name="f"><param name="x"><![CDATA[3]]></param></function>', [("f", '{"x": "3"}')]),
    (
        "minicpm5",
        '<function name="f"><param name="x"><![CDATA[</param>]]]></param><param name="y"><![C</param></function>',
        [("f", '{"x": "</param>]", "y": "<![C"}')],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', [("f", '{"x": 1}')]),
    (
        "mistral",
        'Well.[TOOL_CALLS][{"name": "f", "arguments": {"x": "]"}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        [("", "Well."), ("f", '{"x": "]"}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": {}}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{}', [("f", '{"x": {}}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', [("f", '{"x": 1}')]),
    ("mistral", "[TOOL_CALLS]hello world", [("", "[TOOL_CALLS]hello world")]),
    ("mistral", "[TOOL_CALLS] [", []),
    ("mistral", "a [list]", [("", "a [list]")]),
    ("llama3_json", ' {"name": "f", "parameters": {"x": 1}}', [("f", '{"x": 1}')]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"x": 1}}', [("f", '{"x": 1}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", "{}"), ("g", "{}")]),
    ("llama3_json", '{"name": "John", "age": 3}', [("", '{"name": "John", "age": 3}')]),
    ("llama3_json", '{"name": "John", "parameters": {}}', [("", '{"name": "John", "parameters": {}}')]),
    ("llama3_json", '{"city": {"name": "f"}}', [("", '{"city": {"name": "f"}}')]),
    ("llama3_json", "{x | x > 0}", [("", "{x | x > 0}")]),
    ("llama3_json", 'So: {"name": "f", "parameters": {}}', [("", 'So: {"name": "f", "parameters": {}}')]),
    ("llama3_json", "<|python_tag|>print(1)", [("", "<|python_tag|>print(1)")]),
    ("llama3_json", "  ", [("", "  ")]),
]


@pytest.mark.parametrize(("format", "text", "found"), CASES)
def test_forms(format: str, text: str, found: Found) -> None:
    assert read(format, [text]) == found
    assert read(format, list(text)) == found
    rng = random.Random(text)
    for _ in range(40):
        assert read(format, cuts(text, rng)) == found


def test_arguments_are_given_out_as_they_come() -> None:
    reader = ToolReader(TOOL_FORMATS["hermes"], {"f": None}, None)
    assert reader.push("Hm <tool", False) == [Content("Hm")]
    assert reader.push('_call>{"name": "f", "argum', False) == []
    start, arguments = reader.push('ents": {"a": "b', False)
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "f")
    assert arguments == CallArguments(0, '{"a": "b')
    assert reader.push("c", False) == [CallArguments(0, "c")]
    assert reader.push('"}}</tool_call>', True) == [CallArguments(0, '"}')]


def test_content_is_held_back_only_while_it_may_be_a_mark() -> None:
    reader = ToolReader(TOOL_FORMATS["llama3_json"], {"f": None}, None)
    assert reader.push('{"c', False) == [Content('{"c')]
    assert reader.push("ity <|py", False) == [Content("ity")]
    assert reader.push("x", False) == [Content(" <|pyx")]


def test_only_so_many_calls() -> None:
    assert read("hermes", [f"a{CALL}{CALL} b {CALL}"], max_calls=1) == [("", "a"), ("f", '{"x": 1}'), ("", "b")]


def test_nothing_is_lost_or_slow_in_a_long_answer() -> None:
    text = "{" * 2000 + '"' * 2001 + "<tool_call>" * 500 + "[" * 2000
    for format in TOOL_FORMATS:
        assert "".join(content for _, content in read(format, list(text))) == text


@pytest.mark.parametrize(
    "text", ['<tool_call>{"id": {}' + ', "id": {}' * 20_000, "[TOOL_CALLS]" + "a" * 100_000 + "[ARGS]{}"]
)
def test_hostile_answers_take_linear_time(text: str) -> None:
    """Each opening bracket or letter might be where the arguments begin: a minute's work, if all before were read
    again.
    """
    format = TOOL_FORMATS["hermes" if text.startswith("<") else "mistral"]
    reader, start = ToolReader(format, {"f": None}, None), time.process_time()
    for at in range(0, len(text), 20):
        assert not [piece for piece in reader.push(text[at : at + 20], False) if not isinstance(piece, Content)]
    assert time.process_time() - start < 5


def test_ids() -> None:
    reader = ToolReader(TOOL_FORMATS["kimi_k2"], {"f": None}, None)
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    pieces = reader.push(f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>", True)
    first, second = (piece.id for piece in pieces if isinstance(piece, CallStart))
    assert first == "functions.f:3", "the template of the model writes this id, and no name"
    assert second.startswith("call_"), "ids are unique"
    long, short = TOOL_FORMATS["hermes"].new_id(), TOOL_FORMATS["mistral"].new_id()
    assert long.startswith("call_")
    assert len(short) == 9
    assert short.isalnum()


@pytest.mark.parametrize(
    "format", [each.name for each in TOOL_FORMATS.values() if each.name != "openai" and each.arguments is None]
)  # test_harmony.py
@pytest.mark.parametrize("number", [1, 2])
def test_what_the_grammar_allows_is_read_as_calls(format: str, number: int) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    form = TOOL_FORMATS[format]
    tags = call_tags(form, [("f", schema), ("g", {})], required=True, several=number > 1)
    assert (tags.required, tags.several) == (True, number > 1)
    assert [tag.schema for tag in tags.tags] == [schema, {}]
    calls = tags.between.join(
        tag.begin.replace("{index}", "0").replace("{id}", "ab0") + '{"x": "]"}' + tag.end for tag in tags.tags[:number]
    )
    text = ("" if form.bare else tags.trigger) + tags.opening + calls + tags.closing
    assert read(format, [text]) == [("f", '{"x": "]"}'), ("g", '{"x": "]"}')][:number]


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('{"name":"f","parameters":{}}', True),
        ('{ "type" : "function", "id": "x", "name": "f" ,\n"arguments"  :  {}}', True),
        ('{"name": "f.g", "parameters": {}}', False),
        ('{"parameters": {}, "name": "f"}', False),
        ('{"name": "\\u0066", "parameters": {}}', False),
        ('{"name": "f", "name": "f", "parameters": {}}', False),
    ],
)
def test_bare_calls_are_read_where_the_grammar_sees_them(text: str, is_call: bool) -> None:
    """Anything else would have unchecked arguments."""
    (tag,) = call_tags(TOOL_FORMATS["llama3_json"], [("f", {})], required=False, several=True).tags
    assert tag.head is not None
    assert bool(re.match(tag.head, text)) is is_call
    assert [name for name, _ in read("llama3_json", [text])] == (["f"] if is_call else [""])


WRITTEN = {
    "hermes": 'Hm. <tool_call>\n{"name": "f", "arguments": {"x": "a}"}}\n</tool_call>',
    "mistral": 'Hm. [TOOL_CALLS][{"name": "f", "arguments": {"x": "a}"}}, {"name": "g", "arguments": {}}]',
    "mistral_args": 'Hm. [TOOL_CALLS]f[ARGS]{"x": "a}"}',
    "llama3_json": '{"name": "f", "parameters": {"x": "a}"}}',
}


@pytest.mark.parametrize("format", WRITTEN)
def test_what_is_written_around_a_cut_call_is_no_content(format: str) -> None:
    text = WRITTEN[format]
    whole, begins = '{"x": "a}"}', text.index("{" if format == "llama3_json" else TOOL_FORMATS[format].begin)
    for end in range(begins + 2, len(text)):
        reader, blocks = ToolReader(TOOL_FORMATS[format], {"f": None, "g": None}, None), Blocks()
        blocks.extend(reader.push(text[:end], True, True))
        content = blocks.text(Content)
        if format == "llama3_json" and not blocks.calls:
            assert content == text[:end], "an object that need not be a call"
            assert end < text.index('"f"') + 3
            continue
        assert content in ("", "Hm.", "Hm. "), text[:end]
        if blocks.calls:
            first = blocks.calls[0]
            assert first.name == "f"
            assert whole.startswith(first.text)
            assert reader.is_cut or first.text == whole
