"""Request fields common to several of OpenAI's endpoints, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model, model_validator

from engine.processing.beam_search import MAX_LENGTH_PENALTY
from server.apis.parameters import parameter_fields
from server.generation.errors import Names
from server.generation.request import MAX_TIMEOUT_MS, TextPrompts
from server.http.bodies import (
    WITHOUT_EFFECT,
    Body,
    Table,
    fields_without_effect,
    one_message,
    optional,
    unsupported_fields,
    wrong,
)

# Fields of OpenAI's and vLLM's requests that change the answer and are not supported yet, with the values that change
# nothing and are accepted. `None` is always accepted.
NOT_YET_IN_BOTH: dict[str, tuple[Any, ...]] = {
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
NOT_YET_IN_STRUCTURED: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}

# Fields that never change the answer, with the values that cause no warning. None: no value causes one.
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "metadata": None,
    "prompt_cache_key": None,  # prompts with a common prefix share KV blocks anyway
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prediction": (),
    "spaces_between_special_tokens": None,  # Quire's detokenizer adds no spaces
    "guided_decoding_backend": None,  # there is only one backend
}


def body_class(name: str, *not_yet: Table) -> Any:
    """Create a base class of request bodies with the fields `not_yet` supported and the fields without effect."""
    fields: dict[str, Any] = unsupported_fields(*not_yet) | fields_without_effect(NO_EFFECT)
    return create_model(name, __base__=Body, **fields)


TokenIds = list[int]
Prompt = Annotated[
    str | TokenIds | list[str] | list[TokenIds],
    Field(union_mode="left_to_right"),
    one_message("a string, a list of strings, a list of token ids, or a list of such lists"),
]


def prompts_of(given: Any) -> TextPrompts:
    """Return the prompts of a field of type `Prompt` as a list."""
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class StreamOptions(Body):
    include_usage: bool | None = optional("Send the usage in an additional chunk at the end.")
    continuous_usage_stats: bool | None = optional("Send the token usage so far with every chunk.")
    include_obfuscation: bool | None = optional(WITHOUT_EFFECT)

    NO_EFFECT: ClassVar[Any] = {"include_obfuscation": (False,)}


JsonSchema = Annotated[dict[str, Any] | str, one_message("a JSON schema: an object, or its JSON as a string")]


class NamedSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Default: any JSON object.")
    strict: bool | None = optional("Accepted; the answer always follows the schema.")


class ResponseFormat(Body):
    """The required format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description='With "json_object": the schema.')

    @model_validator(mode="after")
    def _check_format(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise wrong("is required", "response_format", "json_schema")
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """Return arguments for the engine's `StructuredOutputs`. Empty: free text."""
        if self.type == "text":
            return {}
        schema = self.json_schema.schema_ if self.json_schema is not None else self.schema_
        return {"json_object": True} if schema is None else {"json": schema}


_structured: dict[str, Any] = unsupported_fields(NOT_YET_IN_STRUCTURED)
_StructuredBase: type[Body] = create_model("StructuredBase", __base__=Body, **_structured)


class StructuredOutputsFields(_StructuredBase):  # type: ignore[misc, valid-type]
    """The required format of the answer: exactly one of these fields."""

    json_: JsonSchema | None = Field(None, alias="json", description="The answer is an instance of this JSON schema.")
    regex: str | None = optional("A string that matches this regular expression as a whole.")
    choice: list[str] | None = optional("One of these strings.")
    grammar: str | None = optional("A string of this grammar, in Lark syntax or llama.cpp's GBNF.")
    json_object: bool | None = optional("True: the answer is any JSON object.")


class EngineFields(Body):
    """Fields of every request to the engine."""

    model: str | None = optional("One of the names that `/v1/models` lists.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="Keep only this many tokens of the prompt, by default the last ones; -1: as many as fit.",
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "Whether `truncate_prompt_tokens` removes tokens from the beginning (`left`) or the end (`right`) of the "
        "prompt.",
        "left",
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Only requests with the same salt share cached prefixes."
    )
    add_special_tokens: bool | None = optional(
        "Add the tokenizer's special tokens to the prompt. Default: true for texts, false for conversations."
    )
    priority: int | None = optional(
        "Requests with lower values are scheduled first and preempted last.", 0, ge=-(2**31), le=2**31 - 1
    )
    request_id: str | None = Field(
        None,
        pattern=r"^[\w.:-]{1,128}$",
        description="The last part of the answer's `id`, which `POST /v1/requests/{id}/abort` takes.",
    )

    user: str | None = optional(
        "The end user. A server without API keys schedules fairly between users. Default: the client's address."
    )
    safety_identifier: str | None = optional("OpenAI's newer name for `user`.")

    timeout_ms: int | None = optional(
        "Milliseconds after which a started answer ends as it is, with `finish_reason` `abort` and `stop_reason` "
        "`timeout`; "
        "an answer that has not started by then, or cannot, gets status 504. Default: no limit.",
        ge=1,
        le=MAX_TIMEOUT_MS,
    )

    def engine_fields(self) -> dict[str, Any]:
        """Return arguments for the neutral request."""
        return {
            "model": self.model,
            "request_id": self.request_id,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "keep_first_tokens": self.truncation_side == "right",
            "cache_salt": self.cache_salt or "",
            "priority": self.priority or 0,
            "user": self.safety_identifier or self.user or "",
            "timeout_ms": self.timeout_ms,
        }


_SamplingBase: Any = create_model("SamplingBase", __base__=EngineFields, **parameter_fields())


class SamplingFields(_SamplingBase):  # type: ignore[misc]
    """Fields of both kinds of completion. `None` stands for the model's default, otherwise OpenAI's."""

    return_token_ids: bool | None = optional("Return the token ids of prompt and answer.", False)
    return_tokens_as_token_ids: bool | None = optional("Show tokens as `token_id:1` in log probabilities.", False)
    stream: bool | None = optional("Stream the answer as it is generated.", False)
    stream_options: StreamOptions | None = optional(
        "`include_usage`: send a last event with the token counts; `continuous_usage_stats`: token counts in every "
        "event."
    )
    use_beam_search: bool | None = optional(
        "Return the `n` most likely answers of a beam search with `n` beams.", False
    )
    length_penalty: float | None = optional(
        "With `use_beam_search`: scores are divided by the length to this power; values above 0 favour longer answers.",
        1.0,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        json_schema_extra={"minimum": -MAX_LENGTH_PENALTY, "maximum": MAX_LENGTH_PENALTY},
    )
    response_format: ResponseFormat | None = optional(
        '`{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name": …, "schema": …}}`.'
    )
    structured_outputs: StructuredOutputsFields | None = optional(
        "vLLM's form with more formats: one of `json`, `regex`, `choice`, `grammar`, `json_object`."
    )
    guided_json: JsonSchema | None = optional("The older name for `structured_outputs.json`.")
    guided_regex: str | None = optional("The older name for `structured_outputs.regex`.")
    guided_choice: list[str] | None = optional("The older name for `structured_outputs.choice`.")
    guided_grammar: str | None = optional("The older name for `structured_outputs.grammar`.")

    @model_validator(mode="after")
    def _check_together(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise wrong("requires stream=true", "stream_options")
        if self.logprob_token_ids and (self.logprobs is None or self.logprobs is False):
            raise wrong("requires logprobs", "logprob_token_ids")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("is not supported with stream=true", "prompt_logprobs")
        if self.use_beam_search and self.stream:
            raise wrong("is not supported with stream=true: the search must end first", "use_beam_search")
        if self.length_penalty not in (None, 1) and not self.use_beam_search:
            raise wrong("requires use_beam_search=true", "length_penalty")
        if len(self.asked) > 1:
            first, second, *_ = self.asked
            raise wrong(f"cannot be given together with {first}", second)
        return self

    @property
    def asked(self) -> dict[str, dict[str, Any]]:
        """Return the fields that set the answer's format, each with arguments for the engine's `StructuredOutputs`."""
        found = {}
        if self.response_format is not None and (format := self.response_format.asked):
            found["response_format"] = format
        if (given := self.structured_outputs) is not None:
            names = ("regex", "choice", "grammar")
            found["structured_outputs"] = {"json": given.json_} | {name: getattr(given, name) for name in names}
            found["structured_outputs"]["json_object"] = bool(given.json_object)
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                found[f"guided_{name}"] = {name: value}
        return found

    @property
    def is_scored(self) -> bool:
        """Return whether the response contains log probabilities. A long prompt can have millions."""
        is_asked = self.logprobs is not None and self.logprobs is not False
        return is_asked or self.prompt_logprobs is not None

    @property
    def beam_length_penalty(self) -> float | None:
        """The length penalty of the beam search; None: no beam search."""
        if not self.use_beam_search:
            return None
        return self.length_penalty if self.length_penalty is not None else 1.0

    def structured_fields(self) -> tuple[dict[str, Any], Names]:
        """Return arguments for the engine's `StructuredOutputs`, and the API's name of the field that set them."""
        for name, asked in self.asked.items():
            return asked, {} if name == "structured_outputs" else {"structured_outputs": name}
        return {}, {}
