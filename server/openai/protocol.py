"""The requests' fields: types, defaults, and which are not supported yet. Knows OpenAI's and vLLM's names; runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1000


class _Strict(BaseModel):
    """No conversions between types, and no unknown fields: what is not understood is said, never ignored."""

    model_config = ConfigDict(strict=True, extra="forbid")


# Fields of OpenAI's and vLLM's requests that change the answer and are not supported yet, with the values that leave the
# answer as it is. `None` always does.
NOT_YET_IN_BOTH: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "cache_salt": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
NOT_YET_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
NOT_YET_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",), "prompt_embeds": ()}

# Fields that never change the answer.
NO_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",  # there are no tool calls
    "include_reasoning",  # nor reasoning
    "spaces_between_special_tokens",  # our decoding puts none there
)


def _not_yet(neutral: tuple[Any, ...]) -> Any:
    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        if value is None or any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral
        ):
            return None
        allowed = " or ".join(json.dumps(value) for value in (*neutral, None))
        raise PydanticCustomError(
            "unsupported", "is not supported yet (only {allowed}, which changes nothing)", {"allowed": allowed}
        )

    return Annotated[Any, WrapValidator(check)], Field(None, description="Not supported yet.")


def _fields(base: str, *tables: dict[str, tuple[Any, ...]]) -> Any:
    fields: dict[str, Any] = {name: _not_yet(neutral) for table in tables for name, neutral in table.items()}
    fields |= {name: (Any, Field(None, description="Accepted; has no effect.")) for name in NO_EFFECT}
    return create_model(base, __base__=_Strict, **fields)


_NotYetInChat: type[_Strict] = _fields("NotYetInChat", NOT_YET_IN_BOTH, NOT_YET_IN_CHAT)
_NotYetInCompletions: type[_Strict] = _fields("NotYetInCompletions", NOT_YET_IN_BOTH, NOT_YET_IN_COMPLETIONS)


def _one_message(text: str) -> WrapValidator:
    """For unions: one error in plain words instead of one for each member."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_value", "must be " + text) from None  # type: ignore[arg-type]

    return WrapValidator(check)


TokenIds = list[int]
Prompt = Annotated[
    str | TokenIds | list[str] | list[TokenIds],
    _one_message("a text, a list of texts, a list of token ids, or a list of such lists"),
]
Stop = Annotated[str | list[str], _one_message("a text or a list of texts")]


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="Send one more chunk at the end, with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; has no effect.")


class _Sampling(_Strict):
    """What both kinds of request say about sampling. `None` takes the model's default, else OpenAI's."""

    model: str | None = Field(None, description="A name that /v1/models lists.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> _Sampling:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "needs stream=true")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_LENGTH for text in stop):
            raise _wrong("stop", f"must be at most {MAX_STOP_STRINGS} texts of at most {MAX_STOP_LENGTH} characters")
        return self


def _wrong(field: str, message: str) -> PydanticCustomError:
    """An error that a check of several fields finds in `field`."""
    return PydanticCustomError("wrong_field", "{field}: {message}", {"field": field, "message": message})


class TextPart(_Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionCall(_Strict):
    name: str
    arguments: Any = None  # a JSON object as text, as the API has it, or the object itself


class ToolCall(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(_Strict):
    """One turn. Fields that the answer's message has and that say nothing may come back as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None, _one_message("a text or a list of text parts; other parts are not supported")
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


class _Conversation(_Strict):
    """What goes into a chat template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_conversation(self) -> _Conversation:
        if self.add_generation_prompt and self.continue_final_message:
            raise _wrong("continue_final_message", "cannot be true together with add_generation_prompt")
        if reserved := RESERVED_TEMPLATE_VARIABLES & (self.chat_template_kwargs or {}).keys():
            raise _wrong("chat_template_kwargs", f"must not hold {min(reserved)}, which has its own field")
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise _wrong(f"messages[{index}].content", "is required")
        return self

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the header of a new message."""
        given = self.add_generation_prompt
        return given if given is not None else not self.continue_final_message

    def template_options(self) -> dict[str, Any]:
        """Arguments for `ChatTemplate.render` beside the messages."""
        return {
            **(self.chat_template_kwargs or {}),
            "tools": self.tools,
            "add_generation_prompt": self.adds_generation_prompt,
            "continue_final_message": bool(self.continue_final_message),
        }


RESERVED_TEMPLATE_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt", "continue_final_message"])


class ChatCompletionRequest(_Conversation, _Sampling, _NotYetInChat):  # type: ignore[misc, valid-type]
    """A conversation to be continued."""

    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.tool_choice not in (None, "none"):
            raise _wrong("tool_choice", 'is not supported yet (only "none")')
        if self.tools and self.tool_choice != "none":
            raise _wrong("tools", 'is not supported yet (only with tool_choice="none")')
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "needs logprobs=true")
        return self


class CompletionRequest(_Sampling, _NotYetInCompletions):  # type: ignore[misc, valid-type]
    """Text to be continued."""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.prompt in ("", []) or (isinstance(self.prompt, list) and any(item in ("", []) for item in self.prompt)):
            raise _wrong("prompt", "must not be empty")
        if self.echo and self.logprobs is not None:
            raise _wrong("echo", "is not supported yet together with logprobs")
        return self


class TokenizeTextRequest(_Strict):
    """A text to be turned into token ids."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(_Conversation):
    """A conversation to be turned into token ids."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("<text>")] | Annotated[TokenizeChatRequest, Tag("<chat>")],
    Discriminator(lambda body: "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"),
]


class DetokenizeRequest(_Strict):
    """Token ids to be turned into text."""

    model: str | None = None
    tokens: list[int]
