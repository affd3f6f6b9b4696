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
_START, _CHANNEL_MARK, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"  # the last one ends a header
_NEXT_MESSAGE = (_START, _CHANNEL_MARK)
_IN_BODY = (_MESSAGE, "<|constrain|>")  # out of place there, and left out
_MARKS = (*_NEXT_MESSAGE, *_IN_BODY, "<|end|>", *ENDS)
_BODY_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_HEADER_MARK = re.compile("|".join(map(re.escape, _NEXT_MESSAGE)))
_RECIPIENT = re.compile(r" to=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(r"(?:<\|channel\|>|^)(analysis|commentary|final)")
_MAX_HEADER = 1000  # characters; longer text is not a header
_BEGINNINGS = (_CHANNEL_MARK, _START, _FORMAT.begin.lstrip())  # a header starts with one of these
# A header without its first mark: `analysis<|message|>`.
_BARE_HEADERS = tuple(f"{channel}{_MESSAGE}" for channel in ("analysis", "commentary", "final"))


# Reasoning efforts that the format does not support, and the nearest supported ones.
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class HarmonyReader:
    """Divides one answer into pieces: analysis is reasoning, messages to functions are calls, the rest is content.

    If the client gave tools, a message to `functions.…` or to one of the tools is a call. Other messages with a
    recipient are reasoning. A message ends with `<|end|>` or where the next one begins. Text between messages is
    dropped, unless no message follows.
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
    def is_plain(self) -> bool:
        return False

    @property
    def in_content(self) -> bool:
        return self._kind is Content

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the analysis messages so far, including their headers."""
        return self._counter.num_tokens

    def push(self, text: str, token_ids: Iterable[int], finished: bool, cut: bool = False) -> list[Piece]:
        """Return the pieces now certain. `finished`: no text follows; `cut`: the answer was cut off, not ended."""
        self._held += text
        self._counter.add(token_ids)
        pieces: list[Piece] = []
        while self._read_header(pieces) if self._kind is None else self._read_body(pieces):
            pass
        if finished:
            self._finish(pieces, cut)
        return pieces

    def _read_header(self, pieces: list[Piece]) -> bool:
        """Parse a header; return False if more text is needed."""
        if self._is_first and self._held and not _may_be_header(self._held):
            self._is_first, self._kind = False, Content  # the model did not write harmony format
            return True
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            if len(header) > _MAX_HEADER:
                self._is_first, self._kind, self._held = False, Content, _without_marks(header)
                return True
            return False
        self._is_first, self._held = False, rest
        self._begin(header[max(header.rfind(_START), 0) :], pieces)  # what precedes is text between messages
        return True

    def _begin(self, header: str, pieces: list[Piece]) -> None:
        """Begin the message with this header."""
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

    def _read_body(self, pieces: list[Piece]) -> bool:
        found = _BODY_MARK.search(self._held)
        if found is None:
            end = len(self._held) - max(begun(self._held, mark) for mark in _MARKS)
            self._add(self._held[:end], pieces)
            self._held = self._held[end:]
            return False
        self._add(self._held[: found.start()], pieces)
        ends = found[0] not in _IN_BODY
        # The next header begins with the mark, unless that only ends this message.
        self._held = self._held[found.start() if found[0] in _NEXT_MESSAGE else found.end() :]
        self._kind = None if ends else self._kind
        return True

    def _add(self, text: str, pieces: list[Piece]) -> None:
        if text and self._kind is CallStart:
            self._arguments.append(text)
            pieces.append(CallArguments(self.num_calls - 1, text))
        elif text and self._kind is Content:
            pieces.append(Content(text))
        elif text and self._shows_reasoning:
            pieces.append(Reasoning(text))

    def _finish(self, pieces: list[Piece], cut: bool) -> None:
        """Release held text: of a message, or after the last one."""
        held, self._held = self._held, ""
        if self._kind is not None:
            if not (cut and len(held) > 1):  # else the start of a mark
                self._add(held, pieces)
            if self._kind is CallStart:
                self.is_cut = cut or json_object("".join(self._arguments)) is None
            return
        is_header = _HEADER_MARK.search(held) is not None or any(
            begun(held, mark) > 1 for mark in (_START, _CHANNEL_MARK)
        )
        if is_header or (cut and self._is_first):
            self.is_cut = _FORMAT.begin in held
        elif held.strip():
            pieces.append(Content(_without_marks(held)))


def _may_be_header(text: str) -> bool:
    """Return whether an answer's first text is a header, or may become one."""
    lead = text.lstrip()
    return any(lead.startswith(each[: len(lead)]) for each in (*_BEGINNINGS, *_BARE_HEADERS))


def _without_marks(text: str) -> str:
    return re.sub("|".join(map(re.escape, _MARKS)), "", text)


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
