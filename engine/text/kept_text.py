"""Checks that a prompt contains the text of every message."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from engine.text.image_marks import START, split

_REASONING_ENDS = ("</think>", "[/THINK]", "<channel|>", "</thought>")  # templates drop text before one from an answer
_MAX_SEARCHED = 1 << 28  # characters; a fraction of a second


def lost_messages(messages: Sequence[dict[str, Any]], prompt: str) -> list[int]:
    """Return the indexes of messages with a text or a call that is not in the prompt.

    `messages`: as of `message_shape.shaped`. Templates may strip a text, write it as JSON, or indent its lines. The
    search is bounded: what a template puts far from its place in a huge prompt is taken to be there.
    """
    search, lost = _Search(prompt), []
    repeated = Counter(text for message in messages for text in _texts(message))
    for index, message in enumerate(messages):
        words = {call["function"]["name"] for call in message.get("tool_calls") or ()}
        is_kept = all(search.has(text, repeated[text]) for text in _texts(message)) and all(map(search.has_word, words))
        if not is_kept:
            lost.append(index)
    return lost


def _texts(message: dict[str, Any]) -> Iterator[str]:
    text = message["content"]
    if message["role"] == "assistant":
        for end in _REASONING_ENDS:
            text = text.rpartition(end)[2]
    for part in split(text) if START in text else [text]:
        if isinstance(part, str) and (part := part.strip()):
            yield part


class _Search:
    """Searches for texts that are expected in their order."""

    def __init__(self, prompt: str) -> None:
        self._prompt, self._at = prompt, 0
        self._left = _MAX_SEARCHED
        self._known: dict[str, bool] = {}  # of texts that are searched for in the whole prompt

    def has(self, text: str, times: int) -> bool:
        """Return whether the prompt has a text at least so many times."""
        if self._left <= 0:
            return True
        if times == 1:
            found = self._prompt.find(text, self._at)
            if found >= 0:
                self._at = found + len(text)
                return True
            self._left -= len(self._prompt) - self._at
        if text not in self._known:
            self._known[text] = any(self._count(form) >= times for form in _forms(text)) or self._has_lines(text, times)
        return self._known[text]

    def has_word(self, word: str) -> bool:
        if word not in self._known:
            self._known[word] = self._count(word) > 0
        return self._known[word]

    def _has_lines(self, text: str, times: int) -> bool:
        lines = {line.strip() for line in text.splitlines()} - {""}
        return len(lines) > 1 and all(self._count(line) >= times for line in lines)

    def _count(self, text: str) -> int:
        self._left -= len(self._prompt)
        return self._prompt.count(text) if self._left > 0 else len(self._prompt)


def _forms(text: str) -> Iterator[str]:
    """Yield the forms in which templates write a text: as it is, and as JSON."""
    yield text
    for ascii_only in (False, True):
        yield json.dumps(text, ensure_ascii=ascii_only)[1:-1]
