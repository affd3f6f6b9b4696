"""The parameters that `SamplingParams` and `PoolingParams` declare, as fields of JSON bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from engine import PoolingParams, SamplingParams
from engine.core.params.declare import Parameter, ParameterDeclaration, parameters_of
from engine.core.params.pooling import POOLINGS
from server.http.bodies import one_message
from server.http.errors import APIError

LogitBias = Annotated[dict[str, float], one_message("an object that maps token ids to numbers")]
Stop = Annotated[str | list[str], one_message("a string or a list of strings")]
PARAMETERS = parameters_of(SamplingParams)
_POOLING = parameters_of(PoolingParams)
_JSON_TYPES: dict[str, Any] = {  # where the type in JSON differs from the field's
    "stop": Stop,
    "logit_bias": LogitBias,
    "bad_words": list[str],
    "pooling": Literal[POOLINGS],
}
LEFT_OUT = " Default: "  # in descriptions, before the default in words
_UNSET = {"max_tokens": "chat: as many as fit; completions: 16"}


def parameter_fields(names: Iterable[str] = PARAMETERS) -> dict[str, Any]:
    """Return fields for `pydantic.create_model` as `SamplingParams` declares them; it also checks the ranges."""
    return {name: _field(PARAMETERS[name]) for name in names}


def pooling_fields() -> dict[str, Any]:
    """Return the fields of `PoolingParams` for `pydantic.create_model`."""
    return {name: _field(parameter) for name, parameter in _POOLING.items()}


def limits(name: str) -> dict[str, Any]:
    """Return the range of a sampling parameter, for the JSON schema of a field with another name."""
    return _limits(PARAMETERS[name].declaration)


def _limits(declared: ParameterDeclaration) -> dict[str, Any]:
    found = {
        "minimum": declared.at_least,
        "exclusiveMinimum": declared.above,
        "maximum": declared.at_most,
        "maxItems": declared.max_length,  # applies only to lists
        "maxProperties": declared.max_length,  # applies only to objects
    }
    return {key: value for key, value in found.items() if value is not None}


def _field(parameter: Parameter) -> Any:
    schema, declared = _limits(parameter.declaration), parameter.declaration
    description = f"{declared.help[0].upper()}{declared.help[1:]}."
    if unset := _UNSET.get(parameter.name, declared.unset):
        description += f"{LEFT_OUT}{unset}."
    elif parameter.default is not None:
        schema["default"] = parameter.default
    kind: Any = _JSON_TYPES.get(parameter.name, parameter.kind)
    return kind | None, Field(None, description=description, json_schema_extra=schema)


def given_sampling(body: Any, names: Iterable[str] = PARAMETERS) -> dict[str, Any]:
    """Return the sampling parameters that a request sets, as fields of `SamplingParams`."""
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if stop := given.get("stop"):
        given["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]  # as OpenAI's API
    if not given.get("stop", True):
        del given["stop"]  # empty texts stop nothing
    if bias := given.get("logit_bias"):
        try:
            given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        except ValueError:
            raise APIError(400, f"token ids must be integers, got {[*bias][:5]}", "logit_bias") from None
    return given
