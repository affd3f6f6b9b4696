"""The fields of Ollama's requests, and the neutral requests that they make."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from server.generation.parameters import Stop, given_sampling, limits, parameter_fields
from server.generation.request import (
    Conversation,
    EmbeddingRequest,
    GenerationRequest,
    Message,
    ReasoningEffort,
    ToolCall,
)
from server.http.bodies import Body, fields_without_effect, one_message, optional, unsupported_fields
from server.openai.conversation import ROLE, ToolFields, neutral_tool

_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty")
_OTHER_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# How a model is loaded: said when the server is started.
_LOADING = ("num_keep", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
            "use_mlock", "embedding_only", "num_thread", "numa")  # fmt: skip
# What this API calls fields of a neutral request.
NAMES = {
    **{name: f"options.{name}" for name in (*_SAME, "stop")},
    **{name: f"options.{own}" for own, name in _OTHER_NAMES.items()},
    "logprobs": "top_logprobs",
    "structured_outputs": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
}
_CHAT_NAMES = {
    **NAMES,
    "prompt": "messages",
    "tools[].name": "tools[].function.name",
    "messages[].tool_calls[].arguments": "messages[].tool_calls[].function.arguments",
}
NOT_YET: dict[str, tuple[Any, ...]] = {"suffix": ("",), "template": ("",), "context": ([],)}
_idle: dict[str, Any] = fields_without_effect(dict.fromkeys((*_LOADING, "repeat_last_n", "mirostat", "tfs_z")))
_OptionsBase: Any = create_model("OllamaOptionsBase", __base__=Body, **parameter_fields(_SAME), **_idle)
_refused: dict[str, Any] = unsupported_fields(NOT_YET)
_GenerateBase: Any = create_model("OllamaGenerateBase", __base__=Body, **_refused)
_Images = Annotated[
    Annotated[list[Any], Field(max_length=0)] | None, one_message("left out: the model reads nothing but text")
]


class Options(_OptionsBase):  # type: ignore[misc]
    """How to sample. What is left out is the model's default, not Ollama's."""

    num_predict: int | None = optional("Most tokens of the answer; 0 and below: as many as fit.")
    repeat_penalty: float | None = optional(
        "Divides the logits of tokens that the prompt or the answer has; multiplies negative ones.",
        json_schema_extra=limits("repetition_penalty"),
    )
    stop: Stop | None = optional("A text, or a list of texts, that ends the answer.")
    num_ctx: int | None = optional("Accepted; the context is the server's `--max-model-len`.")

    # The penalty is of the whole context.
    NO_EFFECT: ClassVar[Any] = {"mirostat": (0,), "tfs_z": (1,), "repeat_last_n": (-1, 64)}

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`."""
        found = given_sampling(self, _SAME)
        if self.stop:
            found["stop"] = self.stop
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.num_predict is not None and self.num_predict > 0:
            found["max_tokens"] = self.num_predict
        return found


class _Loading(Body):
    """What every request may say."""

    model: str = Field(description="One of the names that `/api/tags` lists, with or without `:latest`.")
    options: Options | None = optional("How to sample.")
    keep_alive: float | str | None = optional("Accepted; the model stays loaded.")


class _Answering(_Loading):
    """What requests for an answer say besides the prompt."""

    stream: bool | None = optional("Send the answer as it comes, a JSON object in each line.", True)
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, one_message('"json" or a JSON schema')] = optional(
        "What the answer has to be: `json`, or a JSON schema."
    )
    think: Annotated[bool | ReasoningEffort | None, one_message("true, false or how much: low, medium, high")] = (
        optional("Whether to reason first, or how much: `low`, `medium`, `high`.")
    )
    logprobs: bool | None = optional("Give the log-probabilities of the sampled tokens.", False)
    top_logprobs: int | None = optional(
        "With `logprobs`: also those of this many likeliest tokens.", 0, json_schema_extra=limits("logprobs")
    )
    truncate: bool | None = optional("Accepted; a prompt that is too long is refused.")
    shift: bool | None = optional("Accepted; an answer ends where the context does.")

    NO_EFFECT: ClassVar[Any] = {"truncate": (False,), "shift": (False,)}

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def _neutral(self, **prompt: Any) -> GenerationRequest:
        sampling = (self.options or Options()).sampling()
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        structured: dict[str, Any] = {}
        if self.format:
            structured = {"json_object": True} if self.format == "json" else {"json": self.format}
        return GenerationRequest(
            id_prefix="ollama-",
            sampling=sampling,
            structured_outputs=structured,
            include_reasoning=self.think is not False,
            **prompt,
        )

    def _conversation(self, messages: list[Message], **more: Any) -> Conversation:
        effort = self.think if isinstance(self.think, str) else None
        thinks = self.think if isinstance(self.think, bool) else None
        return Conversation(
            messages=messages, reasoning_effort=effort, enable_thinking=thinks, may_be_merged=True, **more
        )


class FunctionCall(Body):
    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None
    description: str | None = None


class CallFields(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(Body):
    """One message."""

    role: str = Field(pattern=ROLE)
    content: str | None = None
    thinking: str | None = None
    images: _Images = None
    tool_calls: list[CallFields] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class GenerateRequest(_Answering, _GenerateBase):  # type: ignore[misc]
    """A prompt to be answered, or with `raw` a text to be continued."""

    prompt: str | None = optional("What to answer; empty: nothing, as the model is loaded.")
    system: str | None = optional("The system prompt.")
    raw: bool | None = optional("Continue the prompt as it is, without the chat template.", False)
    images: _Images = None

    @property
    def is_empty(self) -> bool:
        """Only the model is to be loaded."""
        return not self.prompt

    def neutral(self, model: str, has_template: bool) -> GenerationRequest:
        """`has_template`: the model has a chat template; without one texts are continued."""
        prompt = self.prompt or ""
        if self.raw or not has_template:
            text = prompt if self.raw or not self.system else f"{self.system}\n\n{prompt}"
            return self._neutral(model=model, prompt=[text], add_special_tokens=True, names=NAMES)
        messages = [Message(role="system", content=self.system)] if self.system else []
        conversation = self._conversation([*messages, Message(role="user", content=prompt)])
        return self._neutral(model=model, prompt=conversation, names=NAMES)


class ChatRequest(_Answering):
    """A conversation to be continued."""

    messages: list[ChatMessage] | None = optional("The conversation; empty: nothing, as the model is loaded.")
    tools: list[ToolFields] | None = optional("Functions that the model may call.")

    @property
    def is_empty(self) -> bool:
        """Only the model is to be loaded."""
        return not self.messages

    def neutral(self, model: str, has_template: bool) -> GenerationRequest:
        tools = [neutral_tool(tool, index) for index, tool in enumerate(self.tools or ())]
        conversation = self._conversation(_messages(self.messages or []), tools=tools)
        return self._neutral(model=model, prompt=conversation, names=_CHAT_NAMES)


def _messages(given: list[ChatMessage]) -> list[Message]:
    """Results of tools answer the calls before them in their order, where clients give no ids."""
    messages: list[Message] = []
    open_calls: dict[str, deque[str]] = {}  # the ids of a function's calls that have no result yet
    for index, each in enumerate(given):
        calls = [
            ToolCall(
                id=call.id or f"call_{index}_{number}", name=call.function.name, arguments=call.function.arguments or {}
            )
            for number, call in enumerate(each.tool_calls or ())
        ]
        if calls:
            open_calls = {}
            for call in calls:
                open_calls.setdefault(call.name, deque()).append(str(call.id))
        call_id = each.tool_call_id
        if each.role == "tool" and call_id is None and open_calls:
            name = each.tool_name if each.tool_name in open_calls else next(iter(open_calls))
            call_id = open_calls[name].popleft()
            if not open_calls[name]:
                del open_calls[name]
        messages.append(
            Message(
                role=each.role,
                content=each.content or "",
                name=each.tool_name,
                tool_call_id=call_id,
                tool_calls=calls,
                reasoning=each.thinking,
            )
        )
    return messages


class EmbedRequest(_Loading):
    """Texts to be embedded, as vectors of length 1."""

    input: Annotated[str | list[str], one_message("a text or a list of texts")] = Field(
        description="A text or a list of texts."
    )
    truncate: bool | None = optional("False: refuse texts that are longer than the context.", True)
    dimensions: int | None = optional("Leave out the rest of the vector.")

    def neutral(self, model: str) -> EmbeddingRequest:
        texts = [self.input] if isinstance(self.input, str) else self.input
        dimensions = {"dimensions": self.dimensions} if self.dimensions is not None else {}
        return EmbeddingRequest(
            prompt=texts,
            id_prefix="ollama-",
            names={"prompt": "input"},
            model=model,
            add_special_tokens=True,
            truncate_prompt_tokens=-1 if self.truncate is not False else None,
            keep_first_tokens=True,
            pooling={"normalize": True, **dimensions},
        )


class EmbeddingsRequest(_Loading):
    """A text to be embedded, by the older endpoint: the vector as it is."""

    prompt: str = Field(description="A text.")

    def neutral(self, model: str) -> EmbeddingRequest:
        return EmbeddingRequest(
            prompt=[self.prompt],
            id_prefix="ollama-",
            model=model,
            add_special_tokens=True,
            truncate_prompt_tokens=-1,
            keep_first_tokens=True,
            pooling={"normalize": False},
        )


class ShowRequest(Body):
    """A model to be described."""

    model: str | None = optional("One of the names that `/api/tags` lists; left out: the one that is served.")
    name: str | None = optional("The older name of `model`.")
    verbose: bool | None = optional("Accepted; has no effect.")
