"""Incremental parsers of one sample's text: reasoning, then content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from server.parsing.pieces import Content, Piece, Reasoning, begun
from server.parsing.reasoning import ReasoningReader
from server.parsing.tools import ToolReader


class AnswerReader(Protocol):
    """Divides one answer into pieces. The joined pieces do not depend on how the text is split into updates."""

    @property
    def is_plain(self) -> bool:
        """Return whether the whole answer is content."""

    @property
    def has_calls(self) -> bool: ...
    @property
    def is_cut(self) -> bool:
        """Return whether the answer ended inside a tool call."""

    @property
    def in_content(self) -> bool:
        """Return whether the next text is content, unless a marker begins."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, including its markers."""

    def push(self, text: str, token_ids: Iterable[int], finished: bool, cut: bool = False) -> list[Piece]:
        """Return the pieces now certain. `finished`: no text follows; `cut`: the answer was cut off, not ended."""


class MarkedReader:
    """Parses answers in which markers delimit reasoning and tool calls."""

    def __init__(
        self,
        reasoning: ReasoningReader | None = None,
        tools: ToolReader | None = None,
        *,
        counter: TokenCounter | None = None,
        shows_reasoning: bool = True,
    ) -> None:
        """`counter`: counts reasoning tokens. Without readers the whole answer is content."""
        self._reasoning, self._tools, self._counter = reasoning, tools, counter
        self._shows_reasoning = shows_reasoning
        answer = reasoning.answer if reasoning is not None else ("", "")
        self._wrapping = Wrapping(*answer) if any(answer) else None

    def push(self, text: str, token_ids: Iterable[int], finished: bool, cut: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reasoning is not None and not self._reasoning.over:
            if self._counter is not None:
                self._counter.add(token_ids)
            reasoning, text = self._reasoning.push(text, finished, cut)
            if reasoning and self._shows_reasoning:
                pieces.append(Reasoning(reasoning))
            if not (text or self._reasoning.over):
                return pieces
        if self._wrapping is not None:
            text = self._wrapping.push(text, finished)
        if self._tools is not None:
            return pieces + self._tools.push(text, finished, cut)
        if text:
            pieces.append(Content(text))
        return pieces

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def is_cut(self) -> bool:
        return self._tools is not None and self._tools.is_cut

    @property
    def is_plain(self) -> bool:
        return self._reasoning is None and self._tools is None

    @property
    def in_content(self) -> bool:
        in_reasoning = self._reasoning is not None and self._reasoning.found and not self._reasoning.over
        return not in_reasoning and not (self._tools is not None and self._tools.in_calls)

    @property
    def num_reasoning_tokens(self) -> int:
        if self._reasoning is None or self._counter is None or not self._reasoning.found:
            return 0
        return self._counter.num_tokens


class Wrapping:
    """Removes the marks around the content as it arrives."""

    def __init__(self, begin: str, end: str) -> None:
        self._marks = [mark for mark in (begin, end) if mark]
        self._held = ""

    def push(self, text: str, finished: bool) -> str:
        """Return the text that is certain, without marks."""
        text = self._held + text
        for mark in self._marks:
            text = text.replace(mark, "")
        kept = 0 if finished else max(begun(text, mark) for mark in self._marks)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


class TokenCounter:
    """Counts tokens until the text contains a marker."""

    def __init__(self, mark: str, token_text: Callable[[int], str]) -> None:
        self._mark, self._token_text = mark, token_text
        self._tail: str | None = ""  # end of the text so far; None: the marker was found
        self.num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._tail is None:
                return
            self.num_tokens += 1
            text = self._tail + self._token_text(token_id)
            self._tail = None if self._mark in text else text[-len(self._mark) :]
