"""White space of generated JSON: what `json.dumps` writes, and not much more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.structured.grammar import Compiler, json_grammar
from engine.structured.whitespace import INDENT, MAX_LEVELS, whitespace_options
from tests.support.schemas import INTEGER, STRING, obj
from tests.support.walks import follows

FLAT = obj(a=INTEGER, b=STRING)
NESTED = obj(a={"type": "array", "items": FLAT}, b=STRING)
TREE = {
    "$ref": "#/$defs/t",
    "$defs": {"t": obj(["name"], name=STRING, below={"type": "array", "items": {"$ref": "#/$defs/t"}})},
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (FLAT, {"a": 1, "b": "x\n y"}),
        (NESTED, {"a": [{"a": 1, "b": ""}, {"a": -2, "b": "{ : , }"}], "b": ""}),
        (TREE, {"name": "a", "below": [{"name": "b", "below": []}]}),
        ({"type": "object"}, {"a": [[[1, {}], []], {"b": {"c": None}}]}),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"separators": (",", ":")}, {"indent": 1}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}]
)
def test_what_json_dumps_writes(schema: Any, value: Any, options: dict[str, Any], compiler: Compiler) -> None:
    matcher = compiler.compile(json_grammar(schema))
    assert follows(matcher, json.dumps(value, **options))


@pytest.mark.parametrize(
    "text",
    [
        '{ "a": 1}',
        '{"a":  1}',
        '{"a" : 1}',
        '{"a": 1 }',
        '{"a": 1,  "b": ""}',
        '\n{"a": 1}',
        '{\n\n"a": 1}',
        '{\n     "a": 1}',
    ],
)
def test_other_white_space(text: str, compiler: Compiler) -> None:
    matcher = compiler.compile(json_grammar(obj(["a"], a=INTEGER, b=STRING)))
    assert not follows(matcher, text)


@pytest.mark.parametrize(
    ("schema", "levels"),
    [
        (STRING, 0),
        (FLAT, 1),
        ({"type": "array", "items": INTEGER}, 1),
        (NESTED, 3),
        ({"anyOf": [STRING, FLAT]}, 1),
        (TREE, MAX_LEVELS),
        ({"type": "object"}, MAX_LEVELS),
        ({}, MAX_LEVELS),
        (obj(a={"enum": [[1]]}), MAX_LEVELS),
    ],
)
def test_blanks_are_bounded_by_the_levels_of_the_schema(schema: Any, levels: int) -> None:
    pattern = whitespace_options(schema)["whitespace_pattern"]
    assert pattern == rf"\n {{0,{INDENT * levels}}}|\n\t{{0,{levels}}}"


def test_chains_of_references_are_bounded() -> None:
    chain: dict[str, Any] = {f"s{i}": {"$ref": f"#/$defs/s{i + 1}"} for i in range(2000)}
    doubled: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    for first in ("s0", "d0"):
        schema = {"$ref": f"#/$defs/{first}", "$defs": {**chain, **doubled, "s2000": STRING, "d40": STRING}}
        assert whitespace_options(schema)["whitespace_pattern"].startswith(rf"\n {{0,{INDENT * MAX_LEVELS}}}")
