"""The pieces of an answer as they arrive: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Content:
    """Visible answer text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the last call: JSON text as the model wrote it."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Block:
    """Consecutive pieces of one kind: `Content`, `Reasoning`, or `CallStart` for a whole call."""

    kind: type[Content] | type[Reasoning] | type[CallStart]
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the call's arguments."""
        return "".join(self.parts)


class Blocks:
    """The blocks of an answer, in order."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, piece: Piece) -> bool:
        """Append a piece; return whether it starts a new block."""
        match piece:
            case CallStart(_, call_id, name):
                self.all.append(Block(CallStart, call_id, name))
                return True
            case CallArguments(_, text):
                self.all[-1].parts.append(text)
                return False
        begins = not self.all or self.all[-1].kind is not type(piece)
        if begins:
            self.all.append(Block(type(piece)))
        self.all[-1].parts.append(piece.text)
        return begins

    def extend(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.add(piece)

    def text(self, kind: type[Content] | type[Reasoning]) -> str:
        """Return the joined text of all blocks of one kind."""
        return "".join(block.text for block in self.all if block.kind is kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.all if block.kind is CallStart]


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a call's arguments; None if they are not a valid JSON object."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def begun(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the start of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
