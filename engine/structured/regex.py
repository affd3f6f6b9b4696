"""Translates regular expressions (Python, JavaScript) to the dialect of the grammar library. Executes none.

Where dialects differ, the result matches only what all of them match: `\\d` is 0 to 9, and `\\D` excludes the digits of
all scripts. So generated text passes a check in any dialect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_LENGTH = 20_000
MAX_POSITIONS = 20_000  # with counted repetitions expanded: they determine a matcher's size

_CLASSES = {  # (narrow, wide), as members of a character class
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"\p{L}\p{M}\p{N}\p{Pc}"),
    "s": (r" \t\n\r\f\v", r"\s\x1c-\x1f\x{feff}"),
}
_ANCHORS = {r"\A": "^", r"\Z": "$", r"\z": "$"}
_COUNT = re.compile(r"\{(\d{1,9})?(,)?(\d{1,9})?\}")
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[a-zA-Z]*(?:-[a-zA-Z]+)?[:)]))?")
_WIDE_CLASS = re.compile(r"\[(?:\^|.*\\(?:x\{?0|u000|0))")  # may have all control characters
_BRACED = re.compile(r"\\[pPux]\{\w*\}")


def portable(pattern: str, in_json: bool = False) -> str:
    """Return `pattern` for the library. Raises `ValueError` for unsupported constructs; the library reports syntax
    errors.

    `in_json`: for a string in JSON. There, a character class of the library that has all control characters has `"` and
    `\\` too, even if it excludes them. So U+0001 is left out of the classes that may be such.
    """
    return read(pattern, in_json)[0]


def read(pattern: str, in_json: bool = False) -> tuple[str, int]:
    """Return `pattern` for the library, and its number of positions. Raises `ValueError` like `portable`."""
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"a regular expression may have at most {MAX_LENGTH} characters, this one has {len(pattern)}")
    out: list[str] = []
    positions = Positions()
    for piece, kind, times in pieces(pattern):
        out.append(rf"[{piece}--\x{{1}}]" if in_json and _WIDE_CLASS.match(piece) else piece)
        if kind == "atom":
            positions.atom(1)
        elif kind == "open":
            positions.open()
        elif kind == "close":
            positions.close()
        elif kind == "count":
            positions.repeat(times)
        if positions.total > MAX_POSITIONS:
            raise ValueError(
                f"a regular expression may have at most {MAX_POSITIONS} positions, repetitions written out"
            )
    return "".join(out), max(positions.total, 1)


def end_of_group(pattern: str, at: int) -> int | None:
    """Return the end of the group that opens at `at`; None: it is unclosed, or an alternative to the whole pattern
    follows.
    """
    level, end = 0, None
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "[":
                at = _class(pattern, at)[1] - 1
            case "(":
                level += 1
            case ")":
                level -= 1
                end = at + 1 if end is None and not level else end
            case "|" if end is not None and not level:
                return None
        at += 1
    return end


@dataclass(slots=True)
class Positions:
    """Counts the positions of an expression from left to right, with repetitions expanded."""

    total: int = 0  # in the innermost open group
    _last: int = 0  # in the last atom or group
    _open: list[int] = field(default_factory=list)  # positions before each open group, in its parent

    def atom(self, size: int) -> None:
        self._last = size
        self.total += size

    def open(self) -> None:
        self._open.append(self.total)
        self.total = self._last = 0

    def close(self) -> None:
        if self._open:
            self._last = max(self.total, 1)
            self.total = self._open.pop() + self._last

    def repeat(self, times: int) -> None:
        """Repeat the last atom or group at most `times` times."""
        self.total += self._last * max(times - 1, 0)
        self._last *= max(times, 1)


def pieces(pattern: str) -> Iterator[tuple[str, str, int]]:
    """Yield parts: text for the library, kind, and the maximum repetitions of the preceding part."""
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if pattern[at : at + 2] in _ANCHORS:
            yield _ANCHORS[pattern[at : at + 2]], "sign", 1
            at += 2
        elif char == "\\":
            piece, at = _escape(pattern, at, in_class=False, negated=False)
            yield piece, "atom", 1
        elif char == "[":
            piece, at = _class(pattern, at)
            yield piece, "atom", 1
        elif char == "(":
            if _LOOKAROUND.match(pattern, at):
                raise ValueError("look-ahead and look-behind are not supported")
            piece = match[0] if (match := _GROUP.match(pattern, at)) else "("
            at += len(piece)
            yield piece, "flags" if piece.endswith(")") else "open", 1
        elif char == "{" and (match := _COUNT.match(pattern, at)) and (match[1] or match[3]):
            at = match.end()
            yield f"{{{match[1] or 0}{match[2] or ''}{match[3] or ''}}}", "count", int(match[3] or match[1])
        else:
            at += 1
            kind = "close" if char == ")" else "sign" if char in "*+?|^$" else "atom"
            yield char if kind != "atom" else _literal(char), kind, 1


def _literal(char: str) -> str:
    if char in "{}":
        return "\\" + char
    return char if char.isprintable() else rf"\x{{{ord(char):x}}}"


def _escape(pattern: str, at: int, in_class: bool, negated: bool) -> tuple[str, int]:
    """Return the escape sequence at `at`, and its end."""
    if match := _BRACED.match(pattern, at):
        return match[0], match.end()
    char = pattern[at + 1 : at + 2]
    if char.lower() not in _CLASSES:
        literal = char in "<>" or not char.isprintable()  # which have a special meaning in the library
        return _literal(char) if literal else "\\" + char, at + 2
    narrow, wide = _CLASSES[char.lower()]
    if char.isupper():
        return f"[^{narrow if negated else wide}]", at + 2
    members = wide if negated else narrow
    return members if in_class else f"[{members}]", at + 2


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Return the character class at `at`, and its end. In it, `[`, `&&`, `--` and `~~` are literal."""
    negated = pattern.startswith("^", at + 1)
    out = ["[^" if negated else "["]
    start = at = at + len(out[0])
    while at < len(pattern) and (pattern[at] != "]" or at == start):
        char = pattern[at]
        if char == "\\":
            piece, at = _escape(pattern, at, in_class=True, negated=negated)
        else:
            special = char in "[]&~" or (char == "-" and pattern.startswith("-", at + 1))
            piece, at = "\\" + char if special else _literal(char), at + 1
        out.append(piece)
    return "".join(out) + pattern[at : at + 1], at + 1
