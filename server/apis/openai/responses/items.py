"""The conversation items of /v1/responses, and their conversion to messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from engine.vision.sources import ImageSource
from server.apis.openai.responses.tools import INPUT, LOCAL_SHELL, full_name
from server.generation.request import Message, ToolCall, text_and_images
from server.http.bodies import Body, one_message, wrong

# Items of tools that Quire does not support. They appear in conversations started on another server.
LEFT_OUT = frozenset(
    """web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output
    mcp_list_tools mcp_approval_request mcp_approval_response mcp_call tool_search_call tool_search_output program
    program_output additional_tools shell_call shell_call_output apply_patch_call
    apply_patch_call_output""".split()  # noqa: SIM905
)
SUMMARY = "Summary of the conversation so far:"
_PACKED = "quire:"


class Part(Body):
    """A part of a message or of a tool's output."""

    type: Literal["input_text", "output_text", "text", "refusal", "input_image"]
    text: str | None = None
    image_url: str | None = None  # of an image: a data URL, or another one that the server allows
    detail: str | None = None
    file_id: None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None

    NO_EFFECT: ClassVar[Any] = {"detail": ("auto", "high", "original")}

    @model_validator(mode="after")
    def _check_image(self) -> Part:
        if self.type == "input_image" and not self.image_url:
            raise wrong("is required", "image_url")
        return self


Content = Annotated[
    str | list[Part],
    one_message(
        "a string or a list of text and image parts; images by file_id, audio and files are not supported, and videos "
        "only by /v1/chat/completions"
    ),
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str | None = None
    name: str
    arguments: Any = None  # a JSON object as a string, as in OpenAI's API, or the object itself
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: str | None = None
    name: str
    input: str | None = None
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class ShellAction(Body):
    type: Literal["exec"] = "exec"
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None

    NAMES_UNKNOWN: ClassVar[bool] = False


class LocalShellCallItem(Body):
    type: Literal["local_shell_call"]
    action: ShellAction
    call_id: str | None = None
    id: str | None = None
    status: str | None = None


class LocalShellOutputItem(Body):
    type: Literal["local_shell_call_output"]
    output: str
    id: str | None = None
    call_id: str | None = None
    status: str | None = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: Content | None = None
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None

    @property
    def text(self) -> str | None:
        """The reasoning text; None if this server cannot read it."""
        if self.content:
            return "\n".join(part.text or "" for part in self.content)
        if self.encrypted_content and (found := unpacked(self.encrypted_content)) is not None:
            return found
        return "\n".join(part.text or "" for part in self.summary) if self.summary else None


class CompactionItem(Body):
    """The summary written by /v1/responses/compact."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str
    id: str | None = None


class LeftOutItem(Body):
    """An item that is not shown to the model."""

    type: str

    NAMES_UNKNOWN: ClassVar[bool] = False


class ItemReference(Body):
    """A reference to an output item of a stored response."""

    type: Literal["item_reference"]
    id: str


def _kind(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    given = item.get("type") or "message"
    match given:
        case "compaction_summary":
            return "<compaction>"
        case str() if given in LEFT_OUT:
            return "<left out>"
    return f"<{given}>"


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[FunctionOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[LocalShellCallItem, Tag("<local_shell_call>")]
    | Annotated[LocalShellOutputItem, Tag("<local_shell_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CompactionItem, Tag("<compaction>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[LeftOutItem, Tag("<left out>")],
    Discriminator(
        _kind,
        custom_error_type="wrong_value",
        custom_error_message="must be a message, a call of a function, a custom tool or local_shell, its output, "
        "reasoning, compaction or item_reference",
    ),
]


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1), Tag("<items>")],
    Discriminator(lambda value: "<items>" if isinstance(value, list) else "<text>"),
    Field(description="A string, or a list of messages, tool calls, tool outputs and reasoning."),
]


def messages_of(items: list[Any]) -> list[Message]:
    """Convert items to messages. Consecutive reasoning, text and calls become one assistant message."""
    messages: list[Message] = []
    answer: Message | None = None  # the assistant message being assembled

    def new_answer() -> Message:
        messages.append(Message(role="assistant"))
        return messages[-1]

    for item in items:
        match item:
            case ReasoningItem():
                if (reasoning := item.text) is not None:
                    answer = new_answer()
                    answer.reasoning = reasoning
            case InputMessage(role="assistant"):
                if answer is None or answer.content is not None or answer.tool_calls:
                    answer = new_answer()
                shown = _shown(item.content)
                answer.content, answer.images = shown["content"], shown["images"]
            case FunctionCallItem() | CustomCallItem() | LocalShellCallItem():
                answer = answer if answer is not None else new_answer()
                answer.tool_calls.append(_call(item))
            case FunctionOutputItem():
                answer = None
                messages.append(Message(role="tool", tool_call_id=item.call_id, **_shown(item.output)))
            case LocalShellOutputItem():
                answer = None
                messages.append(Message(role="tool", tool_call_id=item.call_id or item.id, content=item.output))
            case CompactionItem() if (summary := unpacked(item.encrypted_content)) is not None:
                answer = None
                messages.append(Message(role="user", content=f"{SUMMARY}\n{summary}"))
            case InputMessage():
                answer = None
                messages.append(Message(role=item.role, **_shown(item.content)))
    return messages


def _shown(content: str | list[Part] | None) -> dict[str, Any]:
    """Return `content` and `images` of a message."""
    parts = content if isinstance(content, list) else [Part(type="text", text=content)]
    return text_and_images(
        ImageSource(part.image_url or "") if part.type == "input_image" else part.text or part.refusal or ""
        for part in parts
    )


def _call(item: FunctionCallItem | CustomCallItem | LocalShellCallItem) -> ToolCall:
    match item:
        case FunctionCallItem():
            return ToolCall(id=item.call_id, name=full_name(item.name, item.namespace), arguments=item.arguments)
        case CustomCallItem():
            name = full_name(item.name, item.namespace)
            return ToolCall(id=item.call_id, name=name, arguments={INPUT: item.input or ""})
    arguments = item.action.model_dump(include={"command", "working_directory", "timeout_ms"}, exclude_none=True)
    return ToolCall(id=item.call_id or item.id, name=LOCAL_SHELL, arguments=arguments)


def items_left_out(items: list[Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path of each item, or part of one, that the model does not see, with the reason."""
    for index, item in enumerate(items):
        match item:
            case LeftOutItem():
                yield ("input", index), f"items of the type {item.type!r} are not supported; left out"
            case ReasoningItem(encrypted_content=str(content)) | CompactionItem(encrypted_content=content):
                if unpacked(content) is None and not (isinstance(item, ReasoningItem) and item.text is not None):
                    yield ("input", index, "encrypted_content"), "was written by another server; left out"


def packed(text: str) -> str:
    """Encode text that clients send back unchanged. Not encrypted: clients may read what the model wrote."""
    return _PACKED + base64.b64encode(text.encode(errors="replace")).decode()


def unpacked(content: str) -> str | None:
    """Decode text from `packed`; None if another server encoded it."""
    if not content.startswith(_PACKED):
        return None
    try:
        return base64.b64decode(content.removeprefix(_PACKED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
