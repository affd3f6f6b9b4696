"""Lark grammars inside JSON: an object's text is a sentence, and sentences can be written."""

from __future__ import annotations

import json
import random
import re

import pytest

from engine.structured.grammar import Compiler, text_grammar
from tests.support.walks import walk

GRAMMARS = {  # what Python's re has for the same texts
    'start: "a\\"\\n" LETTERS?\nLETTERS: /[a-c]+/': r'a"\n([a-c]+)?',
    "start: line+\nline: /(.{0,3})/ LF\n%import common.LF": r"([^\n]{0,3}\n)+",
    "start: /a(b|[\\n\\t]c)*?d\\/e?/": r"a(b|[\n\t]c)*d/e?",
    "start: WORD -> word\nWORD: /[^x\\n]{2}/": r"[^x\n]{2}",
    "?start: x | y\nx: /\\\\/\n_y: /q/\ny: _y{2}": r"\\|qq",
}


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_texts_are_sentences(grammar: str, compiler: Compiler) -> None:
    compiled = text_grammar("input", grammar)
    compiler.check(compiled)
    matcher = compiler.compile(compiled)
    texts = [text for seed in range(40) if (text := walk(matcher, random.Random(seed))) is not None]
    assert texts
    for text in texts:
        found = json.loads(text)
        assert [*found] == ["input"]
        assert re.fullmatch(GRAMMARS[grammar], found["input"])


@pytest.mark.parametrize(
    ("grammar", "text", "good"),
    [
        ('start: "a\\"\\n" LETTERS?\nLETTERS: /[a-c]+/', 'a"\nabc', True),
        ("start: line+\nline: /(.{0,3})/ LF\n%import common.LF", '"\\\t\n\nab\n', True),
        ("start: line+\nline: /(.{0,3})/ LF\n%import common.LF", "abcd\n", False),
        ("start: /a(b|[\\n\\t]c)*?d\\/e?/", "ab\ncbd/", True),
        ("start: WORD -> word\nWORD: /[^x\\n]{2}/", "ä\r", True),
    ],
)
def test_sentences_can_be_written(grammar: str, text: str, good: bool, compiler: Compiler) -> None:
    matcher = compiler.compile(text_grammar("input", grammar))
    written = json.dumps({"input": text}, ensure_ascii=False).encode()
    assert (matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting()) is good


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: /(?i)a/", "flags|in a regular expression"),
        ("start: /^a$/", "in a regular expression"),
        ("start: /(a|)b/", "may be empty"),
        ("start: A\n%import common.ESCAPED_STRING", "%import"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ('start: %json {"type": "string"}', "%json"),
    ],
)
def test_what_cannot_be_done_is_named(grammar: str, reason: str, compiler: Compiler) -> None:
    with pytest.raises(ValueError, match=reason):
        compiler.check(text_grammar("input", grammar))
