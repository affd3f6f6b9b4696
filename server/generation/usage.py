"""Token counts of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Token counts of a response so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    reasoning_tokens: int | None = None  # completion tokens spent on reasoning; None: not counted
    predicted_tokens: tuple[int, int] | None = (
        None  # of the prediction: accepted as drafts, rejected; None: it has none
    )

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
