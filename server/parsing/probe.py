"""Finds how a model writes tool calls: renders conversations with its chat template and looks how calls are written.

A listed format that reads what the template writes is taken, in the template's own white space. Otherwise the format is
put together from the text around names and arguments. Templates that write no calls are told by what they describe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from engine.core.params.structured import Literals, Parameters
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from server.parsing.formats import PARSER_NAMES, TOOL_FORMATS, ToolFormat
from server.parsing.written import read, written

_NAMES = ("quire_first", "quire_second")
_KEYS, _TEXTS, _COUNT = ("quire_key", "quire_count"), ("quire text", "quire other"), 7
_IDS = ("quireid0a", "quireid1b")
_ARGUMENTS: tuple[dict[str, Any], dict[str, Any]] = (
    {_KEYS[0]: _TEXTS[0], _KEYS[1]: _COUNT},
    {_KEYS[0]: _TEXTS[1]},
)
_CALLS = list(zip(_NAMES, _ARGUMENTS, strict=True))
_QUESTION, _CONTENT, _RESULT, _NEXT = "quire question", "quire content", "quire result", "quire next"
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        _KEYS[0]: {"type": "string", "description": "A text."},
        _KEYS[1]: {"type": "integer", "description": "A count."},
    },
    "required": [_KEYS[0]],
}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A function.", "parameters": _SCHEMA}}
    for name in _NAMES
]
_SCHEMAS = dict.fromkeys(_NAMES, _SCHEMA)
_HARMONY = "openai"
_MARK = re.compile(r"\s*(<[^<>\s]*>|\[/?[A-Za-z_]+\])")
_REASONING = re.compile(r"^\s*(?:<[^<>]*think[^<>]*>\s*)+|^.*?</[^<>]*think[^<>]*>\s*", re.DOTALL | re.IGNORECASE)
_RECIPIENT = re.compile(rf"^[^<]*{_NAMES[0]}<[^<>]*>")  # a header with the tool's name
_CLOSING = re.compile(r"\s*\]?\s*</[^<>\s]*>")
PROBED = "probed"  # the name of a format that is not listed


def find_tool_format(name: str, template: ChatTemplate | None) -> ToolFormat | None:
    """Return the format with this name; for "auto", the one in which the chat template writes calls, or None."""
    if name != "auto":
        return PARSER_NAMES.get(name)
    if template is None:
        return None
    if any(sign in template.source for sign in TOOL_FORMATS[_HARMONY].signs):
        return TOOL_FORMATS[_HARMONY]
    if "tool" not in template.source:
        return None
    turns = list(_turns(template))
    for turn in turns:
        if (found := _listed(turn)) is not None or (found := _inferred(turn)) is not None:
            return found
    return _described(template.source) if not turns else None


def _described(source: str) -> ToolFormat | None:
    """Return the format that a template describes, or whose marks it contains."""
    for each in TOOL_FORMATS.values():
        if any(sign in source for sign in each.signs):
            return each
    return None


@dataclass(frozen=True)
class _Turn:
    """Text of a template for a message with calls, between the header of its role and the calls' results."""

    text: str
    num_calls: int
    footer: str  # first mark after a message without calls, or ""

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        return _CALLS[: self.num_calls]


def _turns(template: ChatTemplate) -> Iterator[_Turn]:
    """Render messages with two calls or one, in the shapes that templates take."""
    question = {"role": "user", "content": _QUESTION}
    plain = _render(template, [question, {"role": "assistant", "content": _CONTENT}, {**question, "content": _NEXT}])
    opened = _render(template, [question], add_generation_prompt=True)
    for num_calls, content, as_text in product((2, 1), ("", None), (False, True)):
        calls = [
            {
                "id": _IDS[i],
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
            }
            for i, (name, arguments) in enumerate(_CALLS[:num_calls])
        ]
        results = [
            {"role": "tool", "name": _NAMES[i], "tool_call_id": _IDS[i], "content": _RESULT} for i in range(num_calls)
        ]
        text = _render(template, [question, {"role": "assistant", "content": content, "tool_calls": calls}, *results])
        names = [name for name, _ in _CALLS[:num_calls]]
        if text is None or not all(name in text.partition(_QUESTION)[2] for name in names):
            continue
        if _TEXTS[0] not in text.partition(_QUESTION)[2] or any(
            json.dumps(json.dumps(arguments))[1:-1] in text for arguments in _ARGUMENTS
        ):
            continue
        start = _start(text, plain, opened)
        turn = text[start:].partition(_RESULT)[0]
        turn = _REASONING.sub("", turn, count=1) if _NAMES[0] in _REASONING.sub("", turn, count=1) else turn
        turn = _RECIPIENT.sub("", turn, count=1)
        footer = _MARK.match((plain or "").partition(_CONTENT)[2])
        yield _Turn(turn, num_calls, footer[1] if footer else "")


def _render(template: ChatTemplate, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str | None:
    try:
        return template.render(messages, tools=_TOOLS, add_generation_prompt=add_generation_prompt)
    except ChatTemplateError:
        return None


def _start(text: str, plain: str | None, opened: str | None) -> int:
    """Return where a message with calls begins, after the header of its role."""
    start = len(text.partition(_QUESTION)[0]) + len(_QUESTION)
    for each in (opened, plain, plain.replace(_CONTENT, "") if plain is not None else None):
        if each is not None:
            shared = _shared(text, each)
            end = len(shared if shared == opened else _whole_marks(shared))
            # The rest begins with a mark. What precedes it may be marks around no content.
            start = max(start, end) if each in (opened, plain) or _MARK.match(text[end:]) else start
    return start


def _shared(one: str, other: str) -> str:
    """Return the common start of two texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _shared_end(one: str, other: str) -> str:
    return _shared(one[::-1], other[::-1])[::-1]


def _whole_marks(text: str) -> str:
    """Return the text without a mark that it only begins."""
    for opening, closing in ("<>", "[]"):
        at = text.rfind(opening)
        text = text[:at] if at >= 0 and closing not in text[at:] else text
    return text


# ---- listed formats ----


def _listed(turn: _Turn) -> ToolFormat | None:
    """Return the listed format that reads the turn, preferably one that writes the same."""
    found = [each for each in TOOL_FORMATS.values() if each.name != _HARMONY and _reads(each, turn)]
    is_single = turn.num_calls == 1
    exact = [(each, text) for each in found if (text := written(each, turn.calls, _IDS)) in turn.text]
    if exact:
        return replace(max(exact, key=lambda pair: len(pair[1]))[0], single=is_single)
    if not found:
        return None
    own = _inferred(turn)
    alike = [each for each in found if own is not None and _alike(each, own)]
    if own is None or not alike:
        return replace(found[0], single=is_single)
    return replace(
        alike[0],
        single=is_single,
        begin=own.begin,
        opening=own.opening,
        call=own.call,
        separator=own.separator,
        closing=own.closing,
        arguments=own.arguments,
    )


def _reads(format: ToolFormat, turn: _Turn) -> bool:
    text = turn.text if not format.bare else turn.text.lstrip()
    if not format.bare and format.begin not in text:
        return False
    found = read(format, text, _SCHEMAS)
    leads = not format.content and format.begin in text and bool(text.partition(format.begin)[0].strip())
    return found is not None and found[1] == turn.calls and not leads


def _alike(one: ToolFormat, other: ToolFormat) -> bool:
    return type(one.arguments) is type(other.arguments) and one.is_object == other.is_object


# ---- other formats ----


def _inferred(turn: _Turn) -> ToolFormat | None:
    """Return a format put together from what stands around names and arguments; None if it does not read the turn."""
    text = turn.text
    first = _Spans.find(text, *_CALLS[0], 0)
    if first is None:
        return None
    lead = text[: first.name]
    mark = _MARK.match(lead)
    begin, rest = (lead[: mark.end()], lead[mark.end() :]) if mark else (lead, "")
    if not re.match(r"\s*[<\[]|\s*>>>", begin):
        return None
    second = _Spans.find(text, *_CALLS[1], first.end, first.syntax) if turn.num_calls > 1 else None
    before, opening, separator, is_single = rest, "", begin, second is None
    tail = text[first.end :]
    if second is not None:
        gap = _numbered(text[first.end : second.name], 1).replace(_IDS[0], "{id}")
        before = _shared_end(_numbered(rest, 0), gap)
        opening = rest[: len(rest) - len(before)]
        gap, tail = gap[: len(gap) - len(before)], text[second.end :].replace(_IDS[1], "{id}")
        after = _whole_marks(_shared(gap, tail))
        separator = gap[len(after) :]
        if _NAMES[1] in separator:
            before, opening, separator, is_single = rest, "", begin, True
    ended = tail.partition(turn.footer)[0] if turn.footer and turn.footer in tail else None
    if second is None or is_single:
        after, closing = (ended if ended is not None else "").rstrip(), ""
    else:
        closed = _CLOSING.match(tail[len(after) :])
        closing = ended[len(after) :].rstrip() if ended is not None else closed[0] if closed else ""
    syntax, between = first.syntax, text[first.name + len(_NAMES[0]) : first.start]
    format = ToolFormat(
        name=PROBED,
        begin=begin.lstrip(),
        opening=opening,
        call=(before, _numbered(between, 0), re.sub(r', *"id": *"\{id\}"', "", after)),
        separator=separator,
        closing=closing,
        arguments=syntax,
        single=is_single,
    )
    return format if _reads(format, turn) else None


def _numbered(text: str, number: int) -> str:
    """Return the text with slots for a call's id and number."""
    text = text.replace(_IDS[number], "{id}")
    return re.sub(rf"(?<![\w.]){number}(?![\w.])", "{index}", text)


@dataclass(frozen=True)
class _Spans:
    """Positions in the text of a call: of its name, of its arguments' start, and after them."""

    name: int
    start: int
    end: int
    syntax: Parameters | Literals | None

    @classmethod
    def find(
        cls,
        text: str,
        name: str,
        arguments: Mapping[str, Any],
        begin: int,
        syntax: Parameters | Literals | None = None,
    ) -> _Spans | None:
        """`syntax`: that of an earlier call, if it is no JSON object."""
        key = text.find(_KEYS[0], begin)
        at = text.rfind(name, begin, key) if key >= 0 else -1
        if at < 0:
            return None
        for found in re.finditer(r"\{", text[at + len(name) : key]):
            start = at + len(name) + found.start()
            try:
                value, length = json.JSONDecoder().raw_decode(text[start:])
            except ValueError:
                continue
            if value == arguments:
                return cls(at, start, start + length, None)
        if syntax is None:
            return cls._find_marked(text, at + len(name), at)
        end = text.find(str(arguments[_KEYS[0]]), key) + len(str(arguments[_KEYS[0]]))
        ending = syntax.end if isinstance(syntax, Parameters) else syntax.quote
        for each in (ending, ending.rstrip(), "'"):
            if text.startswith(each, end):
                return cls(at, key, end + len(each), syntax)
        return None

    @classmethod
    def _find_marked(cls, text: str, begin: int, at: int) -> _Spans | None:
        """Find arguments that are no JSON object: parameters between marks, or literals."""
        key = text.find(_KEYS[0], begin)
        value = text.find(_TEXTS[0], key)
        second = text.find(_KEYS[1], value)
        if key < 0 or value < 0:
            return None
        lead, mark = text[begin:key], text[key + len(_KEYS[0]) : value]
        end = value + len(_TEXTS[0])
        if second < 0 or not (count := re.search(rf"(?<!\d){_COUNT}(?!\d)", text[second:])):
            return None
        gap, mark_2 = text[end:second], text[second + len(_KEYS[1]) : second + count.start()]
        stop = second + count.end()
        if lead.endswith("(") and mark.startswith("="):
            return cls(at, key, stop, Literals())
        if lead.endswith("{") and mark.startswith(":"):
            quote = mark[1:].strip()
            separator = gap.removeprefix(quote)
            return cls(at, key, stop, Literals(assign=":", separator=separator, quote=quote or '"'))
        opening = lead[lead.rfind("<") :]
        if not opening.startswith("<") or not gap.endswith(opening) or _KEYS[0] in gap:
            return None
        kinds: tuple[tuple[str, str], ...] = ()
        if mark != mark_2:
            shared = _shared(mark, mark_2)
            trail = _shared_end(mark[len(shared) :], mark_2[len(shared) :])
            kinds = (
                ("string", mark[len(shared) : len(mark) - len(trail)]),
                ("", mark_2[len(shared) : len(mark_2) - len(trail)]),
            )
            mark = f"{shared}{{kind}}{trail}"
        ending = gap.removesuffix(opening)
        if not text.startswith(ending, stop):
            ending = ending.rstrip()
        syntax = Parameters(key=opening, value=mark, end=ending, kinds=kinds)
        return cls(at, key - len(opening), stop + len(ending), syntax)
