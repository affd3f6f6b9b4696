"""The fields of /v1/responses, and the neutral request that they make."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, create_model

from server.generation.parameters import given_sampling, limits, parameter_fields
from server.generation.request import (
    FUNCTION_NAME,
    Conversation,
    GenerationRequest,
    Message,
    ReasoningEffort,
    Tool,
    ToolCall,
    ToolChoice,
)
from server.http.bodies import Body, fields_without_effect, one_message, optional, unsupported_fields
from server.http.errors import APIError
from server.openai.fields import EngineFields

NOT_YET_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "metadata": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "max_tool_calls": (),  # there are no built-in tools
}
# Parameters of sampling that this API has beside `max_output_tokens` and `top_logprobs`.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# What this API calls fields of a neutral request.
NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
    "template_variables": "chat_template_kwargs",
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
    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None

    NO_EFFECT: ClassVar[Any] = {"summary": ("auto",), "generate_summary": ("auto",)}


class FunctionTool(Body):
    """Something that the model may call; further fields go to the chat template."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema; none: there are no arguments.")
    strict: bool | None = optional("True: refuse a schema that cannot be enforced, not just say so.")

    NAMES_UNKNOWN: ClassVar[bool] = False


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None

    NO_EFFECT: ClassVar[Any] = {"include_obfuscation": (False,)}


_engine_fields: dict[str, Any] = {
    name: (field.annotation, field)
    for name, field in EngineFields.model_fields.items()
    if name in ("model", "cache_salt", "request_id", "user", "safety_identifier", "timeout_ms")
}
_tables: dict[str, Any] = unsupported_fields(NOT_YET_IN_RESPONSES) | fields_without_effect(NO_EFFECT)
_ResponsesBase: Any = create_model(
    "ResponsesBase", __base__=Body, **_tables, **_engine_fields, **parameter_fields(SAMPLING)
)


class ResponsesRequest(_ResponsesBase):  # type: ignore[misc]
    """A conversation to be continued, as items."""

    input: Input
    instructions: str | None = optional("A system message for this response only.")
    previous_response_id: str | None = optional("A stored response that this one goes on from.")
    store: bool | None = optional("False: keep nothing of this response.")
    tools: list[FunctionTool] | None = optional("Functions that the model may call.")
    tool_choice: Any = optional('"none", "auto", "required", a function, or some of them and a mode.')
    parallel_tool_calls: bool | None = optional("False: at most one tool call.")
    chat_template_kwargs: dict[str, Any] | None = optional("Further variables for the chat template.")
    max_output_tokens: int | None = optional("Most tokens of the answer.", json_schema_extra=limits("max_tokens"))
    text: TextOptions | None = optional("What the answer has to be.")
    reasoning: ReasoningOptions | None = optional("How much to reason.")
    include: list[str] | None = Field(None, description=f'"{LOGPROBS}" has an effect.')
    top_logprobs: int | None = optional(
        "With the log-probabilities, those of this many likeliest tokens.", json_schema_extra=limits("logprobs")
    )
    stream: bool | None = optional("Send the answer as it comes.")
    stream_options: ResponseStreamOptions | None = None

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @property
    def items(self) -> list[Any]:
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    def neutral(self, messages: list[Message]) -> GenerationRequest:
        """`messages`: the conversation so far, those of `items` included."""
        sampling = given_sampling(self, SAMPLING)
        if self.max_output_tokens is not None:
            sampling["max_tokens"] = self.max_output_tokens
        if LOGPROBS in (self.include or ()):
            sampling["logprobs"] = self.top_logprobs or 0
        instructions = [Message(role="system", content=self.instructions)] if self.instructions else []
        return GenerationRequest(
            prompt=Conversation(
                messages=instructions + messages,
                tools=[_tool(each) for each in self.tools or ()],
                reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
                template_variables=self.chat_template_kwargs or {},
            ),
            id_prefix="resp_",
            names=NAMES,
            model=self.model,
            request_id=self.request_id,
            cache_salt=self.cache_salt or "",
            user=self.safety_identifier or self.user or "",
            timeout_ms=self.timeout_ms,
            sampling=sampling,
            structured_outputs=_structured(self.text),
            tool_choice=_tool_choice(self.tool_choice, self.parallel_tool_calls is not False),
        )


def _tool(given: FunctionTool) -> Tool:
    function = given.model_dump(exclude_unset=True, exclude={"type"})
    return Tool(
        name=given.name,
        parameters=given.parameters,
        strict=bool(given.strict),
        definition={"type": "function", "function": function},
    )


def _tool_choice(choice: Any, several: bool) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice(several=several)
        case "none" | "auto" | "required":
            return ToolChoice(mode=choice, several=several)
        case {"type": "function", "name": str(name)}:
            return ToolChoice(mode="required", names=[name], several=False)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            names = [tool["name"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
            if names and len(names) == len(tools):
                return ToolChoice(mode=mode, names=names, several=several)
    wanted = (
        '"none", "auto", "required", {"type": "function", "name": …} or '
        '{"type": "allowed_tools", "mode": …, "tools": […]}'
    )
    raise APIError(400, f"must be {wanted}, got {repr(choice)[:100]}", "tool_choice")


def _structured(text: TextOptions | None) -> dict[str, Any]:
    """Arguments for the engine's `StructuredOutputs`; none: the answer is free text."""
    if text is None or text.format is None or text.format.type == "text":
        return {}
    schema = text.format.schema_
    return {"json_object": True} if schema is None else {"json": schema}


def messages_of(items: list[Any]) -> list[Message]:
    """The messages that items make: reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[Message] = []
    answer: Message | None = None  # the assistant's message that may go on

    def new_answer() -> Message:
        messages.append(Message(role="assistant"))
        return messages[-1]

    for item in items:
        match item:
            case ReasoningItem():
                answer = new_answer()
                answer.reasoning = "\n".join(part.text for part in item.content or item.summary or ())
            case InputMessage(role="assistant"):
                if answer is None or answer.content is not None or answer.tool_calls:
                    answer = new_answer()
                answer.content = _text(item.content)
            case FunctionCallItem():
                answer = answer if answer is not None else new_answer()
                answer.tool_calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
            case FunctionOutputItem():
                answer = None
                messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
            case InputMessage():
                answer = None
                messages.append(Message(role=item.role, content=_text(item.content)))
    return messages


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal for part in content)
