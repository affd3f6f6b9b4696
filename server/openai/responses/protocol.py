"""The fields of /v1/responses, and what they are as a chat request. Knows OpenAI's names for both; runs nothing."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, create_model

from server.http.errors import from_validation
from server.http.fields import Body, fields_without_effect, one_message, unsupported_fields
from server.openai.protocol import ChatCompletionRequest

NOT_YET_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "max_tool_calls": (),  # there are no built-in tools
}
# Parameters that /v1/chat/completions has too.
SAME_IN_CHAT = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "chat_template_kwargs",
    "cache_salt",
    "request_id",
)
# What a chat request calls something that /v1/responses calls otherwise.
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
LOGPROBS = "message.output_text.logprobs"


class Part(Body):
    """A part of a message or of a tool's output."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str = ""
    annotations: Any = None
    logprobs: Any = None


Content = Annotated[
    str | list[Part], one_message("a text or a list of text parts; images, audio and files are not supported")
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class ItemReference(Body):
    """An item of an answer that is stored here."""

    type: Literal["item_reference"]
    id: str


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        lambda item: f"<{item.get('type') or 'message'}>" if isinstance(item, dict) else None,
        custom_error_type="wrong_value",
        custom_error_message="must be a message, function_call, function_call_output, reasoning or item_reference",
    ),
]


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1), Tag("<items>")],
    Discriminator(lambda value: "<items>" if isinstance(value, list) else "<text>"),
    Field(description="A text, or messages, tool calls, their outputs, reasoning."),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None

    NO_EFFECT: ClassVar[Any] = {"verbosity": ("medium",)}


class ReasoningOptions(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None

    NO_EFFECT: ClassVar[Any] = {"summary": ("auto",), "generate_summary": ("auto",)}


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None

    NO_EFFECT: ClassVar[Any] = {"include_obfuscation": (False,)}


_tables: dict[str, Any] = unsupported_fields(NOT_YET_IN_RESPONSES) | fields_without_effect(NO_EFFECT)
_chat_fields = ChatCompletionRequest.model_fields
_same: dict[str, Any] = {name: (_chat_fields[name].annotation, _chat_fields[name]) for name in SAME_IN_CHAT}
_ResponsesBase: type[Body] = create_model("ResponsesBase", __base__=Body, **_tables, **_same)


class ResponsesRequest(_ResponsesBase):  # type: ignore[misc, valid-type]
    """A conversation to be continued, as items."""

    input: Input
    instructions: str | None = Field(None, description="A system message for this response only.")
    previous_response_id: str | None = Field(None, description="A stored response that this one goes on from.")
    store: bool | None = Field(None, description="False: keep nothing of this response.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = Field(None, description=f'"{LOGPROBS}" has an effect.')
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @property
    def items(self) -> list[Any]:
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    def as_chat(self, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
        """The same as a chat request over `messages`. `APIError` in the names of this request."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        with_logprobs = LOGPROBS in (self.include or ())
        chat: dict[str, Any] = {name: getattr(self, name) for name in SAME_IN_CHAT}
        chat |= {
            "messages": instructions + messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "response_format": _chat_format(self.text),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "logprobs": with_logprobs or None,
            "top_logprobs": self.top_logprobs if with_logprobs else None,
        }
        try:
            return ChatCompletionRequest.model_validate(chat)
        except ValidationError as error:
            raise from_validation(error.errors()).renamed(RENAMED) from None


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Tools of other types than `function` stay as they are, to be refused."""
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _chat_tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            subset = [{"function": {"name": tool.get("name")}} for tool in tools if isinstance(tool, dict)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": subset}}
    return choice


def _chat_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    given = text.format.model_dump(by_alias=True, exclude_none=True)
    if given["type"] != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def chat_messages(items: list[Any]) -> list[dict[str, Any]]:
    """Items as chat messages: thoughts, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that may go on

    def begin_turn() -> dict[str, Any]:
        messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for item in items:
        match item:
            case ReasoningItem():
                turn = begin_turn()
                turn["reasoning"] = "\n".join(part.text for part in item.content or item.summary or ())
            case InputMessage(role="assistant"):
                if turn is None or turn["content"] is not None or "tool_calls" in turn:
                    turn = begin_turn()
                turn["content"] = _text(item.content)
            case FunctionCallItem():
                turn = turn if turn is not None else begin_turn()
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                turn.setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                turn = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case InputMessage():
                turn = None
                messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal for part in content)
