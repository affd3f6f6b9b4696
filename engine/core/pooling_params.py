"""What a request asks of its prompt's hidden states, when it wants no answer. Knows numbers only: no tensors, no text."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.sampling_params import SamplingParams

POOLINGS = ("last", "mean")
UNSAMPLED = SamplingParams(
    temperature=0, max_tokens=1, detokenize=False
)  # beside pooling parameters: nothing is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the prompt's hidden states, after the model's final norm, become one embedding.

    `ValueError` names the field and its value when it is out of range.
    """

    pooling: str = "last"  # the last token's, or the mean of all tokens'
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # only the first ones, taken before normalisation; None: all

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be {' or '.join(POOLINGS)}, got {self.pooling!r}")
        if self.dimensions is not None and not (type(self.dimensions) is int and self.dimensions >= 1):
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions!r}")
