"""The request fields of Ollama's API, and their conversion to neutral requests."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from engine.vision.sources import ImageSource
from server.apis.openai.conversation import ROLE, ToolFields, neutral_tool
from server.apis.parameters import Stop, given_sampling, limits, parameter_fields
from server.generation.request import (
    Conversation,
    EmbeddingRequest,
    GenerationRequest,
    Message,
    ReasoningEffort,
    ToolCall,
    text_and_images,
)
from server.http.bodies import Body, fields_without_effect, one_message, optional, unsupported_fields

_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty")
_OTHER_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Options for loading a model. Quire takes them from its command line instead.
_LOADING = (
    "num_keep", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "numa",
)  # fmt: skip
# Field names of the neutral request in this API.
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
_Images = Annotated[list[str] | None, one_message("a list of image files in base64")]


class Options(_OptionsBase):  # type: ignore[misc]
    """Sampling options. Defaults are the model's, not Ollama's."""

    num_predict: int | None = optional("Maximum tokens of the answer; 0 and below: as many as fit.")
    repeat_penalty: float | None = optional(
        "Penalty on tokens of the prompt and the answer: divides positive logits, multiplies negative ones.",
        json_schema_extra=limits("repetition_penalty"),
    )
    stop: Stop | None = optional("A string, or a list of strings, that ends the answer.")
    num_ctx: int | None = optional("Accepted; the context length is the server's `--max-model-len`.")

    # The repetition penalty always covers the whole context.
    NO_EFFECT: ClassVar[Any] = {"mirostat": (0,), "tfs_z": (1,), "repeat_last_n": (-1, 64)}

    def sampling(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`."""
        found = given_sampling(self, _SAME)
        if self.stop:
            found["stop"] = self.stop
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.num_predict is not None and self.num_predict > 0:
            found["max_tokens"] = self.num_predict
        return found


class _Loading(Body):
    """Fields of every request."""

    model: str = Field(description="One of the names that `/api/tags` lists, with or without `:latest`.")
    options: Options | None = optional("Sampling options.")
    keep_alive: float | str | None = optional(
        "With several models: how long the model stays awake without a request, in seconds or as `5m`; negative: until "
        "another one needs its place. A single model stays loaded."
    )


class _Answering(_Loading):
    """Fields of generation requests besides the prompt."""

    stream: bool | None = optional("Stream the answer, one JSON object per line.", True)
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, one_message('"json" or a JSON schema')] = optional(
        "The required format of the answer: `json` or a JSON schema."
    )
    think: Annotated[bool | ReasoningEffort | None, one_message("true, false or an effort: low, medium, high")] = (
        optional("Whether to reason before answering, or the effort: `low`, `medium`, `high`.")
    )
    logprobs: bool | None = optional("Return the log probabilities of the sampled tokens.", False)
    top_logprobs: int | None = optional(
        "With `logprobs`: also return those of this many most likely tokens.", 0, json_schema_extra=limits("logprobs")
    )
    truncate: bool | None = optional("Accepted; a prompt that is too long is rejected.")
    shift: bool | None = optional("Accepted; the answer ends when the context is full.")

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
        return Conversation(messages=messages, reasoning_effort=effort, enable_thinking=thinks, **more)


class FunctionCall(Body):
    name: str
    arguments: Any = None  # an object
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
    """A prompt to answer, or with `raw` a text to continue."""

    prompt: str | None = optional("The prompt. Empty: only report that the model is loaded.")
    system: str | None = optional("The system prompt.")
    raw: bool | None = optional("Continue the prompt without applying the chat template.", False)
    images: _Images = None

    @property
    def is_empty(self) -> bool:
        """Return whether the request only asks to load the model."""
        return not self.prompt

    def neutral(self, model: str, has_template: bool) -> GenerationRequest:
        """Convert the request. Without `has_template` (a chat template) the text is continued."""
        prompt = self.prompt or ""
        if self.raw or not has_template:
            text = prompt if self.raw or not self.system else f"{self.system}\n\n{prompt}"
            return self._neutral(model=model, prompt=[text], add_special_tokens=True, names=NAMES)
        messages = [Message(role="system", content=self.system)] if self.system else []
        conversation = self._conversation([*messages, Message(role="user", **_shown(self.images, prompt))])
        return self._neutral(model=model, prompt=conversation, names=NAMES)


class ChatRequest(_Answering):
    """A conversation to continue."""

    messages: list[ChatMessage] | None = optional("The conversation. Empty: only report that the model is loaded.")
    tools: list[ToolFields] | None = optional("Functions that the model may call.")

    @property
    def is_empty(self) -> bool:
        """Return whether the request only asks to load the model."""
        return not self.messages

    def neutral(self, model: str, has_template: bool) -> GenerationRequest:
        tools = [neutral_tool(tool, index) for index, tool in enumerate(self.tools or ())]
        conversation = self._conversation(_messages(self.messages or []), tools=tools)
        return self._neutral(model=model, prompt=conversation, names=_CHAT_NAMES)


def _shown(images: list[str] | None, text: str | None) -> dict[str, Any]:
    """Return `content` and `images` of a message, with the images first, as Ollama shows them."""
    return text_and_images([*(ImageSource(base64=each) for each in images or ()), text or ""])


def _messages(given: list[ChatMessage]) -> list[Message]:
    """Convert messages. Tool results without ids are matched to the preceding calls in order."""
    messages: list[Message] = []
    open_calls: dict[str, deque[str]] = {}  # ids of calls without a result, by function
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
                **_shown(each.images, each.content),
                name=each.tool_name,
                tool_call_id=call_id,
                tool_calls=calls,
                reasoning=each.thinking,
            )
        )
    return messages


class EmbedRequest(_Loading):
    """Texts to embed as vectors of length 1."""

    input: Annotated[str | list[str], one_message("a string or a list of strings")] = Field(
        description="A string or a list of strings."
    )
    truncate: bool | None = optional("False: reject texts that exceed the context.", True)
    dimensions: int | None = optional("Return only this many first values of the vector.")

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
    """A text to embed with the older endpoint, without normalisation."""

    prompt: str = Field(description="The text to embed.")

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
    """A model to describe."""

    model: str | None = optional("One of the names that `/api/tags` lists. Default: the served model.")
    name: str | None = optional("Older name for `model`.")
    verbose: bool | None = optional("Accepted; has no effect.")
