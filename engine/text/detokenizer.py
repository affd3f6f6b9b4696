"""Incremental detokenization with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the new tokens of one sequence into text deltas, in constant time per token.

    The joined deltas equal the text that `decode` of prompt and output adds to the prompt's text, up to the first stop
    string: the one that ends first, and of several that end there the first in `stop`. How tokens are split between
    pushes does not matter. A delta never contains part of a character; text that may become a stop string is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings that end within the first `min_tokens` tokens are ignored."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._at_start = all(i in self._skipped for i in prompt_token_ids)
        self._utf8 = _UTF8("replace")
        for token_id in prompt_token_ids[-4:]:  # the prompt may end inside a character of up to 4 bytes
            self._utf8.decode(self._token_bytes(token_id))
        self._whole = not self._utf8.getstate()[0]  # the bytes so far end at a character boundary
        self._matchers = [_Matcher(text) for text in stop]
        self.looks_for_stops = bool(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._released: list[str] = []
        self._held = ""
        self.num_tokens = 0  # tokens consumed, up to the one that completed a stop string
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._released)

    def push(self, new_token_ids: Sequence[int], finished: bool = False) -> str:
        """Return the text that is now certain. `finished`: no more tokens follow, so held text is released.

        Tokens after a stop string are dropped. The caller does not push stop tokens that must not be shown.
        """
        if self.stopped_by is not None:
            return ""
        if not self._matchers:
            text = self._decode(new_token_ids, finished)
            if text:
                self._released.append(text)
            return text
        delta = []
        for token_id in new_token_ids:
            self.num_tokens += 1
            if token_id not in self._skipped:
                delta.append(self._take(self._utf8.decode(self._token_bytes(token_id))))
                if self.stopped_by is not None:
                    break
        if finished and self.stopped_by is None:
            delta.append(self._take(self._utf8.decode(b"", final=True)))
            delta.append(self._release(len(self._held)) if self.stopped_by is None else "")
        text = "".join(delta)
        if text:
            self._released.append(text)
        return text

    def _decode(self, new_token_ids: Sequence[int], finished: bool) -> str:
        """Fast path of `push` without stop strings."""
        self.num_tokens += len(new_token_ids)
        skipped = self._skipped
        if self._at_start:
            data = b"".join([self._token_bytes(i) for i in new_token_ids if i not in skipped])
        elif len(new_token_ids) == 1:
            data = b"" if (token_id := new_token_ids[0]) in skipped else self._tokenizer.token_bytes(token_id)
        else:
            token_bytes = self._tokenizer.token_bytes
            data = b"".join([token_bytes(i) for i in new_token_ids if i not in skipped])
        if self._whole:
            try:
                return data.decode()
            except UnicodeDecodeError:  # the data may end inside a character
                pass
        text = self._utf8.decode(data, finished)
        self._whole = not self._utf8.getstate()[0]
        return text

    def _token_bytes(self, token_id: int) -> bytes:
        if self._at_start and token_id not in self._skipped:
            self._at_start = False
            return self._tokenizer.first_token_bytes(token_id)
        return self._tokenizer.token_bytes(token_id)

    def _take(self, text: str) -> str:
        if not self._matchers:
            return text
        self._held += text
        armed = self.num_tokens > self._min_tokens
        for position, char in enumerate(text, len(self._held) - len(text) + 1):
            found = [matcher.stop for matcher in self._matchers if matcher.feed(char)]
            if found and armed:
                self.stopped_by = found[0]
                return self._release(position if self._include_stop else position - len(found[0]))
        return self._release(len(self._held) - max(matcher.length for matcher in self._matchers))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


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
