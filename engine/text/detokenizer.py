"""Incremental detokenization with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.stop_strings import StopStrings, stop_tokens
from engine.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the new tokens of one sequence into text deltas, in constant time per token.

    The joined deltas equal the text that `decode` of prompt and output adds to the prompt's text, up to the first stop
    string: see `StopStrings`. A stop string that is the text of a special token which the text omits ends it at that
    token. How tokens are split between pushes does not matter. A delta never contains part of a character; text that
    may become a stop string is held back.
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
        self._stops = StopStrings(stop, include=include_stop_str_in_output) if stop else None
        self._stop_tokens = stop_tokens(stop, tokenizer, self._skipped) if stop else {}
        self._min_tokens = min_tokens
        self._released: list[str] = []
        self.num_tokens = 0  # tokens consumed, up to the one that completed a stop string

    @property
    def looks_for_stops(self) -> bool:
        return self._stops is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.stopped_by if self._stops is not None else None

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._released)

    def push(self, new_token_ids: Sequence[int], finished: bool = False) -> str:
        """Return the text that is now certain. `finished`: no more tokens follow, so held text is released.

        Tokens after a stop string are dropped. The caller does not push stop tokens that must not be shown.
        """
        stops = self._stops
        if stops is None:
            text = self._decode(new_token_ids, finished)
            if text:
                self._released.append(text)
            return text
        if stops.stopped_by is not None:
            return ""
        delta = []
        for token_id in new_token_ids:
            self.num_tokens += 1
            is_armed = self.num_tokens > self._min_tokens
            if token_id not in self._skipped:
                delta.append(stops.push(self._utf8.decode(self._token_bytes(token_id)), is_armed))
            elif is_armed and token_id in self._stop_tokens:
                delta.append(stops.stop_at(self._stop_tokens[token_id]))
            if stops.stopped_by is not None:
                break
        if finished and stops.stopped_by is None:
            delta.append(stops.push(self._utf8.decode(b"", final=True), self.num_tokens > self._min_tokens))
            delta.append(stops.flush() if stops.stopped_by is None else "")
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
