"""What an answer consists of: content, reasoning and tool calls, in the pieces in which they arrive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last: JSON, as the model wrote it."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Block:
    """A run of pieces that belong together: `kind` is `Content`, `Reasoning`, or `CallStart` for a whole call."""

    kind: type[Content] | type[Reasoning] | type[CallStart]
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the call's arguments."""
        return "".join(self.parts)


class Blocks:
    """An answer's blocks, in the order in which the model wrote them."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, piece: Piece) -> bool:
        """Append a piece; true when a new block begins with it."""
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
        """All text of one kind."""
        return "".join(block.text for block in self.all if block.kind is kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.all if block.kind is CallStart]


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a model wrote as the arguments of a call; None: it is none, or no JSON that an answer could hold."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
