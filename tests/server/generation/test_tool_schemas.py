"""Tools as clients send them: odd schemas are brought to a sound form, with a note that names each change."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from server.generation.request import Tool
from server.generation.tool_schemas import completed_definitions, sound_tool
from tests.support.live_server import Live

X = {"type": "string"}


def tool(parameters: Any) -> Tool:
    definition = {"type": "function", "function": {"name": "f", "parameters": parameters, "x-own": 1}}
    return Tool(name="f", parameters=parameters, strict=False, definition=definition, path=("tools", 0))


@pytest.mark.parametrize(
    ("given", "sound", "note"),
    [
        ([], {}, "parameters: []"),
        ("a", {}, "parameters: 'a' is no JSON schema"),
        ({"type": "string"}, {"type": "object", "additionalProperties": True}, "parameters: the type must be"),
        ({"type": "object", "properties": None}, {"type": "object"}, "properties: null"),
        ({"properties": []}, {"properties": {}}, "properties: []"),
        ({"properties": {"a": None}}, {"properties": {"a": {}}}, "properties.a: None is no JSON schema"),
        ({"properties": {"a": X}, "required": None}, {"properties": {"a": X}}, "required: null"),
        ({"properties": {"a": X}, "required": True}, {"properties": {"a": X}}, "required: True"),
        (
            {"properties": {"a": X}, "required": ["a", 1]},
            {"properties": {"a": X}, "required": ["a"]},
            "required: ['a', 1]",
        ),
        ({"properties": {"a": {**X, "enum": None}}}, {"properties": {"a": X}}, "properties.a.enum: null"),
        ({"properties": {"a": {**X, "enum": []}}}, {"properties": {"a": X}}, "properties.a.enum: []"),
        ({"properties": {"a": {"type": "STRING"}}}, {"properties": {"a": X}}, "properties.a.type: 'STRING'"),
        ({"properties": {"a": {"type": "any"}}}, {"properties": {"a": {}}}, "properties.a.type: 'any'"),
        (
            {"properties": {"a": {"items": {"type": "int"}}}},
            {"properties": {"a": {"items": {"type": "integer"}}}},
            "a.items.type",
        ),
        (
            {"properties": {"a": {"anyOf": [None, X]}}},
            {"properties": {"a": {"anyOf": [{}, X]}}},
            "properties.a.anyOf[0]",
        ),
    ],
)
def test_odd_schemas(given: Any, sound: Any, note: str) -> None:
    found, notes = sound_tool(tool(given))
    assert found.parameters == sound
    assert found.definition["function"] == {"name": "f", "parameters": sound, "x-own": 1}
    assert len(notes) == 1
    assert note in notes[0]
    assert sound_tool(found) == (found, [])


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"type": "object", "properties": {"type": {"type": ["string", "null"], "default": None}}, "required": []},
        {"properties": {"a": {"const": None}, "b": True, "c": {"enum": [None, "x"]}}, "title": "T", "x-order": [1]},
    ],
)
def test_sound_schemas_stay(schema: Any) -> None:
    given = tool(schema)
    assert sound_tool(given) == (given, [])


def test_deep_and_many() -> None:
    deep: dict[str, Any] = {"required": None}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    sound_tool(tool(deep))
    _, notes = sound_tool(tool({"properties": {f"p{i}": None for i in range(50)}}))
    assert len(notes) == 6
    assert notes[-1] == "and 45 more changes"


def test_optional_fields_for_templates_that_read_them() -> None:
    (found,) = completed_definitions([{"type": "function", "function": {"name": "f", "description": None}}])
    parameters = {"type": "object", "properties": {}, "required": []}
    assert found["function"] == {"name": "f", "description": "", "parameters": parameters}


def test_large_schemas_do_not_stop_the_event_loop(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def watched(tool: Tool) -> tuple[Tool, list[str]]:
        names.append(threading.current_thread().name)
        return sound_tool(tool)

    monkeypatch.setattr("server.generation.checks.sound_tool", watched)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": None}}}
    answer = live.chat(tools=[{"type": "function", "function": function}])
    assert answer.status_code == 200, answer.text
    assert "None is no JSON schema" in str(answer.json()["warnings"])
    assert [name.partition("_")[0] for name in names] == ["worker"]
