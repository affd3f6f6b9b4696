"""The parameters of embedding requests."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.params.declare import NumberChecks, parameter
from engine.core.params.errors import ParameterError
from engine.core.params.sampling import SamplingParams

POOLINGS = ("last", "mean", "cls")  # that a client may choose
OF_TOKENS = "all"  # an output for each token, of models that label tokens
UNSAMPLED = SamplingParams(
    temperature=0, max_tokens=1, detokenize=False
)  # the parameters of pooling requests, which do not sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The parameters for turning the prompt's hidden states, after the model's final norm, into one embedding.

    Raises `ParameterError` for a value out of range.
    """

    pooling: str = parameter(
        "last",
        "`last`: the last token's hidden state; `mean`: the mean over all tokens; `cls`: the first token's, for "
        "encoders",
        unset="`--pooling`, else the model's `1_Pooling`, else `last`",
    )
    normalize: bool = parameter(
        True, "scale the embedding to length 1", unset="as the model's `modules.json` says, else true"
    )
    dimensions: int | None = parameter(
        None,
        "number of values to keep from the start of the vector, before normalising; for Matryoshka models",
        at_least=1,
        unset="all",
    )

    def __post_init__(self) -> None:
        if self.pooling not in (*POOLINGS, OF_TOKENS):
            raise ParameterError("pooling", f"must be last, mean or cls, got {self.pooling!r}")
        _check_numbers(self)


_check_numbers = NumberChecks(PoolingParams)
