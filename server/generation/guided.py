"""What an answer has to be: a request's fields and tools as the engine's `StructuredOutputs`. Compiles no grammar."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from engine.core.sampling_params import SamplingParams
from engine.core.structured_outputs import StructuredOutputs, Tags, Thoughts
from engine.errors import TagsError
from server.generation.conversation import Prompt
from server.generation.served_model import Serving
from server.http.errors import APIError
from server.http.fields import Ignored
from server.openai.protocol import ChatCompletionRequest, CompletionRequest, Function
from server.parsing.tools import ToolFormat, call_tags

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# A schema with one of these says itself what other properties there may be.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
_ENGINES_NAME = re.compile(r"structured_outputs(?:\.\w+)?(?=:? )")


async def guided(
    serving: Serving, request: ChatCompletionRequest | CompletionRequest, sampling: SamplingParams
) -> SamplingParams:
    """`sampling`, with what the request says of its answer, checked. 400 names the field that cannot be had."""
    for field, asked in request.asked.items():
        try:
            return await serving.prepare(sampling, StructuredOutputs(**asked))
        except ValueError as error:
            raise _refused(error, field) from None
    return sampling


async def constrained_chat(
    serving: Serving, request: ChatCompletionRequest, prompt: Prompt, sampling: SamplingParams, ignored: Ignored
) -> SamplingParams:
    """The same for a conversation: its answer may call tools, and begins with thoughts if the model has them.

    Where it is up to the model to call, tools whose schema cannot be enforced may be called with any object, unless they
    are `strict`; that is said.
    """
    mode, format = request.call_mode, serving.tool_format if request.call_mode != "none" else None
    content = request.asked if mode != "required" else {}
    if format is None and not content:
        return sampling
    if content and format is not None and format.bare:
        message = "cannot be given together with tools: this model writes its calls as JSON objects, too"
        raise APIError(400, f"{next(iter(content))}: {message}", next(iter(content)))
    thoughts = None
    if (marks := serving.reasoning_format) is not None and not prompt.past_reasoning:
        thoughts = Thoughts(begin=marks.begin, end=marks.end, opened=prompt.in_reasoning)
    field, asked = next(iter(content.items()), ("tools", {}))
    lax: set[int] = set()
    while True:
        tags = _tags(request, format, serving.takes_several_calls(request), lax) if format is not None else None
        try:
            return await serving.prepare(sampling, StructuredOutputs(**asked, tags=tags, thoughts=thoughts))
        except TagsError as error:
            assert not lax
            lax = _not_enforced(request, error, ignored)
        except ValueError as error:
            raise _refused(error, field) from None


def _functions(request: ChatCompletionRequest) -> list[tuple[int, Function]]:
    """The functions that may be called, with their places among the tools."""
    chosen = request.chosen_tools
    functions = ((place, tool.function) for place, tool in enumerate(request.tools or ()))
    return [(place, each) for place, each in functions if not chosen or each.name in chosen]


def _tags(request: ChatCompletionRequest, format: ToolFormat, several: bool, lax: Collection[int]) -> Tags:
    tools = [
        (function.name, _ANY_ARGUMENTS if place in lax else _arguments(place, function))
        for place, function in _functions(request)
    ]
    return call_tags(format, tools, required=request.call_mode == "required", several=several)


def _arguments(place: int, function: Function) -> dict[str, Any]:
    """The schema of a function's arguments: an object, and if nothing is said of further properties, without them."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    schema = {"type": "object", **function.parameters}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "object" not in kinds:
        raise APIError(
            400, f"tools[{place}]: the schema of {function.name} must be that of an object", f"tools[{place}]"
        )
    schema["type"] = "object"
    properties, required = schema.get("properties"), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list) and not schema.keys() & _OPEN:
        schema |= {"additionalProperties": False} if set(map(str, required)) <= properties.keys() else {}
    return schema


def _not_enforced(request: ChatCompletionRequest, error: TagsError, ignored: Ignored) -> set[int]:
    """The places of tools whose schemas are left aside. 400 for those that must not be."""
    functions = _functions(request)
    places = set()
    for number, reason in error.reasons.items():
        place, function = functions[number]
        if function.strict or request.call_mode == "required":
            raise APIError(400, f"tools[{place}]: the schema of {function.name}: {reason}", f"tools[{place}]")
        ignored.add(f"tools[{place}]", f"the arguments of {function.name} are any object, for its schema: {reason}")
        places.add(place)
    return places


def _refused(error: ValueError, field: str) -> APIError:
    """The engine's words, in those of the request."""
    message = str(error)
    if field == "structured_outputs":
        field = message.split()[0].rstrip(":")
    else:
        message = _ENGINES_NAME.sub(field, message, count=1)
    return APIError(400, message, field)
