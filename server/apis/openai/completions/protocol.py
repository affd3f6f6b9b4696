"""The request fields of /v1/completions, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from server.apis.openai.fields import NO_EFFECT, NOT_YET_IN_BOTH, Prompt, SamplingFields, body_class, prompts_of
from server.apis.parameters import given_sampling, limits
from server.generation.request import GenerationRequest
from server.http.bodies import optional, wrong

DEFAULT_MAX_TOKENS = 16
NOT_YET_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",), "prompt_embeds": ()}

_CompletionBase: Any = body_class("CompletionBase", NOT_YET_IN_BOTH, NOT_YET_IN_COMPLETIONS)


class CompletionRequest(SamplingFields, _CompletionBase):  # type: ignore[misc]
    """A text to continue."""

    prompt: Prompt = Field(description="A string, a list of token ids, or a list of either.")
    logprobs: int | None = optional(
        "Return log probabilities of the sampled tokens and of this many most likely tokens; with `echo`, also for the "
        "prompt.",
        json_schema_extra=limits("logprobs"),
    )
    echo: bool | None = optional("Start the answer with the prompt; `max_tokens` may then be 0.", False)

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        given = self.prompt
        if not given or (isinstance(given, list) and not isinstance(given[0], int) and not all(given)):
            raise wrong("must not be empty", "prompt")
        if self.scores_prompts and self.stream and (self.n or 1) > 1:
            raise wrong("together with logprobs and n above 1 is not supported with stream=true", "echo")
        return self

    @property
    def scores_prompts(self) -> bool:
        """Return whether log probabilities of the prompt are requested."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def only_echoes(self) -> bool:
        """Return whether only the prompt is returned and nothing is generated."""
        return bool(self.echo) and self.max_tokens == 0

    def neutral(self) -> GenerationRequest:
        sampling = given_sampling(self)
        if self.only_echoes:
            sampling["max_tokens"] = 1  # the engine's minimum; this token is not returned
        if self.scores_prompts and self.prompt_logprobs is None:
            sampling["prompt_logprobs"] = self.logprobs
        structured, names = self.structured_fields()
        return GenerationRequest(
            prompt=prompts_of(self.prompt),
            id_prefix="cmpl-",
            names=names,
            add_special_tokens=self.add_special_tokens is not False,
            sampling=sampling,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            structured_outputs=structured,
            length_penalty=self.beam_length_penalty,
            **self.engine_fields(),
        )
