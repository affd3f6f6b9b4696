"""Answers in gpt-oss's harmony format, by grammar: what may come before the answer, the answer, calls."""

from __future__ import annotations

import re

import pytest
from llguidance import LLMatcher

from engine.core.params.structured import Tag, Tags
from engine.structured.grammar import Compiler, Vocabulary, json_grammar
from engine.structured.harmony import compose_messages

NAMES = ["<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|x|>"]
IDS = {name: 256 + i for i, name in enumerate(NAMES)}
TOKENS = [bytes([i]) for i in range(256)] + [name.encode() for name in NAMES]
ENDS = [IDS["<|return|>"], IDS["<|call|>"]]
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}

THOUGHT = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
REMARK = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
F, G = CALL.format("f"), CALL.format("g.h")


def tags(required: bool = False) -> Tags:
    each = [Tag(begin=name, schema=X, end="") for name in ("f", "g.h")]
    return Tags(trigger=" to=functions.", tags=each, several=False, required=required)


def compiled(asked: Tags | None = None, content: str | None = None, special: bool = True) -> LLMatcher:
    known = {name: i for name, i in IDS.items() if i not in ENDS} if special else {}
    ids = [*IDS.values()] if special else ENDS
    tokens = TOKENS if special else TOKENS[:258]
    schemas = [json_grammar(tag.schema) for tag in asked.tags] if asked is not None else []
    compiler = Compiler(lambda: Vocabulary(tokens, ids, ENDS))
    grammar = compose_messages(content, asked, schemas, known)
    compiler.check(grammar)
    return compiler.compile(grammar)


def state(matcher: LLMatcher, text: str, special: bool = True) -> str:
    """ "no", "on" (may go on, may not end), "end" (may end)."""
    matcher = matcher.deep_copy()
    parts = re.split(f"({'|'.join(map(re.escape, NAMES))})", text) if special else [text]
    ids = [i for part in parts for i in ([IDS[part]] if part in IDS and special else part.encode())]
    if matcher.try_consume_tokens(ids) < len(ids):
        return "no"
    return "end" if matcher.is_accepting() else "on"


BOTH = pytest.mark.parametrize("special", [True, False])


@BOTH
def test_content(special: bool) -> None:
    matcher = compiled(content=json_grammar(X), special=special)
    for text, expected in (
        ("", "on"),
        ('{"x": 1}', "no"),
        (FINAL + '{"x": 1}', "end"),
        (THOUGHT + FINAL + '{"x": 1}', "end"),
        (THOUGHT + REMARK + THOUGHT + FINAL + '{"x": 1}', "end"),
        (THOUGHT + FINAL + '{"y": 1}', "no"),
        (THOUGHT + FINAL + '{"x": 1}<|end|>', "no"),
        (THOUGHT + F, "no"),
        ("<|channel|>analysis<|message|>Hm", "on"),
        ("<|channel|>other<|message|>", "no"),
    ):
        assert state(matcher, text, special) == expected, text


@BOTH
def test_free_text_or_a_call(special: bool) -> None:
    matcher = compiled(tags(), special=special)
    for text, expected in (
        (FINAL, "end"),
        (THOUGHT + FINAL + "Four {", "end"),
        (F + '{"x": 1}', "end"),
        (THOUGHT + REMARK + G + '{"x": 1}', "end"),
        (G + '{"y": 1}', "no"),
        (CALL.format("h"), "no"),
        (F + '{"x": 1}' + F, "no"),
        (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', "end"),
        ('<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"x": 1}', "end"),
        ("<|channel|>commentary to=functions.fjson", "no"),
    ):
        assert state(matcher, text, special) == expected, text


def test_a_call_is_required() -> None:
    matcher = compiled(tags(required=True))
    assert state(matcher, THOUGHT + F + '{"x": 1}') == "end"
    assert state(matcher, THOUGHT + "<|channel|>final") == "no"
    assert state(matcher, THOUGHT + "<|channel|>commentary<|message|>") == "on"


def test_marks_are_the_special_tokens() -> None:
    matcher = compiled(tags())
    assert state(matcher, FINAL, special=False) == "no"
    assert state(matcher, FINAL + "a<|x|>") == "no", "other special tokens mean nothing in a message"
    assert state(matcher, "<|channel|>analysis<|message|>a<|x|>") == "no"
