"""Brings tools as clients send them to a sound form, for the chat template and for the grammar of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from server.generation.request import Tool

_MAX_DEPTH = 64
_MAX_NOTES = 5  # of one tool
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_LISTS = ("enum", "required", *_SCHEMA_LISTS)
_VALUES = ("const", "default", "example")  # null is a value of these
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Types that programming languages and other APIs name.
_OTHER_TYPES = {"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number",
    "bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "none": "null"}  # fmt: skip


def sound_tool(tool: Tool) -> tuple[Tool, list[str]]:
    """Return the tool with a sound schema of its arguments, and notes on what was changed."""
    notes: list[str] = []
    given = tool.parameters
    parameters = _sound_root(given, notes) if given is not None else None
    if not notes:
        return tool, []
    function = {**tool.definition.get("function", {}), "parameters": parameters}
    if len(notes) > _MAX_NOTES:
        notes = [*notes[:_MAX_NOTES], f"and {len(notes) - _MAX_NOTES} more changes"]
    return replace(tool, parameters=parameters, definition={**tool.definition, "function": function}), notes


def completed_definitions(definitions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the definitions with the optional fields that some chat templates read: descriptions and parameters."""
    return [_completed(each) for each in definitions]


def plain_definitions(definitions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return completed definitions whose schemas each have one form: some chat templates read no others.

    The published macro `json_to_python_type` calls itself without end for the type null.
    """
    found = completed_definitions(definitions)
    for index, each in enumerate(found):
        function = each.get("function")
        if isinstance(function, dict):
            found[index] = {**each, "function": {**function, "parameters": _plain(function["parameters"])}}
    return found


def _plain(schema: Any, depth: int = _MAX_DEPTH) -> dict[str, Any]:
    """Return a schema without booleans as schemas, lists of items and null as a type."""
    if not (isinstance(schema, dict) and depth):
        return {}
    out = {name: value for name, value in schema.items() if name != "type"}
    kinds = schema.get("type", ())
    left = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"]
    if left:
        out["type"] = left[0] if len(left) == 1 else left
    if isinstance(out.get("properties"), dict):
        plain = {name: _plain(each, depth - 1) for name, each in out["properties"].items()}
        out["properties"] = {name: {"description": "", **each} for name, each in plain.items()}
    if "items" in out:
        items = out["items"]
        out["items"] = _plain(items[0] if items and isinstance(items, list) else items, depth - 1)
    if "object" in left:
        out["additionalProperties"] = _plain(out.get("additionalProperties"), depth - 1)
    return out


def _completed(definition: dict[str, Any]) -> dict[str, Any]:
    function = definition.get("function")
    if not isinstance(function, dict):
        return definition
    function = {**function, "description": function.get("description") or ""}
    parameters = function.get("parameters")
    parameters = {**_EMPTY, **parameters} if isinstance(parameters, dict) else _EMPTY
    properties = parameters.get("properties")
    if isinstance(properties, dict):
        described = {
            name: {**each, "description": each.get("description") or ""} if isinstance(each, dict) else each
            for name, each in properties.items()
        }
        parameters = {**parameters, "properties": described}
    function["parameters"] = {**parameters, "required": parameters.get("required") or []}
    return {**definition, "function": function}


def _sound_root(given: Any, notes: list[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        if given != []:
            notes.append(f"parameters: {_shown(given)} is no JSON schema, treated as {{}}")
        else:
            notes.append("parameters: [] is treated as {}")
        return {}
    schema = _sound(given, "", notes, _MAX_DEPTH)
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        notes.append(f'parameters: the type must be "object", got {_shown(kinds)}: the arguments may be any object')
        return {"type": "object", "additionalProperties": True}
    return schema


def _sound(schema: dict[str, Any], at: str, notes: list[str], depth: int) -> dict[str, Any]:
    """Return a schema without the keywords that have no meaning."""
    if not depth:
        return schema
    out: dict[str, Any] = {}
    for name, value in schema.items():
        where = f"{at}{name}"
        if value is None and name not in _VALUES:
            notes.append(f"{where}: null is treated as absent")
        elif name in _SCHEMA_MAPS:
            for properties in _sound_map(value, where, notes, depth):
                out[name] = properties
        elif name == "type":
            for kind in _sound_type(value, where, notes):
                out[name] = kind
        elif name in _LISTS and not (isinstance(value, list) and (value or name == "required")):
            notes.append(f"{where}: {_shown(value)} is treated as absent")
        elif name == "required":
            out[name] = _sound_names(value, where, notes)
        elif name in _SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
            out[name] = [_sound_member(each, f"{where}[{i}]", notes, depth) for i, each in enumerate(value)]
        elif name in _SCHEMAS:
            out[name] = _sound_member(value, where, notes, depth)
        else:
            out[name] = value
    return out


def _sound_map(value: Any, where: str, notes: list[str], depth: int) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield {key: _sound_member(each, f"{where}.{key}", notes, depth) for key, each in value.items()}
    elif value == []:
        notes.append(f"{where}: [] is treated as {{}}")
        yield {}
    else:
        notes.append(f"{where}: {_shown(value)} is treated as absent")


def _sound_member(value: Any, where: str, notes: list[str], depth: int) -> Any:
    if isinstance(value, dict):
        return _sound(value, f"{where}.", notes, depth - 1)
    if isinstance(value, bool):
        return value
    notes.append(f"{where}: {_shown(value)} is no JSON schema, treated as {{}}")
    return {}


def _sound_type(value: Any, where: str, notes: list[str]) -> Iterator[str | list[str]]:
    given = value if isinstance(value, list) else [value]
    kinds = [_type(each) for each in given]
    found = list(dict.fromkeys(each for each in kinds if each is not None))
    if kinds != given:
        read = f"treated as {', '.join(found)}" if found and None not in kinds else "not enforced"
        notes.append(f"{where}: {_shown(value)} is no JSON type, {read}")
    if found and None not in kinds:
        yield found if isinstance(value, list) else found[0]


def _type(name: Any) -> str | None:
    if not isinstance(name, str):
        return None
    name = name if name in _TYPES else name.lower()
    return name if name in _TYPES else _OTHER_TYPES.get(name)


def _sound_names(value: list[Any], where: str, notes: list[str]) -> list[str]:
    names = [each for each in value if isinstance(each, str)]
    if names != value:
        notes.append(f"{where}: {_shown(value)} is no list of names, only its texts are used")
    return names


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
