"""The request fields of /v1/chat/completions, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from server.apis.openai.conversation import NAMES, ConversationFields, TextPart, ToolChoiceField, tool_choice
from server.apis.openai.fields import NO_EFFECT, NOT_YET_IN_BOTH, SamplingFields, body_class
from server.apis.parameters import given_sampling, limits
from server.generation.request import GenerationRequest, ReasoningEffort, Verbosity
from server.http.bodies import Body, one_message, optional, wrong

NOT_YET_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
_ChatBase: Any = body_class("ChatBase", NOT_YET_IN_BOTH, NOT_YET_IN_CHAT)


class Prediction(Body):
    """The text that the answer is expected to be."""

    type: Literal["content"]
    content: Annotated[str | list[TextPart], one_message("a string or a list of text parts")]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class ChatCompletionRequest(ConversationFields, SamplingFields, _ChatBase):  # type: ignore[misc]
    """A conversation to continue."""

    max_completion_tokens: int | None = optional(
        "The newer name for `max_tokens`.", json_schema_extra=limits("max_tokens")
    )
    logprobs: bool | None = optional("Return the log probabilities of the sampled tokens.", False)
    top_logprobs: int | None = optional(
        "With `logprobs`: also return those of this many most likely tokens.", 0, json_schema_extra=limits("logprobs")
    )
    tool_choice: ToolChoiceField | None = optional(
        '`"auto"`, `"none"`, `"required"`, a named function, or `allowed_tools` with a mode and a subset of the tools.',
        "auto",
    )
    parallel_tool_calls: bool | None = optional("Whether the answer may have several tool calls.", True)
    reasoning_effort: ReasoningEffort | None = optional(
        "Passed to the chat template: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`; `none` turns "
        "reasoning off."
    )
    verbosity: Verbosity | None = optional("Passed to the chat template: how long the answer should be.")
    enable_thinking: bool | None = optional("Passed to the chat template: whether to reason before the answer.")
    include_reasoning: bool | None = optional("Whether to return the reasoning.", True)
    prediction: Prediction | None = optional(
        "The text that the answer is expected to be, for the most part. Where it is, the answer comes faster, if the "
        "server has drafts (`--speculative-config`). It changes no answer."
    )

    NO_EFFECT: ClassVar[Any] = {name: values for name, values in NO_EFFECT.items() if name != "prediction"}

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("requires logprobs=true", "top_logprobs")
        return self

    def neutral(self) -> GenerationRequest:
        sampling = given_sampling(self)
        sampling["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        if self.prediction is not None:
            sampling["prediction"] = self.prediction.text
        structured, names = self.structured_fields()
        names = {**NAMES, "logprobs": "top_logprobs", **names}
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        return GenerationRequest(
            prompt=self.conversation(
                reasoning_effort=self.reasoning_effort,
                enable_thinking=self.enable_thinking,
                verbosity=self.verbosity,
            ),
            id_prefix="chatcmpl-",
            names=names,
            add_special_tokens=bool(self.add_special_tokens),
            sampling=sampling,
            structured_outputs=structured,
            tool_choice=tool_choice(self.tool_choice, self.parallel_tool_calls),
            include_reasoning=self.include_reasoning is not False,
            length_penalty=self.beam_length_penalty,
            **self.engine_fields(),
        )
