"""JSON types that a schema allows: the same for grammars and for parsers of what a model wrote by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.structured.values import TYPES, listed, pointed_to

Schema = Mapping[str, Any]
ALL_KINDS = frozenset(TYPES)
_MAX_DEPTH = 16  # of references and combinations of schemas
_MAX_SCHEMAS = 256


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema may allow. `root`: the schema that its references point into."""
    return _kinds(schema, root, _MAX_DEPTH, [_MAX_SCHEMAS])


def _kinds(schema: Any, root: Any, depth: int, left: list[int]) -> frozenset[str]:
    """`left` [1]: how many more schemas are looked at; the types of others may be any."""
    left[0] -= 1
    if not isinstance(schema, Mapping) or not depth or left[0] < 0:
        return ALL_KINDS
    kinds = ALL_KINDS
    if "type" in schema:
        named = {each for each in listed(schema["type"]) if isinstance(each, str)}
        kinds = frozenset(named & ALL_KINDS) or ALL_KINDS
        kinds |= {"integer"} if "number" in kinds else frozenset()
    if "const" in schema:
        kinds &= {kind_of(schema["const"])}
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        kinds &= set(map(kind_of, schema["enum"]))
    if isinstance(reference := schema.get("$ref"), str) and isinstance(target := pointed_to(root, reference), Mapping):
        kinds &= _kinds(target, root, depth - 1, left)
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            kinds &= frozenset().union(*(_kinds(each, root, depth - 1, left) for each in options))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        kinds &= _kinds(each, root, depth - 1, left)
    return kinds or ALL_KINDS


def kind_of(value: Any) -> str:
    """Return the JSON type of a value; whole numbers are integers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def property_kinds(name: str, schema: Any) -> frozenset[str]:
    """Return the JSON types of a tool's argument. `schema`: that of the arguments."""
    if not isinstance(schema, Mapping):
        return ALL_KINDS
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return kinds_of(properties[name], schema)
    others = schema.get("additionalProperties")
    return kinds_of(others, schema) if isinstance(others, Mapping) else ALL_KINDS
