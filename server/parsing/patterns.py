"""Literal texts with slots, recognised while they arrive and with any white space."""

from __future__ import annotations

import re

NAME = r"[^\s\"\\<>{}\[\]]"  # a character of a tool's name
_SLOTS = {"{id}": r"[^\s\"<>\[\]]*", "{index}": r"\d{1,6}", "{kind}": r"(?P<kind>\w*)"}
_PIECES = re.compile(r"\{id\}|\{index\}|\{kind\}|\s+|.", re.DOTALL)


class Pattern:
    """A text that may be white space more or less than written, where a text has white space or begins or ends."""

    def __init__(self, *atoms: str) -> None:
        """`atoms`: regular expressions, one after another. Any prefix of this sequence may be all that has arrived."""
        self._whole = re.compile("".join(atoms))
        prefix = ""
        for atom in reversed(atoms):
            prefix = f"(?:{atom}{prefix})?"
        self._prefix = re.compile(prefix)

    def match(self, text: str) -> re.Match[str] | None:
        """Match the start of a text."""
        return self._whole.match(text)

    def may_match(self, text: str) -> bool:
        """Return whether more text may make this text a match."""
        return self._prefix.fullmatch(text) is not None


def atoms(literal: str) -> list[str]:
    """Return the atoms of a text, with its slots."""
    return [
        _SLOTS[each] if each in _SLOTS else r"\s*" if each.isspace() else re.escape(each)
        for each in _PIECES.findall(literal)
    ]


def slotted(*parts: str) -> Pattern:
    """Return a pattern of these parts; a part that begins with `(?P<` is an expression."""
    found: list[str] = []
    for part in parts:
        found += [part] if part.startswith("(?P<") else atoms(part)
    return Pattern(*found)
