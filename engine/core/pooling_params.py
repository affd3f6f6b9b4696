"""The parameters of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.parameters import NumberChecks, parameter
from engine.core.sampling_params import SamplingParams

POOLINGS = ("last", "mean")
UNSAMPLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # of pooling requests: they sample nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the prompt's hidden states, after the model's final norm, become one embedding.

    `ValueError` names the field and its value when it is out of range.
    """

    pooling: str = parameter(
        "last",
        "`last`: the last token's hidden state; `mean`: the mean of all tokens'",
        unset="as `--pooling` says, else the model's `1_Pooling`, else `last`",
    )
    normalize: bool = parameter(True, "scale the embedding to length 1")
    dimensions: int | None = parameter(
        None,
        "keep only this many first values, before scaling; for models that were trained for it (Matryoshka)",
        at_least=1,
        unset="all",
    )

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be {' or '.join(POOLINGS)}, got {self.pooling!r}")
        _check_numbers(self)


_check_numbers = NumberChecks(PoolingParams)
