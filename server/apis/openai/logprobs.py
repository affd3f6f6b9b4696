"""Log probabilities in OpenAI's two formats, and in vLLM's format for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.batch import TokenLogprobs
from engine.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON cannot represent infinity


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """Return the token's text, or with `as_id` its id in vLLM's notation."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def logprobs_content(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: Sequence[TokenLogprobs], as_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the chat format: one object per token, with the most likely tokens at its position."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(tokenizer, token_id, as_ids),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        entry(token_id, at.logprob)
        | {"top_logprobs": [entry(*top) for top in zip(at.top_ids, at.top_logprobs, strict=True)]}
        for token_id, at in zip(token_ids, found, strict=True)
    ]


def prompt_logprobs(
    tokenizer: Tokenizer | None, prompt: Sequence[int], found: Sequence[TokenLogprobs]
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's format: for each prompt token, id → log probability, rank and text; null for the first token."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_text(token_id) if tokenizer is not None else None
        return {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": text}

    positions: list[dict[str, dict[str, Any]] | None] = [None]
    for token_id, at in zip(prompt[1:], found, strict=True):
        position = {str(token_id): entry(token_id, at.logprob, at.rank)}
        for rank, (top_id, logprob) in enumerate(zip(at.top_ids, at.top_logprobs, strict=True), 1):
            position.setdefault(str(top_id), entry(top_id, logprob, rank))
        positions.append(position)
    return positions


@dataclass(slots=True)
class LegacyLogprobs:
    """Collects log probabilities in the completions format: parallel lists, with each token's text offset."""

    tokenizer: Tokenizer
    skip_special_tokens: bool
    as_ids: bool = False
    _length: int = 0
    _utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _tokens: list[str] = field(default_factory=list)
    _logprobs: list[float | None] = field(default_factory=list)
    _tops: list[dict[str, float] | None] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def add_prompt(self, prompt: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
        """Add the echoed prompt. Its first token has no log probability."""
        self._append(prompt[0], None, None, self.tokenizer.first_token_bytes(prompt[0]))
        self.add(prompt[1:], found)

    def add(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
        for token_id, at in zip(token_ids, found, strict=True):
            logprob = max(at.logprob, LOWEST_LOGPROB)
            top = {self._name(i): max(p, LOWEST_LOGPROB) for i, p in zip(at.top_ids, at.top_logprobs, strict=True)}
            top.setdefault(self._name(token_id), logprob)
            self._append(token_id, logprob, top, self.tokenizer.token_bytes(token_id))

    def _append(self, token_id: int, logprob: float | None, top: dict[str, float] | None, data: bytes) -> None:
        self._tokens.append(self._name(token_id))
        self._logprobs.append(logprob)
        self._tops.append(top)
        self._offsets.append(self._length)
        if not (self.skip_special_tokens and token_id in self.tokenizer.special_ids):
            self._length += len(self._utf8.decode(data))

    def take(self) -> dict[str, Any]:
        """Return and clear the entries added since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._tops, self._offsets = [], [], [], []
        return taken

    def _name(self, token_id: int) -> str:
        """Return the token's text; a token that is part of a character is written in hexadecimal, as OpenAI does."""
        text = token_name(self.tokenizer, token_id, self.as_ids)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.tokenizer.token_bytes(token_id))
