"""An incremental parser of answers with tool calls. The formats are data: see formats.py; calls.py parses one call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.params.structured import Literals, Parameters, Tag, Tags
from engine.structured.kinds import Schema
from server.parsing.calls import MAX_HEAD, Call, LiteralsCall, ObjectCall, ParametersCall, head
from server.parsing.formats import ToolFormat
from server.parsing.patterns import NAME, Pattern, slotted
from server.parsing.pieces import CallArguments, CallStart, Content, Piece, begun

_HEADED = re.compile(rf"({NAME}+)(?:\[[\w\[\]]*)?")  # name[ARGS] or name[CALL_ID]id[ARGS]

_MARKUP, _ID = re.compile(r"<[^<>]*>"), re.compile(r"[\w.:-]{1,300}")


def call_tags(
    format: ToolFormat, tools: Sequence[tuple[str, dict[str, Any]]], *, required: bool, several: bool
) -> Tags:
    """Return tags that guide the answer: every call names one of `tools` and follows its JSON schema."""
    before, between, after = format.call
    return Tags(
        trigger=format.begin,
        opening=format.opening,
        tags=[
            Tag(
                begin=before + name + between,
                schema=schema,
                end=after,
                syntax=format.arguments,
                head=_bare_head(format, re.escape(name)) if format.bare else None,
            )
            for name, schema in tools
        ],
        between=format.separator,
        closing=format.closing,
        several=several,
        required=required,
    )


def _bare_head(format: ToolFormat, name: str) -> str:
    """Return a regular expression for the start of an answer that consists of calls, up to the arguments."""
    opening = rf"{re.escape(format.opening)}\s*" if format.opening else ""
    between = re.escape(format.call[1]).replace("\\\n", r"\n")  # a line of a grammar ends at a line break
    return opening + (head(name) if format.is_object else name + between)


def _header(format: ToolFormat) -> Pattern:
    """Return a pattern of a call up to its arguments."""
    name = NAME if not isinstance(format.arguments, Literals) else NAME.replace("[^", "[^()")
    before, between, _ = format.call
    after = ("(?P<end>)",) if between.strip() else (r"(?P<gap>\s*)", r"(?P<end>(?=[<{\[]))")
    return slotted(before.lstrip(), f"(?P<name>{name}+?)", between if between.strip() else "", *after)


class ToolReader:
    """Splits one answer into content and calls as it arrives.

    Text that starts like a call but is not one remains content. White space around calls is dropped. A call that is
    cut off is returned as far as it goes. Text around calls is never content.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Mapping[str, Schema | None],
        max_calls: int | None,
        *,
        required: bool = False,
    ) -> None:
        """`tools`: the schemas of the available tools' arguments, by name. Calls beyond the first `max_calls` are
        dropped. `required`: a grammar guides the answer to consist of calls.
        """
        self._format, self._tools, self._max_calls = format, tools, max_calls
        self._header = _header(format)
        self._least_mark = 1 if required else 2  # characters; a shorter marker that ends a cut answer is content
        self._held = ""  # text not parsed yet
        self._raw = ""  # parsed text that becomes content if it is not a call
        self._call: Call | None = None  # the current call
        self._in_calls = False  # after a marker: a call is expected
        self._may_be_bare = format.bare
        self._written_id = ""  # of the current call, if the format has ids in the text
        self._ids: set[str] = set()
        self.num_calls = 0
        self.is_cut = False  # the answer ended inside a call

    @property
    def in_calls(self) -> bool:
        """Return whether the next text belongs to a call, or is between calls."""
        return self._in_calls or self._call is not None

    def push(self, text: str, finished: bool, cut: bool = False) -> list[Piece]:
        """Return the pieces now certain. `finished`: no text follows; `cut`: the answer was cut off, not ended."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces, finished):
            pass
        if finished:
            self._finish(pieces, cut)
        return [piece for piece in pieces if self._counts(piece)]

    def _finish(self, pieces: list[Piece], cut: bool) -> None:
        """Release held text as content, unless it is the start of a call."""
        call, marked, rest = self._call, bool(self._raw), self._raw + self._held
        self._raw = self._held = ""
        if call is not None and call.begun and not cut and call.close():
            pieces.append(CallArguments(self.num_calls - 1, call.take_arguments()))
        elif call is not None:
            is_tool = call.partial_name in self._tools
            self.is_cut = call.begun or self._in_calls or is_tool
            if not call.begun and is_tool:
                pieces.append(self._start(call.partial_name))
            elif not self.is_cut:
                pieces.append(Content(rest))
        elif self._in_calls:
            self.is_cut = marked
        elif not (cut and self._begins_mark(rest.lstrip())):
            pieces.append(Content(rest))

    def _begins_mark(self, text: str) -> bool:
        """Return whether the text at the end of a cut answer is the start of a mark."""
        if len(text) >= self._least_mark and self._format.begin.startswith(text):
            return True
        return self._may_be_bare and bool(text) and self._format.content.startswith(text)

    def _counts(self, piece: Piece) -> bool:
        if isinstance(piece, Content):
            return bool(piece.text)
        return self._max_calls is None or piece.index < self._max_calls  # type: ignore[union-attr]

    def _step(self, pieces: list[Piece], finished: bool) -> bool:
        """Parse one step; return False if more text is needed."""
        if not self._held:
            return False
        if self._call is not None:
            return self._read_call(self._call, pieces, finished)
        if self._in_calls:
            return self._read_between(pieces)
        return self._read_content(pieces, finished)

    def _read_content(self, pieces: list[Piece], finished: bool) -> bool:
        if self._may_be_bare:
            text = self._held.lstrip(" \t\r\n")
            if self._skip_content_mark(text):
                self._may_be_bare = False
                return True
            if not text or self._may_be_content_mark(text, finished) or not self._read_bare(text, finished):
                return not self._may_be_bare
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

    def _read_bare(self, text: str, finished: bool) -> bool:
        """Start a call if the answer begins with one; return False if it does not, or if more text is needed."""
        opening = self._format.opening
        calls = text.removeprefix(opening).lstrip() if opening else text
        if opening and (not calls or opening.startswith(text)) and not finished:
            return False
        if self._format.is_object:
            is_call = calls.startswith("{")
        elif found := self._header.match(calls):
            is_call = text.startswith(opening) and found["name"] in self._tools
        else:
            is_call = False
            if text.startswith(opening) and len(calls) < MAX_HEAD and self._header.may_match(calls) and not finished:
                return False
        self._may_be_bare = False
        if not is_call:
            return False
        self._raw, self._held = self._held[: -len(calls)], calls
        return self._begin_call(calls, whole=False)

    def _read_between(self, pieces: list[Piece]) -> bool:
        text = self._held.lstrip()
        self._raw += self._held[: len(self._held) - len(text)] if self._raw else ""
        self._held = text
        if not text:
            return False
        begin = self._format.begin
        for mark in self._format.marks:
            # The first mark is `begin`. Before any call another mark is none.
            if text.startswith(mark) and (mark == begin or not self._raw):
                self._raw += mark if mark == begin else ""
                self._held = text.removeprefix(mark)
                return True
        if self._skip_content_mark(text):
            self._raw, self._in_calls = "", False
            return True
        if any(mark.startswith(text) for mark in (*self._format.marks, self._format.content)):
            return False
        if text[0] in self._format.between:
            self._raw += text[0] if self._raw else ""
            self._held = text[1:]
            return True
        if self._begin_call(text):
            return True
        if self._may_begin(text):
            return False
        self._give_up(pieces)
        return True

    def _skip_content_mark(self, text: str) -> bool:
        """Skip the mark of content, where `text`, the held text without leading spaces, begins with it."""
        mark = self._format.content
        if not mark or not text.startswith(mark):
            return False
        self._held = text.removeprefix(mark)
        return True

    def _may_be_content_mark(self, text: str, finished: bool) -> bool:
        return not finished and self._format.content.startswith(text)

    def _may_begin(self, text: str) -> bool:
        """Return whether more text may make this the start of a call."""
        if len(text) >= MAX_HEAD:
            return False
        if self._format.headed:
            return _HEADED.fullmatch(text) is not None
        return not self._format.is_object and self._header.may_match(text)

    def _begin_call(self, text: str, whole: bool = True) -> bool:
        """Start a call if the text begins with one."""
        format = self._format
        if (format.is_object or format.headed) and text[0] == "{":
            self._call = ObjectCall(whole=whole)
            return True
        if format.headed:
            found = _HEADED.match(text, 0, MAX_HEAD)
            name, end = (found[1], found.end()) if found is not None and found.end() < len(text) else ("", 0)
        else:
            found = self._header.match(text[:MAX_HEAD]) if not format.is_object else None
            name, end = (found["name"], found.end()) if found is not None else ("", 0)
        if not name:
            return False
        self._raw, self._held = self._raw + text[:end], text[end:]
        if format.names_are_ids and found is not None:
            self._written_id = _MARKUP.sub("", found[0]).strip()
        schema = self._tools.get(name)
        if isinstance(format.arguments, Parameters):
            self._call = ParametersCall(name, format.arguments, schema, format.marks)
        elif format.arguments is not None:
            self._call = LiteralsCall(name, format.arguments, schema)
        else:
            self._call = ObjectCall(name)
        return True

    def _read_call(self, call: Call, pieces: list[Piece], finished: bool) -> bool:
        end = call.feed(self._held, finished)
        read, self._held = self._held[:end], self._held[end:]
        if not call.begun:
            self._raw += read
            if call.name is None or (self._format.bare and call.name not in self._tools):
                if call.over or call.name is not None:
                    self._give_up(pieces)
                    return True
                return bool(end)
            call.begun, self._raw = True, ""
            pieces.append(self._start(call.name))
        if arguments := call.take_arguments():
            pieces.append(CallArguments(self.num_calls - 1, arguments))
        if call.over:
            self._call, self._in_calls = None, True
        return call.over or bool(end)

    def _start(self, name: str) -> CallStart:
        self.num_calls += 1
        call_id = self._written_id
        if not _ID.fullmatch(call_id) or call_id in self._ids:
            call_id = self._format.new_id()
        self._ids.add(call_id)
        return CallStart(self.num_calls - 1, call_id, name)

    def _give_up(self, pieces: list[Piece]) -> None:
        """It was not a call: the parsed text is content, and so, most probably, is the rest."""
        pieces.append(Content(self._raw))
        self._raw, self._call, self._in_calls = "", None, False
