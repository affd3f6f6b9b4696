"""The tools of /v1/responses: their definitions for the model, and the items for their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from pydantic import Discriminator, Field, Tag

from server.generation.request import FUNCTION_NAME, Tool, ToolChoice
from server.http.bodies import ArgumentsSchema, Body, optional
from server.http.errors import APIError
from server.parsing.pieces import json_object

# Tools that OpenAI's servers run, and client tools with their own item types. Not supported: left out.
LEFT_OUT = frozenset(
    """web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 file_search code_interpreter
    image_generation mcp computer computer_use computer_use_preview tool_search programmatic_tool_calling shell
    apply_patch""".split()  # noqa: SIM905
)
LOCAL_SHELL = "local_shell"
INPUT = "input"  # the model's name for the only argument of a custom tool
_LOCAL_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class FunctionTool(Body):
    """A function that the model may call. Additional fields are passed to the chat template."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: ArgumentsSchema = optional("A JSON schema. Default: the function takes no arguments.")
    strict: bool | None = optional("True: reject a schema that cannot be enforced, instead of warning.")

    NAMES_UNKNOWN: ClassVar[bool] = False


class InputFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool with text input, optionally guided by a grammar."""

    type: Literal["custom"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    format: InputFormat | None = optional("Format of the input: any text, or a grammar.")

    NAMES_UNKNOWN: ClassVar[bool] = False


class LocalShellTool(Body):
    """A tool for shell commands, which the client runs."""

    type: Literal["local_shell"]


class LeftOutTool(Body):
    """An unsupported tool, not shown to the model."""

    type: str

    NAMES_UNKNOWN: ClassVar[bool] = False


_Named = Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")]


def _kind(known: frozenset[str]) -> Discriminator:
    def kind(tool: Any) -> str | None:
        given = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return "<left out>" if isinstance(given, str) and given in LEFT_OUT else f"<{given}>"

    names = ", ".join(f"'{name}'" for name in sorted(known))
    message = f"must be {names} or a built-in tool of OpenAI, which is left out"
    return Discriminator(kind, custom_error_type="wrong_value", custom_error_message=message)


class NamespaceTool(Body):
    """A group of functions and custom tools under one name."""

    type: Literal["namespace"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    tools: list[Annotated[_Named, _kind(frozenset({"function", "custom"}))]]


AnyTool = Annotated[
    _Named
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[LocalShellTool, Tag("<local_shell>")]
    | Annotated[LeftOutTool, Tag("<left out>")],
    _kind(frozenset({"function", "custom", "namespace", "local_shell"})),
]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The API's form of a tool's calls."""

    kind: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None

    def item(self, call_id: str) -> dict[str, Any]:
        """Return the item of a new call."""
        named = {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})
        match self.kind:
            case "function":
                return {"type": "function_call", "call_id": call_id, **named, "arguments": ""}
            case "custom":
                return {"type": "custom_tool_call", "call_id": call_id, **named, "input": ""}
            case "local_shell":
                return {"type": "local_shell_call", "call_id": call_id, "action": _action({})}

    def members(self, arguments: str) -> dict[str, Any]:
        """Return the item's members from the arguments, which may be cut off."""
        match self.kind:
            case "function":
                return {"arguments": arguments}
            case "custom":
                return {"input": _input(arguments)}
            case "local_shell":
                return {"action": _action(_object(arguments))}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as the model sees it, and the API's form of its calls."""

    tool: Tool
    form: CallForm


def _object(arguments: str) -> dict[str, Any]:
    """Parse a JSON object that may be cut off; empty if it is not an object."""
    try:
        found = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _input(arguments: str) -> str:
    """Return the input of a custom call, possibly cut off; without JSON, the text an unguided model wrote."""
    given = _object(arguments).get(INPUT)
    if isinstance(given, str):
        return given
    is_cut = arguments.lstrip().startswith("{") and json_object(arguments) is None
    return "" if is_cut else arguments


def _action(given: dict[str, Any]) -> dict[str, Any]:
    command, wanted = given.get("command"), ("working_directory", "timeout_ms")
    words = [str(word) for word in command] if isinstance(command, list) else []
    return {"type": "exec", "command": words, "env": {}} | {name: given[name] for name in wanted if name in given}


def full_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool as the model sees it."""
    return name if namespace is None else f"{namespace}__{name}"


def tools_left_out(given: list[Any] | None) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path of each tool not shown to the model, with the reason."""
    for index, each in enumerate(given or ()):
        if isinstance(each, LeftOutTool):
            yield ("tools", index), f"tools of the type {each.type[:100]!r} are not supported; left out"


def callable_tools(given: list[Any] | None) -> list[CallableTool]:
    """Return the tools that the model may call, including those of namespaces."""
    found = []
    for index, each in enumerate(given or ()):
        path: tuple[str | int, ...] = ("tools", index)
        match each:
            case NamespaceTool():
                found += [_named(tool, each, (*path, "tools", i)) for i, tool in enumerate(each.tools)]
            case LocalShellTool():
                tool = _tool(LOCAL_SHELL, "Runs a command.", _LOCAL_SHELL_PARAMETERS, path)
                found.append(CallableTool(tool, CallForm("local_shell", LOCAL_SHELL)))
            case FunctionTool() | CustomTool():
                found.append(_named(each, None, path))
    return found


def _named(
    given: FunctionTool | CustomTool, namespace: NamespaceTool | None, path: tuple[str | int, ...]
) -> CallableTool:
    space = namespace.name if namespace is not None else None
    name = full_name(given.name, space)
    about = [given.description, namespace.description if namespace is not None else None]
    description = "\n\n".join(text for text in about if text)
    if isinstance(given, CustomTool):
        return CallableTool(_custom(given, name, description, path), CallForm("custom", given.name, space))
    function = given.model_dump(exclude_unset=True, exclude={"type"}) | {"name": name}
    function |= {"description": description} if description else {}
    definition = {"type": "function", "function": function}
    tool = Tool(name=name, parameters=given.parameters, strict=bool(given.strict), definition=definition, path=path)
    return CallableTool(tool, CallForm("function", given.name, space))


def _custom(given: CustomTool, name: str, description: str, path: tuple[str | int, ...]) -> Tool:
    text: dict[str, Any] = {"type": "string"}
    strict, grammar = False, None
    if given.format is not None and given.format.type == "grammar":
        syntax, definition = given.format.syntax, given.format.definition
        if syntax is None or not definition:
            raise APIError(400, "must have a syntax and a definition for a grammar", *path, "format")
        text["description"] = f"A text by this grammar ({syntax}):\n{definition}"
        if strict := syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            grammar = (INPUT, definition)
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return replace(_tool(name, description, parameters, path, strict), grammar=grammar)


def _tool(
    name: str, description: str, parameters: dict[str, Any], path: tuple[str | int, ...], strict: bool = False
) -> Tool:
    function = {"name": name, "description": description, "parameters": parameters}
    definition = {"type": "function", "function": function}
    return Tool(name=name, parameters=parameters, strict=strict, definition=definition, path=path)


def tool_choice(choice: Any, several: bool) -> ToolChoice:
    """Convert the API's `tool_choice`. `several`: whether more than one call is allowed."""
    match choice:
        case None:
            return ToolChoice(several=several)
        case "none" | "auto" | "required":
            return ToolChoice(mode=choice, several=several)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
            names = [_chosen(tool) for tool in tools if not _is_left_out(tool)]
            if names and None not in names:
                return ToolChoice(mode=mode, names=[name for name in names if name is not None], several=several)
        case _ if (name := _chosen(choice)) is not None:
            return ToolChoice(mode="required", names=[name], several=False)
    wanted = (
        '"none", "auto", "required", {"type": "function", "name": …} or '
        '{"type": "allowed_tools", "mode": …, "tools": […]}'
    )
    raise APIError(400, f"must be {wanted}, got {repr(choice)[:100]}", "tool_choice")


def _chosen(tool: Any) -> str | None:
    """Return the chosen tool's name as the model sees it."""
    match tool:
        case {"type": "function" | "custom", "name": str(name), "namespace": str(namespace)}:
            return full_name(name, namespace)
        case {"type": "function" | "custom", "name": str(name)}:
            return name
        case {"type": "local_shell"}:
            return LOCAL_SHELL
    return None


def _is_left_out(tool: Any) -> bool:
    return isinstance(tool, Mapping) and isinstance(kind := tool.get("type"), str) and kind in LEFT_OUT
