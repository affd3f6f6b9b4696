"""JSON types that a schema allows: the same for grammars and for parsers of what a model wrote by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.structured.values import TYPES, listed, pointed_to

Schema = Mapping[str, Any]
ALL_KINDS = frozenset(TYPES)
_MAX_DEPTH = 16  # of references and combinations of schemas


def kinds_of(schema: Any, root: Any, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """Return the JSON types that a schema may allow. `root`: the schema that its references point into."""
    if not isinstance(schema, Mapping) or not depth:
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
        kinds &= kinds_of(target, root, depth - 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            kinds &= frozenset().union(*(kinds_of(each, root, depth - 1) for each in options))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        kinds &= kinds_of(each, root, depth - 1)
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
