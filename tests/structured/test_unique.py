"""Arrays without repetition: what a grammar's masks lose, and what the manager makes of it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from engine.core.params.structured import Thoughts
from engine.structured.grammar import Compiler, json_grammar
from engine.structured.grammar_manager import GrammarManager
from engine.structured.tags import compose
from engine.structured.unique import Endings, NotUniqueError, of_grammar
from tests.support.walks import allowed_by, walk

SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "written", "next", "may"),
    [
        (SET, '["a","', "a", True),
        (SET, '["a","a', '"', False),
        (SET, '["a","ab', '"', True),
        (SET, '["é\\n","é\\n', '"', False),
        ({"items": {"type": "number"}, "type": "array", "uniqueItems": True}, "[1,1.0", "]", False),
        ({"items": {"type": "number"}, "type": "array", "uniqueItems": True}, "[1,10", "]", True),
        ({"type": "array", "uniqueItems": True}, '[{"a":1,"b":[]},{"b":[],"a":1', "}", False),
        ({"type": "array", "uniqueItems": True}, '[[1],{"a":[1,1', "]", True),
        ({**SET, "items": {"enum": [f"{i}x" for i in range(9)] + ["red", "redder"]}}, '["redder","red', "d", False),
    ],
)
def test_a_repetition_is_masked(schema: Any, written: str, next: str, may: bool, compiler: Compiler) -> None:
    grammar = json_grammar(schema)
    matcher, unique = compiler.compile(grammar), of_grammar(grammar)
    assert unique is not None
    assert matcher.consume_tokens(list(written.encode()))
    unique.advance(written.encode())
    assert (ord(next) in allowed_by(matcher, unique)) == may


def test_longer_tokens_are_masked_too() -> None:
    endings = Endings([b'b"', b'b",', b'bc"', b'\\u0062"', b"b", b'"ab"', b"[]"])
    assert {text: list(ids) for text, ids in endings.texts.items()} == {"b": [0, 1, 3], "bc": [2], "": [5]}
    assert {name: list(ids) for name, ids in endings.values.items()} == {'"ab"': [5], "[]": [6]}


@pytest.mark.parametrize("opened", [True, False])
def test_thoughts_are_not_looked_at(compiler: Compiler, opened: bool) -> None:
    grammar = compose(json_grammar(SET), None, [], Thoughts(begin="<think>", end="</think>", opened=opened), {})
    matcher, unique = compiler.compile(grammar), of_grammar(grammar)
    assert unique is not None
    for written in ('["a","a"]</think>\n["a","a' if opened else '<think>["a","a"]</think>["a","a',):
        assert matcher.consume_tokens(list(written.encode()))
        unique.advance(written.encode())
        assert ord('"') not in allowed_by(matcher, unique)
    with pytest.raises(NotUniqueError):
        unique.advance(b'"')


def test_a_request_ends_with_an_error_where_nothing_else_may_come(compiler: Compiler) -> None:
    grammar = json_grammar({**SET, "items": {"type": "string", "pattern": "^(a|b)$"}, "minItems": 3})
    manager = GrammarManager[str](compiler)
    manager.add("0", grammar, "0")
    while manager.num_held:
        manager.take_compiled(idle=True)
    for byte in b'["a","b","':
        manager.advance("0", [byte])
    mask = np.zeros((1, 9), dtype=np.int32)
    late, errors = manager.fill(["0"], mask)
    assert not late
    assert "uniqueItems" in errors["0"]


def test_many_walks_have_no_repetition(compiler: Compiler) -> None:
    schema = {
        "type": "object",
        "properties": {
            "set": {
                "type": "array",
                "items": {"$ref": "#/$defs/item"},
                "uniqueItems": True,
                "minItems": 3,
                "maxItems": 4,
            },
            "list": {"type": "array", "items": {"const": 0}, "minItems": 2, "maxItems": 2},
        },
        "required": ["set", "list"],
        "additionalProperties": False,
        "$defs": {"item": {"type": "string", "pattern": '^[ab"\\\\é]{0,2}$'}},
    }
    grammar = json_grammar(schema)
    matcher = compiler.compile(grammar)
    for seed in range(30):
        found = json.loads(walk(matcher, random.Random(seed), of_grammar(grammar)) or "")
        assert len(found["set"]) == len(set(found["set"])) >= 3
        assert found["list"] == [0, 0]
