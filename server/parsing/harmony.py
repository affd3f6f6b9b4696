"""gpt-oss's harmony format: an answer is a series of messages with a channel and an optional recipient in the header.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}

The prompt ends with `<|start|>assistant`. A special token ends the answer.
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from server.parsing.formats import TOOL_FORMATS
from server.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning, begun, json_object
from server.parsing.reasoning import HARMONY

ENDS = ("<|return|>", "<|call|>")  # tokens that end an answer
_FORMAT = TOOL_FORMATS["openai"]
_NEXT = "<|end|><|start|>assistant"  # separates messages
_MESSAGE = "<|message|>"  # ends a header
_RECIPIENT = re.compile(r" to=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_MAX_HEADER = 1000  # characters; longer text is not a header
_BEGINNINGS = ("<|channel|>", "<|start|>", _FORMAT.begin)  # a header starts with one of these


# Reasoning efforts that the format does not support, and the nearest supported ones.
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class HarmonyReader:
    """Divides one answer into pieces: analysis is reasoning, messages to functions are calls, the rest is content.

    If the client gave tools, a message to `functions.…` or to one of the tools is a call. Other messages with a
    recipient are reasoning.
    """

    def __init__(
        self,
        names: Collection[str],
        token_text: Callable[[int], str],
        *,
        continued: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        """`names`: the client's tools. `continued`: the prompt ends inside the content."""
        self._names, self._shows_reasoning = names, shows_reasoning
        self._held = ""  # text not parsed yet
        self._kind: type[Content] | type[Reasoning] | type[CallStart] | None = Content if continued else None
        self._is_first = True
        self._arguments: list[str] = []  # of the current call
        self._counter = _Counter(token_text, not continued)
        self.num_calls = 0
        self.is_cut = False  # the answer ended inside a call

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def in_content(self) -> bool:
        return self._kind is Content

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the analysis messages so far, including their headers."""
        return self._counter.num_tokens

    def push(self, text: str, token_ids: Iterable[int], finished: bool, cut: bool = False) -> list[Piece]:
        """Return the pieces now certain. `finished`: no text follows; `cut`: the answer was cut off, not ended."""
        self._held += text
        self._counter.add(token_ids)
        pieces: list[Piece] = []
        while self._read_header(pieces, finished) if self._kind is None else self._read_body(pieces, finished):
            pass
        if finished and self._kind is CallStart:
            self.is_cut = cut or json_object("".join(self._arguments)) is None
        return pieces

    def _read_header(self, pieces: list[Piece], finished: bool) -> bool:
        """Parse a header; return False if more text is needed."""
        if self._is_first and self._held and not any(map(self._may_begin_with, _BEGINNINGS)):
            self._kind = Content  # the model did not write harmony format
            return True
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            if len(header) > _MAX_HEADER:
                self._is_first, self._kind = False, Content
                return True
            self.is_cut = finished and _FORMAT.begin in header
            return False
        self._is_first, self._held = False, rest
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        if name and (f"functions.{name}" in header or name in self._names) and self._names:
            pieces.append(CallStart(self.num_calls, _FORMAT.new_id(), name))
            self.num_calls += 1
            self._kind, self._arguments = CallStart, []
        elif name or (channel is not None and channel[1] == "analysis"):
            self._kind = Reasoning
        else:
            self._kind = Content
        return True

    def _may_begin_with(self, beginning: str) -> bool:
        return self._held.startswith(beginning[: len(self._held)])

    def _read_body(self, pieces: list[Piece], finished: bool) -> bool:
        body, mark, rest = self._held.partition(_NEXT)
        kind = self._kind
        if mark:
            self._held, self._kind = rest, None
        elif finished:
            body, self._held = body.removesuffix("<|end|>"), ""
        else:
            body = body[: len(body) - begun(body, _NEXT)]
            self._held = self._held[len(body) :]
        if body and kind is CallStart:
            self._arguments.append(body)
            pieces.append(CallArguments(self.num_calls - 1, body))
        elif body and kind is Content:
            pieces.append(Content(body))
        elif body and self._shows_reasoning:
            pieces.append(Reasoning(body))
        return bool(mark)


class _Counter:
    """Counts the tokens of analysis messages."""

    def __init__(self, token_text: Callable[[int], str], in_header: bool) -> None:
        self._token_text = token_text
        self._in_header = in_header
        self._text = ""  # the header so far, or the end of the body
        self._num_header = 0
        self._counts = False  # inside an analysis message
        self.num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._text += self._token_text(token_id)
            if self._in_header:
                self._num_header += 1
                if self._text.endswith(_MESSAGE):
                    self._counts = self._text.endswith(HARMONY.begin)
                    self.num_tokens += self._num_header * self._counts
                    self._in_header, self._text = False, ""
            else:
                self.num_tokens += self._counts
                if self._text.endswith(HARMONY.end):
                    self._in_header, self._num_header = True, 0
            self._text = self._text[-200:]
