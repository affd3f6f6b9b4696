"""Tool calls as their format writes them, and as a chat template has written them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.params.structured import Literals, Parameters
from engine.structured.kinds import Schema, kind_of
from server.parsing.formats import ToolFormat
from server.parsing.pieces import Blocks, CallStart, Content
from server.parsing.tools import ToolReader
from server.parsing.typed import dumped

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def written(format: ToolFormat, calls: Calls, ids: Sequence[str] = ()) -> str:
    """Return the text of calls. `ids`: of the calls; empty: new ones."""
    texts = []
    for number, (name, arguments) in enumerate(calls):
        before, between, after = (
            part.replace("{id}", ids[number] if ids else format.new_id()).replace(
                "{index}", str(number + format.first_index)
            )
            for part in format.call
        )
        texts.append(f"{before}{name}{between}{_arguments(format.arguments, arguments)}{after}")
    begin = "" if format.bare else format.begin
    return f"{begin}{format.opening}{format.separator.join(texts)}{format.closing}"


def _arguments(syntax: Parameters | Literals | None, arguments: Mapping[str, Any]) -> str:
    if isinstance(syntax, Parameters):
        return "".join(
            f"{syntax.key}{key}{syntax.value_mark(_kind(syntax, value))}"
            f"{value if isinstance(value, str) else dumped(value)}{syntax.end}"
            for key, value in arguments.items()
        )
    if isinstance(syntax, Literals):
        return syntax.separator.join(
            f"{key}{syntax.assign}{_literal(syntax, value)}" for key, value in arguments.items()
        )
    return dumped(arguments)


def _kind(syntax: Parameters, value: Any) -> str:
    kind = kind_of(value)
    return "number" if kind == "integer" and "integer" not in dict(syntax.kinds) else kind


def _literal(syntax: Literals, value: Any) -> str:
    if syntax.quote == '"':
        return dumped(value)
    if isinstance(value, str):
        return f"{syntax.quote}{value}{syntax.quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_literal(syntax, each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_literal(syntax, each) for each in value) + "]"
    return dumped(value)


def read(
    format: ToolFormat, text: str, tools: Mapping[str, Schema | None]
) -> tuple[str, list[tuple[str, dict[str, Any]]]] | None:
    """Return the content of an answer and its calls; None if the arguments of one of them are no object."""
    reader, blocks = ToolReader(format, tools, None), Blocks()
    blocks.extend(reader.push(text, finished=True))
    calls = []
    for block in blocks.all:
        if block.kind is CallStart:
            try:
                arguments = json.loads(block.text)
            except ValueError:
                return None
            if not isinstance(arguments, dict):
                return None
            calls.append((block.name, arguments))
    return blocks.text(Content), calls
