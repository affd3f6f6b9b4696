"""Token ids to text while they arrive, with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the new tokens of one sequence into text deltas, in constant time a token.

    All deltas joined are what `decode` of prompt and output gives beyond the prompt's own text, up to the first stop
    string: the one that ends first and, of several ending there, the first of `stop`. Cutting the tokens differently
    into pushes changes nothing. Never gives half a character; text that may still become a stop string is held back.
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
        """Stop strings that end within the first `min_tokens` tokens do not count."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._at_start = all(i in self._skipped for i in prompt_token_ids)
        self._utf8 = _UTF8("replace")
        for token_id in prompt_token_ids[-4:]:  # a character is at most 4 bytes: the prompt may end inside one
            self._utf8.decode(self._token_bytes(token_id))
        self._whole = not self._utf8.getstate()[0]  # the bytes so far end with a character
        self._matchers = [_Matcher(text) for text in stop]
        self.looks_for_stops = bool(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._released: list[str] = []
        self._held = ""
        self.num_tokens = 0  # tokens taken in, the one that completed a stop string last
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._released)

    def push(self, new_token_ids: Sequence[int], finished: bool = False) -> str:
        """The text that the new tokens make certain. `finished`: no more will come, everything held back is released.

        After a stop string the rest of the tokens is dropped. A stop token that must not show is not pushed.
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
        """All of `push` when there is no stop string to look for."""
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
            except UnicodeDecodeError:  # perhaps it ends in a part of a character
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
    """Knuth–Morris–Pratt: `length` is how much of the stop string the text so far may have begun."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = [0]  # [i]: the longest proper prefix of stop[: i + 1] that is its suffix too
        for char in stop[1:]:
            self._fallback.append(self._extend(self._fallback[-1], char))

    def _extend(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length - 1]
        return length + (self.stop[length] == char)

    def feed(self, char: str) -> bool:
        """Takes the text's next character; true when the stop string is complete."""
        self.length = self._extend(self.length, char)
        if self.length < len(self.stop):
            return False
        self.length = self._fallback[-1]
        return True
