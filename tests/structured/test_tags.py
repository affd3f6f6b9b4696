"""Answers of several parts: thoughts, content, free text that ends in tags; marks as text and as special tokens."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.core.params.structured import StructuredOutputs, Tag, Tags, Thoughts
from engine.structured.grammar import Compiler, Vocabulary, choice_grammar, json_grammar, regex_grammar
from engine.structured.tags import compose

NAMES = ["<s>", "</s>", "[CALLS]", "[ARGS]", "<think>", "</think>", "<|x|>", "<|y|>", "<call>"]
IDS = {name: 256 + i for i, name in enumerate(NAMES)}
END = IDS["</s>"]
TOKENS = [bytes([i]) for i in range(256)] + [name.encode() for name in NAMES]
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ANY = {"type": "object"}
ROOTED: dict[str, Any] = {  # its references are to itself, wherever it stands
    "type": "object",
    "properties": {"y": {"$ref": "#/$defs/y"}},
    "required": ["y"],
    "additionalProperties": False,
    "$defs": {"y": {"enum": [1, 2]}},
}
F = '{"name": "f", "arguments": {"x": 1}}'
G = '{"name": "g", "arguments": {"y": 2}}'

HERMES = Tags(
    trigger="<call>",
    tags=[
        Tag(begin=f'\n{{"name": "{name}", "arguments": ', schema=schema, end="}\n</call>")
        for name, schema in (("f", X), ("g", ROOTED))
    ],
    between="\n<call>",
)
LISTED = Tags(
    trigger="[CALLS]",
    tags=[
        Tag(begin=f'{{"name": "{name}", "arguments": ', schema=schema, end="}")
        for name, schema in (("f", X), ("g", ROOTED))
    ],
    opening="[",
    between=", ",
    closing="]",
)
SPACE = "[ \\t\\r\\n]*"
BARE = Tags(
    trigger="<|x|>",
    tags=[
        Tag(
            begin=f'{{"name": "{name}", "parameters": ',
            schema=schema,
            end="}",
            head=rf'\{{{SPACE}"name"{SPACE}:{SPACE}"{name}"{SPACE},{SPACE}"parameters"{SPACE}:',
        )
        for name, schema in (("f", X), ("g", ROOTED))
    ],
    between="; ",
)
P = '{"name": "f", "parameters": {"x": 1}}'


def changed(tags: Tags, **changes: Any) -> Tags:
    fields = {name: getattr(tags, name) for name in Tags.__slots__}
    return Tags(**(fields | changes))


def compiled(
    tags: Tags | None = None, thoughts: Thoughts | None = None, content: str | None = None, special: bool = True
) -> LLMatcher:
    ends = [IDS["</s>"]]
    ids = [*IDS.values()] if special else [IDS["<s>"], IDS["</s>"]]
    tokens = TOKENS if special else TOKENS[:258]
    compiler = Compiler(lambda: Vocabulary(tokens, ids, ends))
    known = {name: i for name, i in IDS.items() if i in ids and i not in ends}
    schemas = [json_grammar(tag.schema) for tag in tags.tags] if tags is not None else []
    grammar = compose(content, tags, schemas, thoughts, known)
    compiler.check(grammar)
    return compiler.compile(grammar)


def token_ids(text: str, as_special: bool) -> list[int]:
    """Names of special tokens are these tokens, or bytes."""
    pattern = "|".join(map(re.escape, NAMES)) if as_special else "$^"
    parts = re.split(f"({pattern})", text)
    return [i for part in parts for i in ([IDS[part]] if part in IDS and as_special else part.encode())]


def state(matcher: LLMatcher, text: str, as_special: bool = True) -> str:
    """ "no", "on" (may go on, may not end), "end" (may end)."""
    matcher = matcher.deep_copy()
    ids = token_ids(text, as_special)
    if matcher.try_consume_tokens(ids) < len(ids):
        return "no"
    return "end" if matcher.is_accepting() else "on"


BOTH = pytest.mark.parametrize("special", [True, False])


@BOTH
def test_free_text_until_the_trigger(special: bool) -> None:
    matcher = compiled(HERMES, special=special)
    call = f"<call>\n{F}\n</call>"
    for text, expected in (
        ("", "end"),
        ("Hello <b> [CALLS] </think> {", "end"),
        ("a <call", "end"),
        ("a <call>", "on"),
        ("a <call> no", "no"),
        (f"a {call}", "end"),
        (f"a {call}\n{call}", "end"),
        (f"a {call}\n<call>\n{G}\n</call>", "end"),
        (f"a {call} b", "no"),
        (f"a {call}\n", "end"),
        (f"a {call}\n\n\n\n\n", "no"),
        (f"a {call} {{", "no"),
        (call.replace("1", '"1"'), "no"),
        (call.replace('"f"', '"h"'), "no"),
    ):
        assert state(matcher, text, as_special=special) == expected, text
    if special:
        assert state(matcher, "a <call> no", as_special=False) == "no", "the mark spelled out counts as well"
        assert state(matcher, f"a <s>b<|x|><|y|>c{call}") == "end", "special tokens that mean nothing here are free"
        assert state(matcher, f"a {call}<|x|>") == "no"


@BOTH
def test_required(special: bool) -> None:
    matcher = compiled(changed(HERMES, required=True), special=special)
    call = f"<call>\n{F}\n</call>"
    for text, expected in (("", "on"), ("a", "no"), (call, "end"), (f"{call}\n{call}", "end"), (f"{call}x", "no")):
        assert state(matcher, text, as_special=special) == expected, text
    one = compiled(changed(HERMES, required=True, several=False), special=special)
    assert state(one, f"{call}\n", as_special=special) == "no"


@BOTH
def test_lists(special: bool) -> None:
    matcher = compiled(LISTED, special=special)
    for text, expected in (
        ("Well.", "end"),
        (f"Well.[CALLS][{F}]", "end"),
        (f"[CALLS][{F}, {G}]", "end"),
        (f"[CALLS][{F}, {G}", "on"),
        (f"[CALLS][{F}]]", "no"),
        ("[CALLS][]", "no"),
        (f"[CALLS] [{F}]", "end" if special else "no"),
    ):
        assert state(matcher, text, as_special=special) == expected, text
    one = compiled(changed(LISTED, several=False, required=True), special=special)
    assert state(one, f"[CALLS][{F}]", as_special=special) == "end"
    assert state(one, f"[CALLS][{F}, ", as_special=special) == "no"


def test_special_tokens_inside_of_tags() -> None:
    tags = Tags(
        trigger="[CALLS]", tags=[Tag(begin="f[ARGS]", schema=X, end="")], between="[CALLS]", closing="", required=True
    )
    matcher = compiled(tags)
    assert state(matcher, '[CALLS]f[ARGS]{"x": 1}[CALLS]f[ARGS]{"x": 2}') == "end"
    assert state(matcher, "[CALLS]f[ARGS]", as_special=False) == "no", "forced marks are the tokens"
    assert state(compiled(tags, special=False), '[CALLS]f[ARGS]{"x": 1}[CALLS]f', as_special=False) == "on"


@BOTH
def test_bare_tags(special: bool) -> None:
    matcher = compiled(BARE, special=special)
    for text, expected in (
        ("Hi", "end"),
        (P, "end"),
        (f"{P}; {P}", "end"),
        (f"{P} {{", "no"),
        (f"Hm <|x|>{P}", "end"),
        (f"Hm {P}", "end"),
        ('Hm {"name": "f", "parameters": 5}', "end"),
        ('{"name": "f", "parameters": 5', "no"),
        (' {"name":"f",\n"parameters":{"x":1}}', "end"),
        ('{"name": "John", "age": 5}', "end"),
        ('{"name": "f", "age": 5}', "end"),
        ("{x}", "end"),
    ):
        assert state(matcher, text, as_special=special) == expected, text
    required = compiled(changed(BARE, required=True), special=special)
    assert [state(required, text) for text in ("", P, "Hi", "<|x|>")] == ["on", "end", "no", "no"]


@BOTH
@pytest.mark.parametrize("opened", [True, False])
def test_thoughts(opened: bool, special: bool) -> None:
    thoughts = Thoughts(begin="<think>", end="</think>", opened=opened)
    matcher = compiled(None, thoughts, json_grammar(X), special)
    begin = "" if opened else "<think>"
    for text, expected in (
        ('{"x": 1}', "on" if opened else "end"),
        ("<think>", "on"),
        (f"{begin}{{ <call> [] </thin", "on"),
        (f'{begin}Hm.</think>{{"x": 1}}', "end"),
        (f'{begin}\nHm.\n</think>\n\n{{"x": 1}}', "end"),
        (f'{begin}</think>{{"x": 1}}', "end"),
        (f"{begin}Hm.</think>Hm", "no"),
        (f"{begin}Hm.</think>", "on"),
        ('\n<think>Hm.</think>{"x": 1}', "end"),
    ):
        assert state(matcher, text, as_special=special) == expected, text
    if not opened:
        assert state(matcher, "Hm", as_special=special) == "no"
    if special:
        assert state(matcher, f'{begin}Hm.</think>{{"x": 1}}', as_special=False) == "end"
        assert state(matcher, f'{begin}Hm<|y|> <think> [CALLS].</think>{{"x": 1}}') == "end"


@BOTH
def test_tags_in_thoughts_are_thoughts(special: bool) -> None:
    matcher = compiled(HERMES, Thoughts(begin="<think>", end="</think>", opened=False), special=special)
    call = f"<call>\n{F}\n</call>"
    text = "<think>I could write <call>.</think>\n\n"
    assert state(matcher, text, as_special=special) == "end"
    assert state(matcher, f"{text}So: {call}", as_special=special) == "end"
    assert state(matcher, "<thinking>", as_special=False) == "end"
    assert state(matcher, "no <think> <call>x", as_special=False) == "no"
    required = compiled(
        changed(HERMES, required=True), Thoughts(begin="<think>", end="</think>", opened=True), special=special
    )
    assert state(required, f"Hm.</think>\n\n{call}", as_special=special) == "end"
    assert state(required, "Hm.</think>\n\nSo", as_special=special) == "no"


@pytest.mark.parametrize("content", [json_grammar(X), choice_grammar(["yes", "no"]), regex_grammar("[yn].*")])
def test_content_or_tags(content: str) -> None:
    matcher = compiled(HERMES, None, content)
    assert state(matcher, f"<call>\n{F}\n</call>") == "end"
    assert state(matcher, "Hm") == "no"
    for text in ('{"x": 1}', "yes"):
        expected = "end" if (text == "yes") is ('"json_schema":{' not in content) else "no"
        assert state(matcher, text) == expected, text


@pytest.mark.heavy
@BOTH
@pytest.mark.parametrize("tags", [HERMES, LISTED, BARE], ids=["hermes", "listed", "bare"])
def test_random_walks(tags: Tags, special: bool) -> None:
    """Whatever is written, every tag is by its schema."""
    thoughts = Thoughts(begin="<think>", end="</think>", opened=False)
    matchers = [
        compiled(changed(tags, several=several, required=True), thinking, special=special)
        for several, thinking in itertools.product((True, False), (None, thoughts))
    ]
    found = 0
    for seed, matcher in itertools.product(range(8), matchers):
        walked = walk(matcher, random.Random(seed))
        if walked is None:
            continue
        calls = re.findall(r'\{"name": "(f|g)", "(?:arguments|parameters)": (\{[^{}]*\})\}', walked)
        assert calls
        for name, arguments in calls:
            value = json.loads(arguments)
            assert isinstance(value["x"], int) if name == "f" else value["y"] in (1, 2)
            found += 1
    assert found >= 12


def walk(matcher: LLMatcher, dice: random.Random) -> str | None:
    matcher, out = matcher.deep_copy(), bytearray()
    for _ in range(4000):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        ends = [i for i in (END, IDS["</think>"]) if bits >> i & 1]
        token = dice.choice(ends or [i for i in range(len(TOKENS)) if bits >> i & 1])
        assert matcher.consume_token(token), matcher.get_error()
        if token == END:
            return out.decode(errors="replace")
        out += TOKENS[token]
    return None


def test_what_is_asked_must_fit_together() -> None:
    for fields in ({"regex": "x", "tags": changed(HERMES, required=True)}, {}, {"thoughts": None}):
        with pytest.raises(ValueError, match="structured_outputs must"):
            StructuredOutputs(**fields)
    with pytest.raises(ValueError, match=r"structured_outputs\.tags must have"):
        StructuredOutputs(tags=Tags(trigger="", tags=[]))
