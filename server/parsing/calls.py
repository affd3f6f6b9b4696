"""Incremental parsers of one tool call: a JSON object, parameters between marks, or literals.

Each has a `name`, None until it is known, consumes text with `feed` until it is `over`, and returns the new part of its
arguments, as JSON, from `take_arguments`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Protocol

import pydantic_core

from engine.core.params.structured import Literals, Parameters
from engine.structured.kinds import ALL_KINDS, Schema, property_kinds
from server.parsing.literals import LiteralScanner, parse_literals
from server.parsing.patterns import slotted
from server.parsing.pieces import begun
from server.parsing.typed import as_json, dumped, is_complete

MAX_HEAD = 2000  # characters before the arguments; bounds repeated matching
_SPACE = r"[ \t\r\n]*"
_STRING = r'[^"\\]*'
_NAME_KEY, _ARGUMENTS_KEY = '"(?:tool_name|name)"', '"(?:arguments|parameters)"'


class Call(Protocol):
    """A call that is being parsed."""

    name: str | None
    begun: bool  # set by the reader after emitting `CallStart`
    over: bool  # the call is complete, or is not a call

    def feed(self, text: str, finished: bool) -> int:
        """Parse `text`; return the number of characters consumed. 0 if more text is needed. `finished`: no text
        follows.
        """

    def take_arguments(self) -> str:
        """Return the new part of the arguments."""

    def close(self) -> bool:
        """End a call after which no text follows; return whether it is complete without its end marks."""

    @property
    def partial_name(self) -> str:
        """The tool's name if the text so far contains it whole, otherwise empty."""


def head(name: str) -> str:
    """Return a regular expression for a call's object up to its arguments. `name`: one for the tool's name."""
    other = f'(?:"(?:id|type|tool_call_id)"{_SPACE}:{_SPACE}"{_STRING}"{_SPACE},{_SPACE})*'
    key = f"{_ARGUMENTS_KEY}{_SPACE}:"
    return rf'\{{{_SPACE}{other}{_NAME_KEY}{_SPACE}:{_SPACE}"{name}"{_SPACE},{_SPACE}{other}{key}'


_HEAD = re.compile(head(f"({_STRING})") + _SPACE)
_MAX_ENDS = 64  # marks that may be part of a value
_FIRST_CHARS = 100  # within which an object has its first key
_FIRST_KEYS = ('"name"', '"tool_name"', '"id"', '"tool_call_id"', '"type"', '"arguments"', '"parameters"')


class ObjectCall:
    """Parses `{"name": …, "arguments": {…}}` and returns the arguments as they arrive, if the name precedes them.

    With `whole`, an object in another order is returned once it is complete. With `name`, the object consists of the
    arguments only.
    """

    def __init__(self, name: str | None = None, whole: bool = True) -> None:
        self._given, self._whole = name, whole
        self.name: str | None = None
        self.begun = False
        self.over = False
        self._chars: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._start: int | None = None  # index of the arguments' start
        self._stop: int | None = None  # index of their end
        self._num_taken = 0

    def feed(self, text: str, finished: bool) -> int:
        num_before = len(self._chars)
        for char in text:
            self._read(char)
            if self.name is None and len(self._chars) <= _FIRST_CHARS and not self._may_be_call():
                self.over = True
            if self.over:
                break
        num_read = len(self._chars) - num_before
        if self.over and self.name is None and self._whole:
            self._read_whole()
        return num_read

    def take_arguments(self) -> str:
        if self._start is None:
            return ""
        taken = "".join(self._chars[self._start + self._num_taken : self._stop])
        self._num_taken += len(taken)
        return taken

    def close(self) -> bool:
        return False

    @property
    def partial_name(self) -> str:
        if self.name is not None or self._given is not None:
            return self.name or self._given or ""
        try:
            found = pydantic_core.from_json("".join(self._chars), allow_partial=True)
        except ValueError:
            return ""
        name = found.get("name", found.get("tool_name")) if isinstance(found, dict) else None
        return name if isinstance(name, str) else ""

    def _read(self, char: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            if char == "{" and self._start is None:
                self._find_arguments()
        elif char in "}]":
            self._depth -= 1
            if self._depth == (0 if self._given else 1) and self._start is not None and self._stop is None:
                self._stop = len(self._chars) + 1
            self.over = self._depth <= 0
        elif self._depth == 0 and not char.isspace():
            self.over = True
        self._chars.append(char)

    def _find_arguments(self) -> None:
        """Check whether the current opening bracket starts the arguments."""
        if self._given is not None:
            self.name, self._start = self._given, len(self._chars)
        elif self._depth != 2 or len(self._chars) > MAX_HEAD:
            return
        elif found := _HEAD.fullmatch("".join(self._chars).lstrip()):
            self.name, self._start = found[1], len(self._chars)

    def _may_be_call(self) -> bool:
        text = "".join(self._chars[:_FIRST_CHARS]).lstrip()[1:].lstrip() if self._given is None else ""
        return not text or any(key.startswith(text[: len(key)]) for key in _FIRST_KEYS)

    def _read_whole(self) -> None:
        try:
            call = json.loads("".join(self._chars), strict=False)
            dumped(call).encode()  # JSON responses cannot contain a lone surrogate
        except (ValueError, RecursionError):
            return
        name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
        if not isinstance(name, str):
            return
        arguments = call.get("arguments", call.get("parameters")) or {}
        self.name, self._start, self._stop = name, 0, None
        self._chars = [arguments if isinstance(arguments, str) else dumped(arguments)]


class _Arguments:
    """Collects arguments as the text of a JSON object."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.begun = self.over = False
        self._new: list[str] = []  # not taken yet
        self._keys: set[str] = set()

    def close(self) -> bool:
        return False

    def take_arguments(self) -> str:
        taken = "".join(self._new)
        self._new.clear()
        return taken

    @property
    def partial_name(self) -> str:
        return self.name or ""

    def _add_key(self, key: str) -> bool:
        """Begin an argument; return False if there is one with this name already."""
        if key in self._keys:
            return False
        self._new.append(f"{', ' if self._keys else '{'}{dumped(key)}: ")
        self._keys.add(key)
        return True

    def _end(self) -> None:
        self._new.append("}" if self._keys else "{}")
        self.over = True


class ParametersCall(_Arguments):
    """Parses parameters between marks. Strings are returned as they arrive, other values once they are complete."""

    def __init__(self, name: str, syntax: Parameters, schema: Schema | None, followers: Collection[str]) -> None:
        """`schema`: of the arguments; None: unknown. `followers`: marks that may stand after the last parameter."""
        super().__init__(name)
        self._schema = schema
        self._key = slotted(syntax.key, "(?P<key>(?s:.){1,256}?)", syntax.value)
        self._kinds, self._first = dict(syntax.kinds), syntax.key.strip()
        self._leads, self._trails = syntax.value.endswith("\n"), syntax.end.startswith("\n")
        self._mark = self._end_mark = syntax.end.strip()
        self._wrapping = syntax.wrapping
        self._followers = (self._first, *followers)
        self._value: frozenset[str] | None = None  # the allowed types of the value being read; None: between values
        self._counts = True  # the value's name is new
        self._parts: list[str] = []  # of a value returned once it is complete
        self._is_first = False  # nothing of the value is read yet
        self._pending: int | None = None  # where the value may end
        self._num_searched = 0  # characters of the text, without a certain end
        self._num_doubtful = 0  # marks that may be part of the value

    def feed(self, text: str, finished: bool) -> int:
        if self._value is not None:
            return self._read_value(text, finished)
        bare = text.lstrip()
        if not bare or (self._first.startswith(bare) and bare != self._first):
            return len(text) - len(bare)
        found = self._key.match(bare) if bare.startswith(self._first) else None
        if found is None:
            if bare.startswith(self._first) and len(bare) < MAX_HEAD:
                return 0
            self._end()
            return len(text) - len(bare)
        self._begin_value(found)
        return len(text) - len(bare) + self._skipped(bare, found)

    def close(self) -> bool:
        if self._value is not None or not self._keys:
            return False
        self._end()
        return True

    def _skipped(self, text: str, found: re.Match[str]) -> int:
        """Return the length of the mark before a value. White space after it belongs to the value."""
        return len(text[: found.end()].rstrip()) if self._leads else found.end()

    def _begin_value(self, found: re.Match[str]) -> None:
        key = found["key"].strip()
        kinds = property_kinds(key, self._schema)
        if self._kinds:
            written = found["kind"]
            named = {each for each, text in self._kinds.items() if text == written}
            kinds = frozenset({"string"}) if "string" in named else kinds - {"string"} or kinds
        self._counts, self._value, self._is_first = self._add_key(key), kinds, True
        self._parts = []
        self._pending, self._num_searched, self._num_doubtful = None, 0, 0
        if self._counts and self._streams:
            self._new.append('"')

    @property
    def _streams(self) -> bool:
        return self._value == frozenset({"string"})

    def _read_value(self, text: str, finished: bool) -> int:
        if self._is_first and self._leads:
            if text == "\r" and not finished:
                return 0
            self._is_first = False
            if text.startswith(("\n", "\r\n")):
                return 2 if text[0] == "\r" else 1
        if self._is_first and self._wrapping[0]:
            if text != self._wrapping[0] and self._wrapping[0].startswith(text) and not finished:
                return 0
            self._is_first = False
            if text.startswith(self._wrapping[0]):
                self._begin_wrapped()
                return len(self._wrapping[0])
        end = self._find_end(text, finished)
        if end is None:
            keep = len(text) - begun(text, self._mark)
            if self._pending is not None:
                keep = min(keep, self._pending)
            while keep and self._trails and text[keep - 1] in "\r\n":
                keep -= 1
            self._add(text[:keep])
            self._num_searched = max(self._num_searched - keep, 0)
            return keep
        value = text[:end]
        if self._trails and value.endswith("\n"):
            value = value[:-1].removesuffix("\r")
        self._add(value)
        num_read = end + len(self._mark)
        self._end_value()
        return num_read

    def _begin_wrapped(self) -> None:
        """Begin a value that ends in another mark, and is a text wherever the schema allows one."""
        self._mark = self._wrapping[1] + self._end_mark
        if "string" in (self._value or ()) and not self._streams:
            self._value = frozenset({"string"})
            if self._counts:
                self._new.append('"')

    def _find_end(self, text: str, finished: bool) -> int | None:
        """Return where the value ends, if that is certain. A mark inside a value is followed by none that may
        follow it.
        """
        # A mark that may be part of a string inside JSON stays in the text: if nothing completes the JSON, it was the
        # end.
        doubtful = text.find(self._mark) if self._num_searched else None
        self._pending = doubtful
        at = text.find(self._mark, self._num_searched)
        while at >= 0:
            rest = text[at + len(self._mark) :].lstrip()
            may_follow = any(each.startswith(rest) for each in self._followers)  # so does nothing
            if any(rest.startswith(each) for each in self._followers) or (may_follow and finished):
                if not self._is_written_as_json(text) or is_complete("".join(self._parts) + text[:at]):
                    return at
                doubtful = at if doubtful is None else doubtful
                self._pending, self._num_searched = doubtful, at + 1
                self._num_doubtful += 1
                if self._num_doubtful == _MAX_ENDS:
                    return doubtful
            elif may_follow:
                self._pending = at if doubtful is None else doubtful
                return None
            at = text.find(self._mark, at + 1)
        return doubtful if finished else None

    def _is_written_as_json(self, text: str) -> bool:
        start = "".join((*self._parts, text)).lstrip()[:1]
        return self._value != ALL_KINDS and not self._streams and start in ("{", "[", '"')

    def _add(self, text: str) -> None:
        if self._streams and self._counts:
            self._new.append(dumped(text)[1:-1])
        else:
            self._parts.append(text)

    def _end_value(self) -> None:
        kinds = self._value
        assert kinds is not None
        if self._counts:
            self._new.append('"' if self._streams else as_json("".join(self._parts), kinds))
        self._value, self._mark = None, self._end_mark


class LiteralsCall(_Arguments):
    """Parses `name=value, …` up to the closing bracket. The arguments are returned once they are complete."""

    def __init__(self, name: str, syntax: Literals, schema: Schema | None) -> None:
        super().__init__(name)
        self.name = None
        self._given, self._syntax, self._schema = name, syntax, schema
        self._scanner = LiteralScanner(syntax.quote)
        self._text: list[str] = []

    @property
    def partial_name(self) -> str:
        return self._given

    def feed(self, text: str, finished: bool) -> int:
        num_read, closed = self._scanner.feed(text)
        self._text.append(text[:num_read])
        if closed:
            self._read_whole("".join(self._text)[:-1])
            self.over = True
        return num_read

    def _read_whole(self, text: str) -> None:
        properties = self._schema.get("properties") if self._schema is not None else None
        names = list(properties) if isinstance(properties, Mapping) else []
        found = parse_literals(text, self._syntax, names)
        if found is None:
            return
        self.name = self._given
        for key, value in found.items():
            self._add_key(key)
            self._new.append(dumped(value))
        self._end()
