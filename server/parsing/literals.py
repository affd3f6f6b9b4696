"""Arguments as literals of Python, JSON or a relative: `a="x", b=[1, True]` or `a:<|"|>x<|"|>,b:[1,true]`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from engine.core.params.structured import Literals

MAX_DEPTH = 100
_OPEN, _CLOSE = "([{", ")]}"
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)")
_KEY = re.compile(r"[^\s:=,\"'<>(){}\[\]]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


class LiteralScanner:
    """Finds the bracket that closes the arguments, outside of strings."""

    def __init__(self, quote: str) -> None:
        self._quotes = ('"', "'") if quote == '"' else (quote,)
        self._has_escapes = quote == '"'
        self._in: str | None = None  # the quote around the current string
        self._escaped = False
        self._depth = 0

    def feed(self, text: str) -> tuple[int, bool]:
        """Return the number of characters read, and whether the last of them closes the arguments."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            if self._in is not None:
                at, known = self._in_string(text, at)
                if not known:
                    return at, False
                continue
            found = next((each for each in self._quotes if text.startswith(each, at)), None)
            if found is not None:
                self._in, at = found, at + len(found)
            elif any(each.startswith(text[at:]) for each in self._quotes):
                return at, False
            else:
                char, at = text[at], at + 1
                self._depth += (char in _OPEN) - (char in _CLOSE)
                if self._depth < 0:
                    return at, True
        return at, False

    def _in_string(self, text: str, at: int) -> tuple[int, bool]:
        assert self._in is not None
        if text.startswith(self._in, at):
            end, self._in = at + len(self._in), None
            return end, True
        if self._in.startswith(text[at:]):
            return at, False
        self._escaped = self._has_escapes and text[at] == "\\"
        return at + 1, True


def parse_literals(text: str, syntax: Literals, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments; None if the text is something else. Arguments without a name have `names`, in order."""
    parser = _Parser(text, syntax)
    try:
        found = parser.arguments(names)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found


class _Parser:
    """A parser of literals by recursive descent. Raises `ValueError`."""

    def __init__(self, text: str, syntax: Literals) -> None:
        self._text, self._syntax, self._at = text, syntax, 0
        self._quotes = ('"', "'") if syntax.quote == '"' else (syntax.quote, '"')

    def arguments(self, names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        unnamed = list(names)
        while not self._is_over():
            key = self._key_of(self._syntax.assign)
            if key is None:
                if not unnamed:
                    raise ValueError("an argument without a name")
                key = unnamed.pop(0)
            elif key in unnamed:
                unnamed = unnamed[unnamed.index(key) + 1 :]
            found.setdefault(key, self._value(MAX_DEPTH))
            if not self._is_over() and not self._skip(","):
                raise ValueError("no separator")
        return found

    def _is_over(self) -> bool:
        self._space()
        return self._at == len(self._text)

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _skip(self, mark: str) -> bool:
        self._space()
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _key_of(self, assign: str) -> str | None:
        """Read a name and the mark after it, if they come next."""
        self._space()
        start = self._at
        if (quote := self._quote()) is not None:
            key = self._string(quote)
        elif found := _KEY.match(self._text, self._at):
            key, self._at = found[0], found.end()
        else:
            return None
        if self._skip(assign):
            return key
        self._at = start
        return None

    def _quote(self) -> str | None:
        return next((each for each in self._quotes if self._text.startswith(each, self._at)), None)

    def _value(self, depth: int) -> Any:
        self._space()
        if not depth:
            raise ValueError("nested too deeply")
        if (quote := self._quote()) is not None:
            return self._string(quote)
        if self._skip("{"):
            return self._object(depth - 1)
        for opening, closing in (("[", "]"), ("(", ")")):
            if self._skip(opening):
                return self._list(closing, depth - 1)
        if found := _NUMBER.match(self._text, self._at):
            self._at = found.end()
            return _number(found[0])
        found = _KEY.match(self._text, self._at)
        if found is None or (found[0] not in _WORDS and self._syntax.quote == '"'):
            raise ValueError("not a literal")
        self._at = found.end()
        return _WORDS.get(found[0], found[0])

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._skip("}"):
            key = self._key_of(":")
            if key is None:
                raise ValueError("no key")
            found[key] = self._value(depth)
            if not self._skip(",") and not self._text.startswith("}", self._at):
                raise ValueError("no separator")
        return found

    def _list(self, closing: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._skip(closing):
            found.append(self._value(depth))
            if not self._skip(",") and not self._text.startswith(closing, self._at):
                raise ValueError("no separator")
        return found

    def _string(self, quote: str) -> str:
        self._at += len(quote)
        if len(quote) > 1:
            text, found, _ = self._text[self._at :].partition(quote)
            if not found:
                raise ValueError("a string without an end")
            self._at += len(text) + len(quote)
            return text
        start = self._at
        while self._at < len(self._text) and self._text[self._at] != quote:
            self._at += 2 if self._text[self._at] == "\\" else 1
        if self._at >= len(self._text):
            raise ValueError("a string without an end")
        text = self._text[start : self._at]
        self._at += 1
        return _unescaped(text, quote)


def _number(text: str) -> int | float:
    text = text.replace("_", "")
    if text.lstrip("+-").isdigit():
        return int(text)
    most = sys.float_info.max
    return max(-most, min(float(text), most))


def _unescaped(text: str, quote: str) -> str:
    if "\\" not in text:
        return text
    if quote == '"':
        try:
            return str(json.loads(f'"{text}"', strict=False))
        except ValueError:
            pass
    out: list[str] = []
    at = 0
    while at < len(text):
        char, at = text[at], at + 1
        if char != "\\" or at == len(text):
            out.append(char)
            continue
        char, at = text[at], at + 1
        digits = text[at : at + _HEX.get(char, 0)]
        if char in _HEX and len(digits) == _HEX[char] and all(each in "0123456789abcdefABCDEF" for each in digits):
            out.append(chr(min(int(digits, 16), 0x10FFFF)))
            at += len(digits)
        else:
            out.append(_ESCAPES.get(char, char if char in "\\'\"/" else "\\" + char))
    return "".join(out)
