"""The sampling parameters as fields of JSON bodies: what `SamplingParams` declares, for every API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from engine.core.parameters import Parameter, parameters_of
from engine.core.sampling_params import SamplingParams
from server.http.bodies import one_message
from server.http.errors import APIError

LogitBias = Annotated[dict[str, float], one_message("an object of token ids, each with a number")]
Stop = Annotated[str | list[str], one_message("a text or a list of texts")]
PARAMETERS = parameters_of(SamplingParams)
_JSON_TYPES: dict[str, Any] = {"stop": Stop, "logit_bias": LogitBias, "bad_words": list[str]}
_NO_ONE_DEFAULT = frozenset(["max_tokens"])  # it depends on the endpoint


def parameter_fields(names: Iterable[str] = PARAMETERS) -> dict[str, Any]:
    """Fields for `pydantic.create_model`, as `SamplingParams` declares them. It checks the ranges, too."""
    return {name: _parameter_field(PARAMETERS[name]) for name in names}


def _parameter_field(parameter: Parameter) -> Any:
    declared = parameter.range
    schema = {
        "minimum": declared.at_least,
        "exclusiveMinimum": declared.above,
        "maximum": declared.at_most,
        "default": None if parameter.name in _NO_ONE_DEFAULT else parameter.default,
    }
    known = {name: value for name, value in schema.items() if value is not None}
    description = f"{declared.help[0].upper()}{declared.help[1:]}."
    kind: Any = _JSON_TYPES.get(parameter.name, parameter.kind)
    return kind | None, Field(None, description=description, json_schema_extra=known)


def given_sampling(body: Any, names: Iterable[str] = PARAMETERS) -> dict[str, Any]:
    """The sampling parameters that a request gives, as fields of `SamplingParams`."""
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if bias := given.get("logit_bias"):
        try:
            given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        except ValueError:
            raise APIError(400, f"token ids must be integers, got {[*bias][:5]}", "logit_bias") from None
    return given
