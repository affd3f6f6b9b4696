"""The request fields of /v1/responses, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, create_model, model_validator

from server.apis.openai.fields import EngineFields
from server.apis.openai.responses.items import Input, InputMessage
from server.apis.openai.responses.tools import AnyTool, CallableTool, tool_choice
from server.apis.parameters import given_sampling, limits, parameter_fields
from server.generation.request import Conversation, GenerationRequest, Message, ReasoningEffort, Verbosity
from server.http.bodies import Body, fields_without_effect, optional, unsupported_fields, wrong

NOT_YET_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "metadata": None,
    "client_metadata": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "max_tool_calls": (),  # Quire has no built-in tools
}
# Sampling parameters of this API besides `max_output_tokens` and `top_logprobs`.
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
# Field names of the neutral request in this API.
NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "template_variables": "chat_template_kwargs",
}
LOGPROBS = "message.output_text.logprobs"
REASONING = "reasoning.encrypted_content"


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Verbosity | None = optional("Length of the answer, for the chat template.")


class ReasoningOptions(Body):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None

    NO_EFFECT: ClassVar[Any] = {"summary": ("auto",), "generate_summary": ("auto",)}


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


class ConversationId(Body):
    id: str


class ResponsesRequest(_ResponsesBase):  # type: ignore[misc]
    """A conversation of items to continue."""

    input: Input
    instructions: str | None = optional("A system message for this response only.")
    previous_response_id: str | None = optional("A stored response to continue.")
    conversation: str | ConversationId | None = optional("A stored conversation to continue and extend.")
    background: bool | None = optional("Return immediately and generate independently of the connection.", False)
    store: bool | None = optional("False: do not store this response.")
    tools: list[AnyTool] | None = optional(
        "Functions, custom tools and namespaces of them. Built-in tools of OpenAI are left out."
    )
    tool_choice: Any = optional('"none", "auto", "required", a function, or `allowed_tools` with a mode.')
    parallel_tool_calls: bool | None = optional("False: allow at most one tool call.")
    chat_template_kwargs: dict[str, Any] | None = optional("Additional variables for the chat template.")
    max_output_tokens: int | None = optional("Maximum tokens of the answer.", json_schema_extra=limits("max_tokens"))
    text: TextOptions | None = optional("The required format of the answer, and its verbosity.")
    reasoning: ReasoningOptions | None = optional("How much to reason.")
    include: list[str] | None = Field(None, description=f'Supported: "{LOGPROBS}" and "{REASONING}".')
    top_logprobs: int | None = optional(
        "With log probabilities: also those of this many most likely tokens.", json_schema_extra=limits("logprobs")
    )
    stream: bool | None = optional("Stream the response as server-sent events.")
    stream_options: ResponseStreamOptions | None = None

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @model_validator(mode="after")
    def _check_kept(self) -> ResponsesRequest:
        if self.background and self.store is False:
            raise wrong("requires store=true", "background")
        if self.conversation is not None and self.previous_response_id is not None:
            raise wrong("cannot be given together with previous_response_id", "conversation")
        return self

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    @property
    def items(self) -> list[Any]:
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    def neutral(self, messages: list[Message], tools: list[CallableTool]) -> GenerationRequest:
        """Convert the request. `messages`: the conversation, including `items`. `tools`: the request's tools."""
        sampling = given_sampling(self, SAMPLING)
        if self.max_output_tokens is not None:
            sampling["max_tokens"] = self.max_output_tokens
        if LOGPROBS in (self.include or ()):
            sampling["logprobs"] = self.top_logprobs or 0
        instructions = [Message(role="system", content=self.instructions)] if self.instructions else []
        return GenerationRequest(
            prompt=Conversation(
                messages=instructions + messages,
                tools=[each.tool for each in tools],
                reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
                verbosity=self.text.verbosity if self.text is not None else None,
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
            tool_choice=tool_choice(self.tool_choice, self.parallel_tool_calls is not False),
        )


def _structured(text: TextOptions | None) -> dict[str, Any]:
    """Return arguments for the engine's `StructuredOutputs`. Empty: free text."""
    if text is None or text.format is None or text.format.type == "text":
        return {}
    schema = text.format.schema_
    return {"json_object": True} if schema is None else {"json": schema}


class CompactRequest(ResponsesRequest):
    """A conversation to compact."""

    input: Input | None = None  # type: ignore[assignment]

    @property
    def items(self) -> list[Any]:
        return [] if self.input is None else super().items
