"""The fields of /v1/messages, and what they are as a chat request. Knows Anthropic's names and OpenAI's; runs nothing."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, create_model

from server.http.errors import APIError, from_validation
from server.http.fields import Body, fields_without_effect, one_message, unsupported_fields
from server.openai.protocol import ChatCompletionRequest

NOT_YET: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "metadata": None,
    "cache_control": None,  # prompts that begin alike share their KV anyway
    "service_tier": ("auto", "standard_only"),
    "inference_geo": (),
    "speed": ("standard",),
    "diagnostics": (),
    "context_management": (),
}
# What a chat request calls something that /v1/messages calls otherwise.
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


class Block(Body):
    """What all blocks may have besides."""

    cache_control: Any = None
    citations: Any = None


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        str | list[TextBlock] | None, one_message("a text or a list of text blocks; other blocks are not supported")
    ] = None
    is_error: bool | None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        lambda block: f"<{block.get('type')}>" if isinstance(block, dict) else None,
        custom_error_type="wrong_value",
        custom_error_message=f"must be a block of the type {', '.join(_BLOCKS)}; others are not supported",
    ),
]


def _text_or_list(items: Any) -> Any:
    return Annotated[
        Annotated[str, Tag("<text>")] | Annotated[items, Tag("<list>")],
        Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>"),
    ]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: _text_or_list(list[AnyBlock])  # type: ignore[valid-type]

    @property
    def blocks(self) -> list[Any]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(Body):
    """Something that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Annotated[
        Literal["custom"] | None, one_message('"custom" or left out: tools that run at the server are not supported')
    ] = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None

    NO_EFFECT: ClassVar[Any] = {"input_examples": ([],)}


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None

    NO_EFFECT: ClassVar[Any] = {"budget_tokens": (), "display": ("summarized",)}


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class _Conversation(Body):
    """What goes into the prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: _text_or_list(list[TextBlock]) | None = None  # type: ignore[valid-type]
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Left out: no thinking, where the chat template can tell so.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")

    def as_chat(self) -> ChatCompletionRequest:
        """The same as a chat request. `APIError` in the names of this request."""
        messages = _chat_messages(self.messages)
        if not messages:
            raise APIError(400, "messages: there is no text in them", "messages")
        if self.system:
            system = self.system if isinstance(self.system, str) else "\n".join(block.text for block in self.system)
            messages.insert(0, {"role": "system", "content": system})
        last = messages[-1]
        continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        config, choice = self.output_config, self.tool_choice
        chat: dict[str, Any] = self._sampling() | {
            "model": self.model,
            "messages": messages,
            "continue_final_message": continues,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _chat_tool_choice(choice) if choice is not None else None,
            "parallel_tool_calls": not choice.disable_parallel_tool_use if choice is not None else None,
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
            "include_reasoning": thinks,
            "reasoning_effort": config.effort if config is not None else None,
        }
        format = (config.format if config is not None else None) or self.output_format
        if format is not None:
            schema = {"name": "output", "schema": format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            return ChatCompletionRequest.model_validate(chat)
        except ValidationError as error:
            raise from_validation(error.errors()).renamed(RENAMED) from None

    def _sampling(self) -> dict[str, Any]:
        return {}


_fields: dict[str, Any] = unsupported_fields(NOT_YET) | fields_without_effect(NO_EFFECT)
_Base: type[Body] = create_model("MessagesBase", __base__=Body, **_fields)


class MessagesRequest(_Conversation, _Base):  # type: ignore[misc, valid-type]
    """A conversation to be continued."""

    max_tokens: int
    stop_sequences: list[str] | None = Field(None, description="Texts that end the answer.")
    stream: bool | None = Field(None, description="Send the answer as it comes.")
    temperature: float | None = Field(None, description="0: always the likeliest token.")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens of this total probability.")
    top_k: int | None = Field(None, description="Sample from this many likeliest tokens.")

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    def _sampling(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return same | {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences or None}


class CountTokensRequest(_Conversation, _Base):  # type: ignore[misc, valid-type]
    """A conversation whose length is asked for."""

    NO_EFFECT: ClassVar[Any] = NO_EFFECT


def _chat_messages(messages: list[AnthropicMessage]) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before the text that stands beside them."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": None}
        texts = []
        for block in message.blocks:
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    turn["reasoning"] = turn.get("reasoning", "") + thinking
                case ToolUseBlock():
                    call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
                    turn.setdefault("tool_calls", []).append(call)
                case ToolResultBlock():
                    chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        turn["content"] = "\n".join(texts) if texts else None
        if len(turn) > 2 or texts or message.role == "assistant":
            chat.append(turn)
    return chat


def _result(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return f"Error: {text}" if block.is_error else text


def _chat_tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def parsed_arguments(text: str) -> dict[str, Any]:
    """The input of a tool call; what is no JSON object is handed over as a text."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}
