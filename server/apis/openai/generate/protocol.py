"""The request fields of /inference/v1/generate, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, create_model, model_validator

from server.apis.openai.fields import EngineFields, StreamOptions, StructuredOutputsFields
from server.apis.parameters import PARAMETERS, given_sampling, parameter_fields
from server.generation.request import GenerationRequest
from server.http.bodies import Body, fields_without_effect, optional, unsupported_fields, wrong

NOT_YET: dict[str, tuple[Any, ...]] = {"features": (), "kv_transfer_params": (), "ec_transfer_params": ()}
# Fields that vLLM's render endpoints return with the prompt.
_NO_EFFECT: dict[str, tuple[Any, ...] | None] = {"assistant_tokens_mask": None, "token_offsets": None}
_SamplingBase: Any = create_model("TokenSamplingBase", __base__=Body, **parameter_fields())
_fields: dict[str, Any] = unsupported_fields(NOT_YET) | fields_without_effect(_NO_EFFECT)
_TokensBase: Any = create_model("TokensBase", __base__=Body, **_fields)
_NAMES = {"prompt": "token_ids"} | {name: f"sampling_params.{name}" for name in (*PARAMETERS, "structured_outputs")}


class TokenSampling(_SamplingBase):  # type: ignore[misc]
    """The sampling parameters of completions."""

    structured_outputs: StructuredOutputsFields | None = optional("The required format of the answer.")
    detokenize: bool | None = optional("Accepted; tokens are detokenized only to find `stop` strings.")
    output_kind: int | None = optional("Accepted; has no effect.")

    NO_EFFECT: ClassVar[Any] = {"detokenize": None, "output_kind": None}


class TokensRequest(EngineFields, _TokensBase):  # type: ignore[misc]
    """Token ids to continue."""

    token_ids: list[int] = Field(min_length=1, description="The prompt's token ids.")
    sampling_params: TokenSampling = Field(description="The sampling parameters.")
    stream: bool | None = optional("Stream the answer as server-sent events.", False)
    stream_options: StreamOptions | None = optional("`include_usage`: a final event with the token counts.")

    NO_EFFECT: ClassVar[Any] = _NO_EFFECT

    @model_validator(mode="after")
    def _check_together(self) -> TokensRequest:
        if self.stream_options is not None and not self.stream:
            raise wrong("requires stream=true", "stream_options")
        if self.sampling_params.prompt_logprobs is not None and self.stream:
            raise wrong("is not supported with stream=true", "sampling_params", "prompt_logprobs")
        return self

    def neutral(self) -> GenerationRequest:
        structured: dict[str, Any] = {}
        if (given := self.sampling_params.structured_outputs) is not None:
            structured = {"json": given.json_, "json_object": bool(given.json_object)}
            structured |= {name: getattr(given, name) for name in ("regex", "choice", "grammar")}
        return GenerationRequest(
            prompt=[self.token_ids],
            id_prefix="generate-tokens-",
            names=_NAMES,
            sampling=given_sampling(self.sampling_params),
            structured_outputs=structured,
            **self.engine_fields(),
        )
