"""Finds stop strings in a text as it arrives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.text.tokenizer import Tokenizer


class StopStrings:
    """Releases a text up to its first stop string: the one that ends first, and of several that end there the first
    given.

    Text that may become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """`include`: the text released includes the stop string."""
        self._matchers = [_Matcher(text) for text in stop]
        self._include = include
        self._held = ""
        self.stopped_by: str | None = None  # the stop string found

    def push(self, text: str, is_armed: bool = True) -> str:
        """Return the text that is now certain. `is_armed`: whether a stop string that ends in `text` counts."""
        self._held += text
        for position, char in enumerate(text, len(self._held) - len(text) + 1):
            found = [matcher.stop for matcher in self._matchers if matcher.feed(char)]
            if found and is_armed:
                self.stopped_by = found[0]
                return self._release(position if self._include else position - len(found[0]))
        return self._release(len(self._held) - max((matcher.length for matcher in self._matchers), default=0))

    def stop_at(self, stop: str) -> str:
        """End the text with a stop string that is not part of it; return the rest of the text."""
        self.stopped_by = stop
        return self.flush() + (stop if self._include else "")

    def flush(self) -> str:
        """Return the text held back, because what follows does not belong to it."""
        for matcher in self._matchers:
            matcher.length = 0
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def stop_tokens(stop: Sequence[str], tokenizer: Tokenizer, skipped: frozenset[int] | set[int]) -> Mapping[int, str]:
    """Return the stop strings that are the text of a special token which the output omits, by the token's id."""
    ids = {tokenizer.token_to_id(text): text for text in reversed(stop)}
    return {token_id: text for token_id, text in ids.items() if token_id is not None and token_id in skipped}


class _Matcher:
    """Knuth–Morris–Pratt matcher. `length`: characters of the stop string matched at the end of the text."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = [0]  # [i]: length of the longest proper prefix of stop[: i + 1] that is also its suffix
        for char in stop[1:]:
            self._fallback.append(self._extend(self._fallback[-1], char))

    def _extend(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length - 1]
        return length + (self.stop[length] == char)

    def feed(self, char: str) -> bool:
        """Consume the next character; return whether the stop string is complete."""
        self.length = self._extend(self.length, char)
        if self.length < len(self.stop):
            return False
        self.length = self._fallback[-1]
        return True
