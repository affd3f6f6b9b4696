"""Tool call formats of model families, and an incremental parser for them.

A call consists of the tool's name and a JSON object of arguments. The text around them differs:

    hermes       <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>           Hermes, Qwen
    llama3_json  {"name": "f", "parameters": {…}}, perhaps after <|python_tag|>        Llama 3.1, 3.2, 3.3
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]                      Mistral
    mistral_args [TOOL_CALLS]f[ARGS]{…}                                               newer Mistral
    openai       <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}  gpt-oss: see harmony.py
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core

from engine.core.params.structured import Tag, Tags
from server.parsing.pieces import CallArguments, CallStart, Content, Piece, begun


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model family writes tool calls."""

    name: str
    signs: tuple[str, ...]  # the family's chat templates contain one of these
    foreign: tuple[str, ...]  # and none of these
    begin: str  # marker before one call, or before several calls
    end: str = ""  # marker after each call
    written: tuple[str, str, str] = ("", "", "")  # text before a call's name, before its arguments, and after them
    opening: str = ""  # text between the marker and the first call
    separator: str = ""  # text between calls
    closing: str = ""  # text after the last call
    bare: bool = False  # an answer that is only the JSON object is a call, without a marker
    between: str = ""  # characters allowed between calls, besides white space
    headed: bool = False  # the name may precede the object, which then holds the arguments
    short_ids: bool = False  # the chat template requires ids of nine letters and digits

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_MISTRAL: dict[str, Any] = {"headed": True, "between": "[,]", "short_ids": True}
TOOL_FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            "hermes",
            ("<tool_call>",),
            ("<function=", "<arg_key>"),
            "<tool_call>",
            "</tool_call>",
            written=('\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
            separator="\n<tool_call>",
        ),
        ToolFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            ("[ARGS]",),
            "[TOOL_CALLS]",
            written=('{"name": "', '", "arguments": ', "}"),
            opening="[",
            separator=", ",
            closing="]",
            **_MISTRAL,
        ),
        ToolFormat(
            "mistral_args",
            ("[ARGS]",),
            (),
            "[TOOL_CALLS]",
            written=("", "[ARGS]", ""),
            separator="[TOOL_CALLS]",
            **_MISTRAL,
        ),
        ToolFormat(
            "llama3_json",
            ("<|python_tag|>", '"parameters": dictionary of argument name'),
            (),
            "<|python_tag|>",
            written=('{"name": "', '", "parameters": ', "}"),
            separator="; ",
            bare=True,
            between=",;",
        ),
        ToolFormat("openai", ("<|channel|>commentary",), (), " to=functions."),
    )
}


def find_tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the format with this name; for "auto", the one that the chat template uses, or None."""
    if name != "auto":
        return TOOL_FORMATS.get(name)
    for each in TOOL_FORMATS.values():
        if any(sign in template for sign in each.signs) and not any(sign in template for sign in each.foreign):
            return each
    return None


def call_tags(
    format: ToolFormat, tools: Sequence[tuple[str, dict[str, Any]]], *, required: bool, several: bool
) -> Tags:
    """Return tags that guide the answer: every call names one of `tools` and follows its JSON schema."""
    before, between, after = format.written
    return Tags(
        trigger=format.begin,
        opening=format.opening,
        tags=[
            Tag(
                begin=before + name + between,
                schema=schema,
                end=after,
                head=_head(re.escape(name)) if format.bare else None,
            )
            for name, schema in tools
        ],
        between=format.separator,
        closing=format.closing,
        several=several,
        required=required,
    )


class ToolReader:
    """Splits one answer into content and calls as it arrives.

    Text that starts like a call but is not one remains content. White space around calls is dropped. A call that is
    cut off is returned as far as it goes. Text around calls is never content.
    """

    def __init__(
        self, format: ToolFormat, names: Collection[str], max_calls: int | None, *, required: bool = False
    ) -> None:
        """`names`: the available tools. Calls beyond the first `max_calls` are dropped. `required`: a grammar guides
        the answer to consist of calls.
        """
        self._format, self._names, self._max_calls = format, names, max_calls
        self._least_mark = 1 if required else 2  # characters; a shorter marker that ends a cut answer is content
        self._held = ""  # text not parsed yet
        self._raw = ""  # parsed text that becomes content if it is not a call
        self._object: _CallObject | None = None  # the current call
        self._in_calls = False  # after a marker: a call is expected
        self._may_be_bare = format.bare
        self.num_calls = 0
        self.is_cut = False  # the answer ended inside a call

    def push(self, text: str, finished: bool, cut: bool = False) -> list[Piece]:
        """Return the pieces now certain. `finished`: no text follows; `cut`: the answer was cut off, not ended."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        if finished:
            self._finish(pieces, cut)
        return [piece for piece in pieces if self._counts(piece)]

    def _finish(self, pieces: list[Piece], cut: bool) -> None:
        """Release held text as content, unless it is the start of a call."""
        call, marked, rest = self._object, bool(self._raw), self._raw + self._held
        self._raw = self._held = ""
        if call is not None:
            is_tool = call.partial_name in self._names
            self.is_cut = call.begun or self._in_calls or is_tool
            if not call.begun and is_tool:
                pieces.append(self._start(call.partial_name))
            elif not self.is_cut:
                pieces.append(Content(rest))
        elif self._in_calls:
            self.is_cut = marked
        elif not (cut and len(mark := rest.lstrip()) >= self._least_mark and self._format.begin.startswith(mark)):
            pieces.append(Content(rest))

    def _counts(self, piece: Piece) -> bool:
        if isinstance(piece, Content):
            return bool(piece.text)
        return self._max_calls is None or piece.index < self._max_calls  # type: ignore[union-attr]

    def _step(self, pieces: list[Piece]) -> bool:
        """Parse one step; return False if more text is needed."""
        if not self._held:
            return False
        if self._object is not None:
            return self._read_call(self._object, pieces)
        if self._in_calls:
            return self._read_between(pieces)
        return self._read_content(pieces)

    def _read_content(self, pieces: list[Piece]) -> bool:
        if self._may_be_bare:
            text = self._held.lstrip(" \t\r\n")
            if not text:
                return False
            self._may_be_bare = False
            if text.startswith("{"):
                self._raw, self._held = self._held[: -len(text)], text
                self._object = _CallObject(whole=False)
                return True
        before, mark, rest = self._held.partition(self._format.begin)
        if mark:
            pieces.append(Content(before.rstrip()))
            self._raw, self._held = before[len(before.rstrip()) :] + mark, rest
            self._in_calls = True
            return True
        certain = before[: len(before) - begun(before, self._format.begin)].rstrip()
        pieces.append(Content(certain))
        self._held = before[len(certain) :]
        return False

    def _read_between(self, pieces: list[Piece]) -> bool:
        text = self._held.lstrip()
        self._raw += self._held[: len(self._held) - len(text)] if self._raw else ""
        self._held = text
        for mark in filter(None, (self._format.end, self._format.begin)):
            if text.startswith(mark) and not (self._raw and mark == self._format.end):
                self._raw += mark if mark == self._format.begin else ""
                self._held = text.removeprefix(mark)
                return True
            if text and mark.startswith(text):
                return False
        if not text:
            return False
        if text[0] in self._format.between:
            self._raw += text[0] if self._raw else ""
            self._held = text[1:]
        elif text[0] == "{":
            self._object = _CallObject()
        elif self._format.headed and (header := _HEADER.match(text, 0, _MAX_HEAD)):
            if header.end() == len(text):
                return False
            self._raw, self._held = self._raw + header[0], text[header.end() :]
            self._object = _CallObject(header[1])
        else:
            self._give_up(pieces)
        return True

    def _read_call(self, call: _CallObject, pieces: list[Piece]) -> bool:
        end = call.feed(self._held)
        read, self._held = self._held[:end], self._held[end:]
        if not call.begun:
            self._raw += read
            if call.name is None or (self._format.bare and call.name not in self._names):
                if call.over or call.name is not None:
                    self._give_up(pieces)
                return True
            call.begun, self._raw = True, ""
            pieces.append(self._start(call.name))
        if arguments := call.take_arguments():
            pieces.append(CallArguments(self.num_calls - 1, arguments))
        if call.over:
            self._object, self._in_calls = None, True
        return True

    def _start(self, name: str) -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, self._format.new_id(), name)

    def _give_up(self, pieces: list[Piece]) -> None:
        """It was not a call: the parsed text is content, and so, most probably, is the rest."""
        pieces.append(Content(self._raw))
        self._raw, self._object, self._in_calls = "", None, False


_SPACE = r"[ \t\r\n]*"
_STRING = r'[^"\\]*'


def _head(name: str) -> str:
    """Return a regular expression for a call's object up to its arguments. `name`: one for the tool's name."""
    other = f'(?:"(?:id|type)"{_SPACE}:{_SPACE}"{_STRING}"{_SPACE},{_SPACE})*'
    key = f'"(?:arguments|parameters)"{_SPACE}:'
    return rf'\{{{_SPACE}{other}"name"{_SPACE}:{_SPACE}"{name}"{_SPACE},{_SPACE}{other}{key}'


_HEADER = re.compile(r"([\w.:/-]+)(?:\[[\w\[\]]*)?")  # name[ARGS] or name[CALL_ID]id[ARGS]
_HEAD = re.compile(_head(f"({_STRING})") + _SPACE)
_MAX_HEAD = 2000  # characters before the arguments; bounds repeated matching
_FIRST_KEYS = ('"name"', '"id"', '"type"', '"arguments"', '"parameters"')


class _CallObject:
    """Parses `{"name": …, "arguments": {…}}` and returns the arguments as they arrive, if the name precedes them.

    With `whole`, an object in another order is returned once it is complete. With `name`, the object consists of the
    arguments only.
    """

    def __init__(self, name: str | None = None, whole: bool = True) -> None:
        self._given, self._whole = name, whole
        self.name: str | None = None  # None: not parsed yet
        self.begun = False  # set by the reader after emitting `CallStart`
        self.over = False  # the object is complete, or is not a call
        self._chars: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._start: int | None = None  # index of the arguments' start
        self._stop: int | None = None  # index of their end
        self._num_taken = 0

    def feed(self, text: str) -> int:
        """Parse `text` up to the object's end; return the number of characters consumed."""
        num_before = len(self._chars)
        for char in text:
            self._read(char)
            if self.over:
                break
        num_read = len(self._chars) - num_before
        if self.name is None and not self._may_be_call():
            self.over = True
        if self.over and self.name is None and self._whole:
            self._read_whole()
        return num_read

    def take_arguments(self) -> str:
        """Return the new part of the arguments."""
        if self._start is None:
            return ""
        taken = "".join(self._chars[self._start + self._num_taken : self._stop])
        self._num_taken += len(taken)
        return taken

    @property
    def partial_name(self) -> str:
        """The tool's name if the text so far contains it whole, otherwise empty."""
        if self.name is not None:
            return self.name
        try:
            found = pydantic_core.from_json("".join(self._chars), allow_partial=True)
        except ValueError:
            return ""
        name = found.get("name") if isinstance(found, dict) else None
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
        elif self._depth != 2 or len(self._chars) > _MAX_HEAD:
            return
        elif head := _HEAD.fullmatch("".join(self._chars).lstrip()):
            self.name, self._start = head[1], len(self._chars)

    def _may_be_call(self) -> bool:
        text = "".join(self._chars[:100]).lstrip()[1:].lstrip() if self._given is None else ""
        return not text or any(key.startswith(text[: len(key)]) for key in _FIRST_KEYS)

    def _read_whole(self) -> None:
        try:
            call = json.loads("".join(self._chars), strict=False)
            json.dumps(call, ensure_ascii=False).encode()  # JSON responses cannot contain a lone surrogate
        except (ValueError, RecursionError):
            return
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return
        arguments = call.get("arguments", call.get("parameters")) or {}
        self.name, self._start, self._stop = call["name"], 0, None
        self._chars = [arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)]
