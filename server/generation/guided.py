"""Builds the engine's `StructuredOutputs` from a request's structured outputs, tools and reasoning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from engine import ParameterError, SamplingParams, StructuredOutputs, TagsError
from engine.core.params.structured import MAX_TAGS, Tag, Tags, Thoughts
from server.generation.conversation import Prompt
from server.generation.errors import InvalidRequestError
from server.generation.model import Model
from server.generation.request import GenerationRequest, Tool
from server.generation.warnings import Warnings
from server.parsing.formats import ToolFormat
from server.parsing.tools import call_tags

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# A schema with one of these keywords defines its additional properties itself.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}


async def guided(
    model: Model, request: GenerationRequest, prompt: Prompt, sampling: SamplingParams, warnings: Warnings
) -> SamplingParams:
    """Return `sampling` with a grammar for the answer, if the request needs one. `RequestError` names the field at
    fault.

    With `tool_choice` "auto", parts of a tool's schema that cannot be enforced are left out, or all of it, unless
    the tool is `strict`. `warnings` lists what is not enforced, including unknown `format` keywords.
    """
    mode = request.tool_mode
    chat = prompt.chat
    format = chat.format_for(request) if chat is not None else None
    content = request.structured_outputs if mode != "required" else {}
    if format is None and not content:
        return sampling
    if format is not None and (num_tools := len(request.callable_tools)) > MAX_TAGS:
        raise InvalidRequestError(f"at most {MAX_TAGS} tools can be callable, got {num_tools}", "tools")
    if content and format is not None and format.bare:
        reason = "cannot be given together with tools, which this model calls with JSON objects: use tool_choice none"
        raise InvalidRequestError(reason, "structured_outputs")
    thoughts = None
    in_messages = chat is not None and chat.writes_harmony and not prompt.past_reasoning
    marks = chat.reasoning_format if chat is not None else None
    if marks is not None and not prompt.past_reasoning and not in_messages:
        thoughts = Thoughts(begin=marks.begin, end=marks.end, opened=prompt.in_reasoning)
    several = chat is not None and chat.takes_several_calls(request)
    free_form: set[int] = set()
    while True:
        tags = _tags(request, format, several, free_form) if format is not None else None
        try:
            structured = StructuredOutputs(**content, tags=tags, thoughts=thoughts, in_messages=in_messages)
            sampling = await model.engine.prepare(sampling.clone(structured_outputs=structured), request.tenant)
        except TagsError as error:
            assert not free_form
            free_form = _not_enforced(request, error, warnings)
        except ValueError as error:
            raise _refused(error, bool(content)) from None
        else:
            return _with_warnings(sampling, request, warnings)


def _with_warnings(sampling: SamplingParams, request: GenerationRequest, warnings: Warnings) -> SamplingParams:
    """Move the notes on what is not enforced from `sampling` to `warnings`."""
    structured = sampling.structured_outputs
    if structured is None or not structured.notes:
        return sampling
    tools = request.callable_tools
    for number, note in structured.notes:
        if number is None:
            warnings.add(note, "structured_outputs")
        else:
            _, tool = tools[number]
            warnings.add(f"the arguments of {tool.name}: {note}", *tool.path)
    return sampling.clone(structured_outputs=replace(structured, notes=()))


def _tags(request: GenerationRequest, format: ToolFormat, several: bool, free_form: Collection[int]) -> Tags:
    """Build the tool call tags. `free_form`: indexes of the tools that accept any object as arguments."""
    required = request.tool_mode == "required"
    tools = [
        (tool.name, _ANY_ARGUMENTS if index in free_form else _arguments(tool))
        for index, tool in request.callable_tools
    ]
    tags = call_tags(format, tools, required=required, several=several)
    own = zip(tags.tags, request.callable_tools, strict=True)
    return replace(tags, tags=[_of_tool(tag, tool, required) for tag, (_, tool) in own])


def _of_tool(tag: Tag, tool: Tool, required: bool) -> Tag:
    is_lenient = not tool.strict and (tool.grammar is not None or not required)
    return replace(tag, grammar=tool.grammar, lenient=is_lenient)


def _arguments(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, closed to additional properties by default."""
    if tool.parameters is None:
        return _NO_ARGUMENTS
    schema = {"type": "object", **tool.parameters}
    schema["type"] = "object"
    properties, required = schema.get("properties"), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list) and not schema.keys() & _OPEN:
        schema |= {"additionalProperties": False} if set(map(str, required)) <= properties.keys() else {}
    return schema


def _not_enforced(request: GenerationRequest, error: TagsError, warnings: Warnings) -> set[int]:
    """Return the indexes of tools whose schemas are not enforced. `RequestError` for a schema that must be enforced."""
    tools = request.callable_tools
    indexes = set()
    for number, reason in error.reasons.items():
        index, tool = tools[number]
        if tool.strict or request.tool_mode == "required":
            raise InvalidRequestError(f"the schema of {tool.name}: {reason}", *tool.path)
        warning = f"the schema of {tool.name} is not enforced, its arguments may be any object: {reason}"
        warnings.add(warning, *tool.path)
        indexes.add(index)
    return indexes


def _refused(error: ValueError, has_content: bool) -> InvalidRequestError:
    """Convert the engine's error, naming the field at fault. `has_content`: the request has structured outputs."""
    if not isinstance(error, ParameterError) or error.path[0] != "structured_outputs":
        return InvalidRequestError(str(error), lead=None)
    if error.path[1:] == ("tags",) or not has_content:
        return InvalidRequestError(error.reason, "tools", lead=error.lead)
    return InvalidRequestError(error.reason, *error.path, lead=error.lead)
