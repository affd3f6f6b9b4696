"""Random tools, calls that follow their schemas, and random walks through the grammars of calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

from engine.structured.arguments import prepare_arguments
from engine.structured.grammar import json_grammar, library_schema
from engine.structured.tags import compose
from server.parsing.formats import ToolFormat
from server.parsing.tools import call_tags
from tests.support.walks import END, TOKENS, allowed_by

Schema = dict[str, Any]
_PIECES = (
    "a",
    "Köln",
    " ",
    "\n",
    "\t",
    '"',
    "'",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "<",
    ">",
    "</",
    "=",
    "\\",
    "日本",
    "🦆",
    "/",
)
_WORDS = ("red", "deep blue", "x-1", "")


def random_value_schema(dice: random.Random, depth: int) -> Schema:
    options = ["string", "integer", "number", "boolean", "enum", "pattern", "length", "optional"]
    match dice.choice(options + ["array", "object"] * (depth > 0)):
        case "enum":
            return {"enum": list(dice.sample(_WORDS[:3], 2))}
        case "pattern":
            return {"type": "string", "pattern": "^[a-c]{1,4}$"}
        case "length":
            return {"type": "string", "minLength": 1, "maxLength": 5}
        case "optional":
            return {"anyOf": [{"type": "string"}, {"type": "null"}]}
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": 5}
        case "array":
            return {"type": "array", "items": random_value_schema(dice, depth - 1), "maxItems": 3}
        case "object":
            return random_schema(dice, depth - 1)
        case kind:
            return {"type": kind}


def random_schema(dice: random.Random, depth: int = 2) -> Schema:
    """The schema of an object with up to four properties, of which some are required."""
    names = dice.sample(["city", "num_days", "is_on", "Path2", "a.b"], dice.randint(0, 4))
    properties = {name: random_value_schema(dice, depth) for name in names}
    required = [name for name in names if dice.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_value(dice: random.Random, schema: Schema) -> Any:
    if "anyOf" in schema:
        schema = dice.choice(schema["anyOf"])
    if "enum" in schema:
        return dice.choice(schema["enum"])
    match schema["type"]:
        case "string" if "pattern" in schema:
            return "".join(dice.choices("abc", k=dice.randint(1, 4)))
        case "string" if "maxLength" in schema:
            return "".join(dice.choices("xyzü \n", k=dice.randint(1, 5)))
        case "string":
            return "".join(dice.choices(_PIECES, k=dice.randint(0, 12)))
        case "integer":
            return dice.randint(-5, 5)
        case "number":
            return dice.choice([0.5, -3, 1e6, 2.25])
        case "boolean":
            return dice.random() < 0.5
        case "null":
            return None
        case "array":
            return [random_value(dice, schema["items"]) for _ in range(dice.randint(0, 3))]
    return random_arguments(dice, schema)


def random_arguments(dice: random.Random, schema: Schema) -> dict[str, Any]:
    return {
        name: random_value(dice, each)
        for name, each in schema["properties"].items()
        if name in schema["required"] or dice.random() < 0.5
    }


def call_grammar(format: ToolFormat, tools: dict[str, Schema], required: bool = True) -> str:
    """The grammar of answers that call these tools."""
    tags = call_tags(format, list(tools.items()), required=required, several=True)
    instances = [
        prepare_arguments(tag.schema, tag.syntax, library_schema, [], False)
        if tag.syntax is not None
        else json_grammar(tag.schema)
        for tag in tags.tags
    ]
    return compose(None, tags, instances, None, {})


def marked_walk(matcher: LLMatcher, dice: random.Random, marks: Sequence[str]) -> str | None:
    """A sentence of the grammar: random bytes, and now and then a whole mark where one fits. None: it gets too long."""
    matcher = matcher.deep_copy()
    written = bytearray()
    for _ in range(400):
        allowed = allowed_by(matcher)
        if END in allowed and dice.random() < 0.5:
            return written.decode()
        chosen = [dice.choice(allowed)]
        if dice.random() < 0.5:
            fitting = [mark.encode() for mark in marks if mark and _fits(matcher, mark.encode())]
            chosen = list(dice.choice(fitting)) if fitting else chosen
        if chosen == [END]:
            return written.decode()
        assert matcher.consume_tokens(chosen), matcher.get_error()
        for token in chosen:
            written += TOKENS[token]
    return None


def _fits(matcher: LLMatcher, text: bytes) -> bool:
    return matcher.validate_tokens(list(text)) == len(text)
