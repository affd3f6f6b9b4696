"""Keywords that the grammar library lacks: instances validate against the schema as its author wrote it."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from engine.structured.grammar import Compiler, json_grammar
from tests.support.walks import walk

STRING, INTEGER, BOOLEAN = {"type": "string", "maxLength": 8}, {"type": "integer"}, {"type": "boolean"}
KIND = {"type": "string", "enum": ["card", "cash", "bank"]}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
FRICTIONLESS = r"^(?=^[^./~])(^((?!\.{2}).)*$).*$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def closed(required: list[str] = [], **properties: Any) -> dict[str, Any]:  # noqa: B006 (not changed)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


REWRITTEN: dict[str, Any] = {
    "names by pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,3}$"},
        "additionalProperties": INTEGER,
    },
    "names by length, some known": {
        "type": "object",
        "properties": {"ab": BOOLEAN, "abcd": BOOLEAN},
        "propertyNames": {"type": "string", "maxLength": 3},
    },
    "names of an enumeration": {
        "type": "object",
        "propertyNames": {"enum": ["a b", "a.b", "^$", "cash"]},
        "additionalProperties": INTEGER,
    },
    "names by length": {
        "type": "object",
        "propertyNames": {"minLength": 2, "maxLength": 4},
        "additionalProperties": BOOLEAN,
    },
    "zod's record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": STRING},
    "names by reference": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/kind"},
        "additionalProperties": BOOLEAN,
        "$defs": {"kind": KIND},
    },
    "names with unknown words": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,3}$", "since": "1.2", "x-of": ["a"]},
        "additionalProperties": INTEGER,
    },
    "names of one of several kinds": {
        "type": "object",
        "propertyNames": {"oneOf": [{"enum": ["a", "b"]}, {"pattern": "^x-[a-z]{1,3}$"}]},
        "additionalProperties": INTEGER,
    },
    "not that short": {"type": "string", "maxLength": 9, "not": {"maxLength": 4}},
    "not of these lengths": {"not": {"minLength": 3}},
    "not in that range": {"type": "integer", "not": {"minimum": 3, "maximum": 9}},
    "no such element": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "not": {"contains": {"const": "b"}}},
    "not by two names": closed(a=STRING, b=STRING) | {"not": {"required": ["a", "b"]}},
    "not an object like": closed(["a"], a={"type": "string", "maxLength": 3})
    | {"not": {"properties": {"a": {"pattern": "x"}}, "minProperties": 2, "additionalProperties": False}},
    "not of this kind, in part": closed(["a"], a={"type": ["integer", "string"], "maxLength": 4})
    | {"not": {"properties": {"a": {"type": "integer", "multipleOf": 3}}}},
    "not any of one of": {"type": "string", "maxLength": 5, "not": {"oneOf": [{"pattern": "^a"}, {"maxLength": 1}]}},
    "at most two": {"type": "array", "items": {"enum": [1, 2, 3]}, "contains": {"const": 2}, "maxContains": 2},
    "two or three": {
        "type": "array",
        "items": {"enum": ["a", "b", "c"]},
        "contains": {"const": "b"},
        "minContains": 2,
        "maxContains": 3,
        "maxItems": 6,
    },
    "perhaps one": {
        "type": "array",
        "items": {"enum": ["a", "b"]},
        "contains": {"const": "b"},
        "minContains": 0,
        "maxContains": 1,
        "maxItems": 4,
    },
    "one of two patterns of a name": {
        "oneOf": [
            closed(
                ["from"], **{"from": {"type": "string", "pattern": "^[a-z]+:[a-z]+$", "maxLength": 9}, "more": BOOLEAN}
            ),
            closed(
                ["from"], **{"from": {"type": "string", "pattern": "^[a-z:]+@[a-z]+$", "maxLength": 9}, "more": BOOLEAN}
            ),
        ]
    },
    "one of two limits": {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "maxLength": 3}]},
    "recursion beside a count": {
        "$ref": "#/$defs/n",
        "$defs": {"n": closed(v=BOOLEAN, next={"$ref": "#/$defs/n", "minProperties": 1})},
    },
    "recursion beside unknown words": {
        "$ref": "#/$defs/n",
        "$defs": {"n": closed(v=BOOLEAN, next={"$ref": "#/$defs/n", "nullable": True})},
    },
    "recursion and a name": {
        "$ref": "#/$defs/n",
        "$defs": {"n": closed(v=BOOLEAN, next={"allOf": [{"$ref": "#/$defs/n"}, {"required": ["v"]}]})},
    },
    "reference into a condition": closed(["a"], a=STRING, b={"$ref": "#/dependentSchemas/a/$defs/short"})
    | {"dependentSchemas": {"a": {"required": ["b"], "$defs": {"short": {"enum": ["x", "y"]}}}}},
    "alternatives with look-behind": {"anyOf": [{"type": "string", "pattern": "(?<!a)b"}, {"type": "boolean"}]},
    "not a type": {"not": {"type": ["object", "array", "string", "number"]}},
    "not a value": closed(["a"], a={**KIND, "not": {"const": "cash"}}),
    "not some values": closed(["a"], a={**KIND, "not": {"enum": ["cash", "card"]}}),
    "dependent names": {**closed(a=BOOLEAN, b=BOOLEAN, c=BOOLEAN), "dependentRequired": {"a": ["b"], "b": ["c"]}},
    "unevaluated properties": {"type": "object", "properties": {"a": BOOLEAN}, "unevaluatedProperties": False},
    "contains": {"type": "array", "contains": {"const": 5}, "items": {"type": "integer", "maximum": 9, "minimum": 0}},
    "contains, items unknown": {
        "type": "array",
        "contains": BOOLEAN,
        "maxItems": 3,
        "items": {"type": ["boolean", "null"]},
    },
    "set of an enumeration": {"type": "array", "items": KIND, "uniqueItems": True},
    "set of at least two": {"type": "array", "items": KIND, "uniqueItems": True, "minItems": 2},
    "set of booleans": {"type": "array", "items": BOOLEAN, "uniqueItems": True},
    "one of closed objects": {
        "oneOf": [{**closed([], a=BOOLEAN, b=STRING)}, {**closed([], a=BOOLEAN, c=STRING)}, closed(["d"], d=BOOLEAN)],
    },
    "one of objects by a value that may be missing": {
        **closed([], type={"enum": ["a", "b", "c"]}, at=BOOLEAN),
        "oneOf": [
            {"properties": {"type": {"const": "a"}}},
            {"properties": {"type": {"const": "b"}, "at": {"const": True}}},
        ],
    },
    "one of lists": {
        "oneOf": [{"type": "array", "items": kind, "minItems": 1, "maxItems": 2} for kind in (BOOLEAN, STRING)],
    },
    "one of many texts": {"oneOf": [{"const": f"x{i}"} for i in range(50)]},
    "one of a text and an object or other texts": {
        "oneOf": [{"anyOf": [closed(a=BOOLEAN), {"type": "string", "maxLength": 3}]}, {"enum": ["a", "abcd"]}],
    },
    "not one of a few texts": {"type": "string", "pattern": "^(?!(no|none)$)[n-o]{2,4}$"},
    "a path": {"type": "string", "pattern": FRICTIONLESS},
    "a line": {"type": "string", "pattern": r"\A[^\n]*\Z"},
    "if, then, else": {
        **closed(["kind"], kind=KIND, iban=STRING, number=INTEGER),
        "if": {"properties": {"kind": {"const": "bank"}}},
        "then": {"required": ["iban"]},
        "else": {"required": ["number"]},
    },
    "if with required": {
        **closed(kind=KIND, iban=STRING),
        "if": {"properties": {"kind": {"const": "bank"}}, "required": ["kind"]},
        "then": {"required": ["iban"]},
    },
    "if of two": {
        **closed(["a", "b"], a=BOOLEAN, b=BOOLEAN, c=INTEGER),
        "if": {"properties": {"a": {"const": True}, "b": {"const": False}}},
        "then": {"required": ["c"]},
    },
    "if of a text": {
        **closed(["a"], a=STRING, b=INTEGER),
        "if": {"properties": {"a": {"enum": ["x", "xy"]}}, "required": ["a"]},
        "then": {"required": ["b"]},
    },
    "if of two conditions": {
        **closed(["a"], a=KIND, b=BOOLEAN, c=INTEGER),
        "if": {"anyOf": [{"properties": {"a": {"const": "bank"}}}, {"required": ["b"]}]},
        "then": {"required": ["c"]},
    },
    "not some texts": {"type": "string", "maxLength": 4, "not": {"enum": ["", "a", "ab", "]^-", 5]}},
    "not both": {**closed(a=BOOLEAN, b=BOOLEAN), "not": {"required": ["a", "b"]}},
    "none of them": {**closed(a=BOOLEAN, b=BOOLEAN), "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    "not what is not": closed(["a"], a={"not": {"not": {"type": "boolean"}}}),
    "dependencies": {**closed(a=BOOLEAN, b=BOOLEAN, c=BOOLEAN), "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
    "dependent schemas": {
        **closed(a=BOOLEAN, b=BOOLEAN),
        "dependentSchemas": {"a": {"properties": {"b": {"const": True}}, "required": ["b"]}},
    },
    "if of anything": {
        **closed(["a"], a=STRING, b=INTEGER),
        "if": {"properties": {"a": {"minLength": 2}}},
        "then": {"required": ["b"]},
    },
    "unevaluated properties beside others": {
        "$ref": "#/$defs/a",
        "type": "object",
        "allOf": [{"properties": {"b": BOOLEAN}, "required": ["b"]}],
        "unevaluatedProperties": False,
        "$defs": {"a": {"properties": {"a": INTEGER}}},
    },
    "unevaluated properties, all spoken of": {
        "type": "object",
        "allOf": [closed(a=BOOLEAN)],
        "unevaluatedProperties": False,
    },
    "unevaluated items": {"type": "array", "prefixItems": [BOOLEAN], "unevaluatedItems": False},
    "no names": {"type": "object", "propertyNames": False},
    "not an integer": {"not": {"type": ["integer", "string"]}},
    "counts as floats": {"type": "string", "minLength": 1.0, "maxLength": 3.0},
    "how many of nothing": {"type": "array", "items": BOOLEAN, "minContains": 2, "maxItems": 1},
    "objects told apart by names": {"oneOf": [{"properties": {"a": BOOLEAN}, "required": ["a"]}, {"required": ["b"]}]},
    "anything": True,
    "contains two": {"type": "array", "contains": {"const": 5}, "minContains": 2, "items": INTEGER},
    "contains none": {"type": "array", "contains": {"const": 5}, "minContains": 0, "items": BOOLEAN},
    "look-ahead at the beginning": {
        "type": "string",
        "pattern": r"^(?=.*[0-9])(?=[^)(]*[A-Z])[\x20-\x7e]{3,8}$",
    },
    "one of two names": {**closed(a=INTEGER, b=INTEGER), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of two, of which one is wider": {
        **closed(a=INTEGER, b=INTEGER, c=BOOLEAN),
        "oneOf": [{"required": ["a"]}, {"required": ["a", "b"], "properties": {"c": {"const": True}}}],
    },
    "one of two names, or neither": {
        **closed(a=INTEGER, b=INTEGER),
        "oneOf": [
            {"required": ["a"]},
            {"required": ["b"]},
            {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        ],
    },
    "one of two open objects": {
        "oneOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]},
        ]
    },
    "one of two that refer to themselves": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/fork"}]},
            "leaf": {"type": "object", "properties": {"value": BOOLEAN}, "required": ["value"]},
            "fork": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}},
                "required": ["next"],
                "additionalProperties": False,
            },
        },
    },
    "one of two lists": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
    "a name or another text": {"oneOf": [{"const": "none"}, {"type": "string", "maxLength": 5}]},
    "one of two lengths": {
        "oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 4, "maxLength": 6}]
    },
    "one of two kinds": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": 1}, "a": BOOLEAN}, "required": ["kind", "a"]},
            {"type": "object", "properties": {"kind": {"enum": [2, 3]}, "b": BOOLEAN}, "required": ["kind", "b"]},
        ]
    },
    "unevaluated properties of one of several": {
        "type": "object",
        "properties": {"a": INTEGER},
        "anyOf": [{"properties": {"b": BOOLEAN}, "required": ["b"]}, closed(a=INTEGER, c=BOOLEAN)],
        "unevaluatedProperties": False,
    },
    "unevaluated properties beside a condition": {
        "type": "object",
        "properties": {"a": BOOLEAN, "c": BOOLEAN},
        "required": ["a"],
        "if": {"properties": {"a": {"const": True}}},
        "then": {"properties": {"b": INTEGER}},
        "unevaluatedProperties": False,
    },
    "one property of several": {**closed(a=INTEGER, b=BOOLEAN), "minProperties": 1, "maxProperties": 1},
    "some properties of several": {**closed(a=INTEGER, b=BOOLEAN, c=BOOLEAN), "required": ["b"], "maxProperties": 2},
    "any property of several": {**closed(a=INTEGER, b=BOOLEAN), "minProperties": 1},
    "patterns of names that overlap beyond what is known": {
        "type": "object",
        "patternProperties": {
            "^(a.)?file$": STRING,
            "name": STRING,
            "tags": {"type": "array"},
            "vars": {"maxItems": 2},
        },
        "oneOf": [{"required": ["file"]}, {"required": ["a.file"]}],
        "additionalProperties": False,
    },
    "no schema of some that are referred to": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/old"}, BOOLEAN]}, "b": {"$ref": "#/$defs/endless"}},
        "$defs": {
            "old": {"not": {}},
            "endless": {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1},
        },
    },
    "alternatives that the rest rules out": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/wide"}, "b": BOOLEAN},
        "$defs": {
            "wide": {
                "type": "object",
                "required": ["x"],
                "properties": {"x": BOOLEAN},
                "anyOf": [closed(y=BOOLEAN), {"type": "string"}],
            }
        },
    },
    "a reference to the only anchor": {
        "$dynamicAnchor": "node",
        "type": "object",
        "properties": {"next": {"$dynamicRef": "#node"}, "value": BOOLEAN},
        "additionalProperties": False,
    },
    "one of two lengths of arrays": {
        "type": "array",
        "oneOf": [{"maxItems": 2, "items": BOOLEAN}, {"items": BOOLEAN, "minItems": 1, "maxItems": 1}],
    },
    "names that other keywords may stand beside": {
        "type": "object",
        "propertyNames": {"$id": "names", "$$description": ["Names."], "enum": ["a", "b"]},
        "additionalProperties": BOOLEAN,
    },
    "then without if": {**STRING, "then": {"minLength": 100}},
    "64-bit integers": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "safe integers": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    "zod's email": {"type": "string", "format": "email", "pattern": EMAIL},
    "pydantic's Decimal": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
    **{
        f"format {name}": {"type": "string", "format": name, "maxLength": 5}
        for name in ("url", "binary", "byte", "jwt", "klingon")
    },
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_instances_are_valid(name: str, compiler: Compiler) -> None:
    schema = REWRITTEN[name]
    grammar = json_grammar(schema)
    compiler.check(grammar)
    matcher = compiler.compile(grammar)
    texts = [text for seed in range(40) if (text := walk(matcher, random.Random(seed))) is not None]
    assert texts
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("name", "instance", "good"),
    [
        ("names by pattern", {"ab": 1, "c": 2}, True),
        ("names by length, some known", {"ab": True, "abc": 3}, True),
        ("names of an enumeration", {"cash": 1, "a b": 2, "a.b": 3, "^$": 4}, True),
        ("names of an enumeration", {"a-b": 1}, False),
        ("names by length", {"ä€": True}, True),
        ("names by length", {"a": True}, False),
        ("zod's record", {"anything at all": "b"}, True),
        ("not a type", None, True),
        ("not a value", {"a": "bank"}, True),
        ("not a value", {"a": "cash"}, False),
        ("dependent names", {"a": True, "b": True, "c": True}, True),
        ("dependent names", {"c": True}, True),
        ("dependent names", {}, True),
        ("contains", [5, 1, 2], True),
        ("set of an enumeration", [], True),
        ("set of an enumeration", ["card", "bank"], True),
        ("set of an enumeration", ["card", "card"], False),
        ("if, then, else", {"kind": "bank", "iban": "x"}, True),
        ("if, then, else", {"kind": "card", "number": 1}, True),
        ("if, then, else", {"kind": "card", "iban": "x"}, False),
        ("if with required", {}, True),
        ("if with required", {"kind": "bank"}, False),
        ("if of two", {"a": True, "b": True}, True),
        ("if of two", {"a": True, "b": False}, False),
        ("if of a text", {"a": "xyz"}, True),
        ("if of a text", {"a": "x"}, False),
        ("if of a text", {"a": "xy", "b": 1}, True),
        ("not some texts", "abc", True),
        ("not some texts", "]^-", False),
        ("not some texts", "b", True),
        ("not some texts", "a", False),
        ("not both", {"a": True}, True),
        ("contains two", [5, 5, 1], True),
        ("if of anything", {"a": "abc", "b": 1}, True),
        ("if of anything", {"a": "abc"}, False),
        ("unevaluated properties beside others", {"a": 1, "b": True}, True),
        ("unevaluated properties beside others", {"b": True, "c": 1}, False),
        ("unevaluated properties, all spoken of", {"a": True}, True),
        ("unevaluated items", [True], True),
        ("unevaluated items", [True, True], False),
        ("no names", {}, True),
        ("not an integer", False, True),
        ("look-ahead at the beginning", "x1Y", True),
        ("look-ahead at the beginning", "xyz1", False),
        ("one of two names", {"a": 1}, True),
        ("one of two names", {"b": 1}, True),
        ("one of two names", {"a": 1, "b": 1}, False),
        ("one of two names, or neither", {}, True),
        ("one of two, of which one is wider", {"a": 1, "c": False}, True),
        ("one of two, of which one is wider", {"a": 1, "b": 1, "c": True}, False),
        ("one of two open objects", {"b": 1, "c": 2}, True),
        ("one of two that refer to themselves", {"next": {"next": {"value": True}}}, True),
        ("one of two lists", "b", False),
        ("one of two lists", "c", True),
        ("a name or another text", "none", False),
        ("a name or another text", "nonet", True),
        ("one of two kinds", {"kind": 1, "a": True}, True),
        ("one of two kinds", {"kind": 3, "b": True, "a": 5}, True),
        ("64-bit integers", 2**53, True),
        ("zod's email", "first.last+tag@mail.example.com", True),
        ("zod's email", "first..last@example.com", False),
        ("pydantic's Decimal", "-12.50", True),
        ("pydantic's Decimal", "-.", False),
        ("one of closed objects", {"a": True}, False),
        ("one of closed objects", {"a": True, "c": "x"}, True),
        ("one of objects by a value that may be missing", {"at": True}, False),
        ("one of objects by a value that may be missing", {"type": "b", "at": True}, True),
        ("one of lists", [], False),
        ("one of lists", ["x"], True),
        ("one of a text and an object or other texts", "a", False),
        ("one of a text and an object or other texts", {"a": True}, True),
        ("not one of a few texts", "none", False),
        ("not one of a few texts", "noon", True),
        ("a path", "a.b/c.", True),
        ("a path", "a..b", False),
        ("a path", "/a", False),
        ("format klingon", "Qapla", True),
        ("unevaluated properties of one of several", {"a": 1, "b": True}, True),
        ("unevaluated properties of one of several", {"c": True}, True),
        ("unevaluated properties of one of several", {"a": 1, "x": 1}, False),
        ("unevaluated properties beside a condition", {"a": True, "c": True}, True),
        ("one property of several", {"b": True}, True),
        ("one property of several", {"a": 1, "b": True}, False),
        ("one property of several", {}, False),
        ("some properties of several", {"b": True, "c": True}, True),
        ("any property of several", {"a": 1, "b": True}, True),
        ("any property of several", {}, False),
        ("patterns of names that overlap beyond what is known", {"name": "x", "file": "y"}, True),
        ("no schema of some that are referred to", {"a": True}, True),
        ("no schema of some that are referred to", {"b": []}, False),
        ("alternatives that the rest rules out", {"b": True}, True),
        ("a reference to the only anchor", {"next": {"value": True}}, True),
        ("one of two lengths of arrays", [], True),
        ("one of two lengths of arrays", [True], False),
        ("one of two lengths of arrays", [True, False], True),
        ("names that other keywords may stand beside", {"b": True}, True),
    ],
)
def test_what_people_mean_can_be_said(name: str, instance: Any, good: bool, compiler: Compiler) -> None:
    matcher = compiler.compile(json_grammar(REWRITTEN[name]))
    written = json.dumps(instance, ensure_ascii=False).encode()
    assert (matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting()) is good


@pytest.mark.parametrize("step", [0.01, 0.1, 0.05, 0.001])
def test_multiples_are_reckoned_in_decimals(step: float, compiler: Compiler) -> None:
    matcher = compiler.compile(json_grammar({"type": "number", "multipleOf": step, "minimum": 0, "maximum": 10_000}))
    for seed in range(30):
        if (text := walk(matcher, random.Random(seed))) is not None:
            assert Decimal(text) % Decimal(str(step)) == 0, text
    written = str(Decimal(str(step)) * 7).encode()
    assert matcher.try_consume_tokens(list(written)) == len(written)


@pytest.mark.parametrize(
    ("word", "schema"),
    [
        ("not", {"type": "number", "not": {"type": "integer"}}),
        ("contains", {"type": "array", "contains": {"multipleOf": 2}, "maxContains": 2}),
        ("not", {"not": {"multipleOf": 2}}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ("pattern", {"type": "string", "pattern": "^(?:a(?=b.).)*$"}),
        ("propertyNames", {**closed(a=STRING), "propertyNames": {"pattern": "^(a+)+$"}}),
        ("propertyNames", {**closed(a=STRING), "propertyNames": {"maxLength": 1}, "additionalProperties": INTEGER}),
        ("minimum", {"type": "integer", "minimum": 2**60}),
        ("multipleOf", {"type": "number", "multipleOf": 1e-9}),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(word: str, schema: Any, compiler: Compiler) -> None:
    with pytest.raises(ValueError, match=word):
        compiler.check(json_grammar(schema))


def test_what_is_left_out_is_told(compiler: Compiler) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": STRING, "uniqueItems": True},
            "b": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "c": {"type": "string", "format": "klingon"},
            "d": {"type": "object", "minProperties": 3},
            "e": {"type": "integer", "format": "int64"},
        },
    }
    notes: list[str] = []
    compiler.check(json_grammar(schema, notes, lenient=True))
    assert sorted(notes) == [
        "minProperties is not enforced",
        "oneOf is not enforced, but for anyOf",
        "the format 'klingon' is not enforced: it is an annotation",
        "uniqueItems is not enforced",
    ]
    with pytest.raises(ValueError, match="minProperties"):
        json_grammar(schema)


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]}, ['{"a": 1}', '{"c": 1}']),
        (
            {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["a", "b"]}]},
            ['{"a": 1}'],
        ),
        ({"oneOf": [{}, closed(a=STRING)]}, ["1", '"a"']),
        ({"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ['"ac"', '"cb"']),
        ({"type": "string", "not": {"anyOf": [{"pattern": "^a"}, {"pattern": "b{2}"}]}}, ['"ba"', '""']),
        ({"not": {"const": "a"}}, ['"b"', "1"]),
        ({"type": "string", "pattern": r"^(?!/)(?!.*\.\.)[a-z./]+$"}, ['"a/b.c"']),
        ({"type": "string", "pattern": "^([a-z]|[a-z]([a-z-](?!--))*[a-z])$"}, ['"a-b"', '"a"']),
        (
            {"type": "object", "propertyNames": {"pattern": "^a", "not": {"enum": ["ab"]}, "maxLength": 3}},
            ['{"ac": 1}'],
        ),
        ({"type": "object", "propertyNames": {"minLength": 2}, "patternProperties": {"^a": INTEGER}}, ['{"ab": 1}']),
        (
            {
                "type": "object",
                "patternProperties": {"^a": INTEGER, "b$": {"minimum": 3}},
                "additionalProperties": False,
            },
            ['{"a": 1}', '{"ab": 4}', '{"b": 3}'],
        ),
    ],
)
def test_what_overlaps_is_parted(schema: Any, valid: list[str], compiler: Compiler) -> None:
    grammar = json_grammar(schema)
    compiler.check(grammar)
    matcher = compiler.compile(grammar)
    judge = jsonschema.Draft202012Validator(schema)
    for text in valid:
        assert judge.is_valid(json.loads(text))
        follower = matcher.deep_copy()
        assert follower.try_consume_tokens(list(text.encode())) == len(text), text
        assert follower.is_accepting(), text
    for value in ("a", "ab", "abb", "cb", "a..b", "/a", "a--b", {"a": 1, "b": 1}, {"a": "x"}, {"ab": 1}, {"x": 1}, {}):
        follower, written = matcher.deep_copy(), list(json.dumps(value).encode())
        can_be = follower.try_consume_tokens(written) == len(written) and follower.is_accepting()
        assert judge.is_valid(value) or not can_be, value
    for seed in range(8):
        if (drawn := walk(matcher, random.Random(seed))) is not None:
            judge.validate(json.loads(drawn))


@pytest.mark.parametrize("pattern", ["^.*$", r"^\d+$", "^[a-z]*$"])
def test_other_names_are_none_that_some_reader_finds_the_pattern_in(pattern: str, compiler: Compiler) -> None:
    """`.` is not always U+2028, a digit not always of ASCII, and `$` may stand before a last line feed."""
    schema = {"type": "object", "patternProperties": {pattern: INTEGER}, "additionalProperties": STRING}
    grammar = json_grammar(schema)
    compiler.check(grammar)
    matcher = compiler.compile(grammar)
    for name in ("a\u2028", "\u0664", "a\n", "1\n"):
        if re.search(pattern, name):
            follower, written = matcher.deep_copy(), list(json.dumps({name: "x"}, ensure_ascii=False).encode())
            assert not (follower.try_consume_tokens(written) == len(written) and follower.is_accepting()), name


def test_formats_alone_tell_no_alternatives_apart(compiler: Compiler) -> None:
    texts = {"type": "string", "oneOf": [{"format": "uri"}, {"format": "hostname"}]}
    matcher = compiler.compile(json_grammar({"type": "object", "properties": {"a": texts, "b": BOOLEAN}}))
    assert matcher.deep_copy().try_consume_tokens(list(b'{"b": true}')) == 11
    assert matcher.deep_copy().try_consume_tokens(list(b'{"a": "x"')) < 9


def test_alternatives_that_another_holds_are_left_out_with_a_note() -> None:
    notes: list[str] = []
    json_grammar({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]}, notes)
    assert notes == ["oneOf: of alternatives that overlap, some are left out"]
