"""The request fields of /v1/messages, and their conversion to the neutral request."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, create_model

from engine.text.call_arguments import INVALID
from engine.vision.sources import ImageSource
from server.apis.parameters import given_sampling, limits, parameter_fields
from server.generation.request import (
    FUNCTION_NAME,
    MAX_TIMEOUT_MS,
    Conversation,
    GenerationRequest,
    Message,
    ReasoningEffort,
    Tool,
    ToolCall,
    ToolChoice,
    text_and_images,
)
from server.http.bodies import ArgumentsSchema, Body, fields_without_effect, one_message, optional, unsupported_fields
from server.http.errors import APIError
from server.parsing.pieces import json_object

NOT_YET: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "cache_control": None,  # prompts with a common prefix share KV blocks anyway
    "service_tier": ("auto", "standard_only"),
    "inference_geo": (),
    "speed": ("standard",),
    "diagnostics": (),
    "context_management": (),
}
# Field names of the neutral request in this API.
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "messages[].tool_calls[].arguments": "messages",
}


# The first line of Claude Code's system prompt. It means nothing to a model and differs between requests: without its
# removal their prompts would share no prefix.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


class Block(Body):
    """Fields common to all blocks."""

    cache_control: Any = None
    citations: Any = None


class TextBlock(Block):
    type: Literal["text"]
    text: str | None


class Base64Image(Body):
    type: Literal["base64"]
    media_type: str | None = None  # the file itself says what it is
    data: str = Field(min_length=1)


class ImageAtURL(Body):
    type: Literal["url"]
    url: str


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[
        Base64Image | ImageAtURL, one_message('{"type": "base64", "data": …} or {"type": "url", "url": …}')
    ]

    @property
    def image(self) -> ImageSource:
        if isinstance(self.source, ImageAtURL):
            return ImageSource(self.source.url)
        return ImageSource(base64=self.source.data)


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str | None
    signature: str | None = None


class RedactedThinkingBlock(Block):
    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str | None = None
    name: str
    input: Any = None  # an object
    caller: Any = None


NO_VIDEOS = "this API has no videos: send them to /v1/chat/completions"


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: Annotated[
        str | list[TextBlock | ImageBlock] | None,
        one_message(f"a string or a list of text and image blocks; others are not supported ({NO_VIDEOS})"),
    ] = None
    is_error: bool | None = None


_BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        lambda block: f"<{block.get('type')}>" if isinstance(block, dict) else None,
        custom_error_type="wrong_value",
        custom_error_message=f"must be a block of type {', '.join(_BLOCKS)}; others are not supported ({NO_VIDEOS})",
    ),
]


def _text_or_list(items: Any) -> Any:
    return Annotated[
        Annotated[str, Tag("<text>")] | Annotated[items, Tag("<list>")],
        Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>"),
    ]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: _text_or_list(list[AnyBlock]) | None = None  # type: ignore[valid-type]

    @property
    def blocks(self) -> list[Any]:
        return self.content if isinstance(self.content, list) else [TextBlock(type="text", text=self.content)]


class AnthropicTool(Body):
    """A tool that the model may call."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: ArgumentsSchema
    type: Annotated[Literal["custom"] | None, one_message('"custom" or omitted: server tools are not supported')] = None
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

    NO_EFFECT: ClassVar[Any] = {"display": ("summarized",)}


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = optional("The end user. A server without API keys schedules users fairly.")

    NAMES_UNKNOWN: ClassVar[bool] = False


class _Conversation(Body):
    """The fields that make up the prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: _text_or_list(list[TextBlock]) | None = None  # type: ignore[valid-type]
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = optional("Default: no thinking, if the chat template can disable it.")
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    timeout_ms: int | None = Field(
        None, ge=1, le=MAX_TIMEOUT_MS, description="Milliseconds after which the answer is cut off."
    )
    output_format: OutputFormat | None = optional("Older name for `output_config.format`.")
    thread: dict[str, Any] | None = optional("Not supported: send the whole conversation.")

    def neutral(self) -> GenerationRequest:
        if self.thread is not None:
            details = {"error_code": "thread_unsupported_request", "unsupported": []}
            raise APIError(400, "threads are not supported: send the whole conversation", "thread", details=details)
        messages = _messages(self.messages)
        if not messages:
            raise APIError(400, "must contain text", "messages")
        if system := self.system_text():
            messages.insert(0, Message(role="system", content=system))
        last = messages[-1]
        continues = last.role == "assistant" and bool(last.content) and not last.tool_calls
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        config = self.output_config or OutputConfig()
        format = config.format or self.output_format
        conversation = Conversation(
            messages=messages,
            tools=[_tool(tool, index) for index, tool in enumerate(self.tools or ())],
            add_generation_prompt=not continues,
            continue_final_message=continues,
            reasoning_effort=config.effort,
            template_variables={"enable_thinking": thinks, "thinking": thinks},
        )
        return GenerationRequest(
            prompt=conversation,
            id_prefix="msg_",
            names=NAMES,
            model=self.model,
            user=(self.metadata.user_id if self.metadata is not None else None) or "",
            timeout_ms=self.timeout_ms,
            sampling=self.sampling(),
            structured_outputs={"json": format.schema_} if format is not None else {},
            tool_choice=_tool_choice(self.tool_choice),
            include_reasoning=thinks,
        )

    def system_text(self) -> str:
        """Return the system prompt without Claude Code's billing line."""
        texts = (
            [self.system or ""] if not isinstance(self.system, list) else [block.text or "" for block in self.system]
        )
        texts = [_BILLING.sub("", text) if index == 0 else text for index, text in enumerate(texts)]
        return "\n".join(texts[1:] if texts and not texts[0] else texts)

    def sampling(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`."""
        return {}


_fields: dict[str, Any] = unsupported_fields(NOT_YET) | fields_without_effect(NO_EFFECT)
_Base: Any = create_model("MessagesBase", __base__=Body, **_fields)


_SAMPLING = ("temperature", "top_p", "top_k")
_SamplingBase: Any = create_model("MessagesSampling", __base__=Body, **parameter_fields(_SAMPLING))


class MessagesRequest(_Conversation, _SamplingBase, _Base):  # type: ignore[misc]
    """A conversation to continue."""

    max_tokens: int = Field(description="Maximum tokens of the answer.", json_schema_extra=limits("max_tokens"))
    stop_sequences: list[str] | None = optional("Strings that end the answer.")
    stream: bool | None = optional("Stream the answer as server-sent events.")

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    def sampling(self) -> dict[str, Any]:
        stop = {"stop": self.stop_sequences} if self.stop_sequences else {}
        thinking = self.thinking
        budget = thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None
        return given_sampling(self, _SAMPLING) | {"max_tokens": self.max_tokens, "thinking_token_budget": budget} | stop


class CountTokensRequest(_Conversation, _Base):  # type: ignore[misc]
    """A conversation to count the tokens of."""

    NO_EFFECT: ClassVar[Any] = NO_EFFECT


def _messages(given: list[AnthropicMessage]) -> list[Message]:
    """Convert messages. Tool results become separate messages, before the text of the same message."""
    messages: list[Message] = []
    for each in given:
        message, shown, thoughts = Message(role=each.role), list[str | ImageSource](), []
        for block in each.blocks:
            match block:
                case TextBlock(text=text):
                    shown.append(text or "")
                case ImageBlock():
                    shown.append(block.image)
                case ThinkingBlock(thinking=thinking):
                    thoughts.append(thinking or "")
                case ToolUseBlock():
                    message.tool_calls.append(ToolCall(id=block.id, name=block.name, arguments=block.input))
                case ToolResultBlock():
                    result = Message(role="tool", tool_call_id=block.tool_use_id, **_result(block))
                    messages.append(result)
        if shown:
            content = text_and_images(shown)
            message.content, message.images = content["content"], content["images"]
        message.reasoning = "".join(thoughts) if thoughts else None
        if shown or message.tool_calls or message.reasoning is not None or message.role == "assistant":
            messages.append(message)
    return messages


def _result(block: ToolResultBlock) -> dict[str, Any]:
    """Return `content` and `images` of the message."""
    content = block.content or ""
    parts = [content] if isinstance(content, str) else content
    shown = text_and_images(
        part if isinstance(part, str) else part.image if isinstance(part, ImageBlock) else part.text or ""
        for part in parts
    )
    return shown | {"content": f"Error: {shown['content']}"} if block.is_error else shown


def _tool(given: AnthropicTool, index: int) -> Tool:
    function: dict[str, Any] = {"name": given.name, "parameters": given.input_schema}
    if given.strict is not None:
        function["strict"] = given.strict
    if given.description is not None:
        function["description"] = given.description
    return Tool(
        name=given.name,
        parameters=given.input_schema,
        strict=bool(given.strict),
        definition={"type": "function", "function": function},
        path=("tools", index),
    )


def _tool_choice(choice: AnthropicToolChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    several = not choice.disable_parallel_tool_use
    match choice.type:
        case "tool":
            if choice.name is None:
                raise APIError(400, 'is required with type "tool"', "tool_choice", "name")
            return ToolChoice(mode="required", names=[choice.name], several=False)
        case "any":
            return ToolChoice(mode="required", several=several)
        case mode:
            return ToolChoice(mode=mode, several=several)


def parsed_arguments(text: str) -> dict[str, Any]:
    """Parse the input of a tool call. Text that is not a JSON object is returned under `INVALID`."""
    arguments = json_object(text)
    return {INVALID: text} if arguments is None else arguments
