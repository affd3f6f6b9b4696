"""How many tokens a request has used, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Tokens of a response so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    reasoning_tokens: int | None = None  # of the completion; None: they are not counted

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
