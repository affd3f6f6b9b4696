"""Bounds Lark grammars: the size of their terminals, and JSON Schemas inside them. Does not parse anything else.

The library limits most of its work, but not repetitions in terminals: `X{1000}` of a `Y{1000}` is a regular expression
with a million positions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from engine.structured.json_schema import prepare
from engine.structured.regex import MAX_POSITIONS, Positions, read

MAX_LENGTH = 50_000
MAX_RULES = 300
DIRECTIVES = ("%json", "%regex", "%ignore", "%import", "%llguidance")

_TOKEN = re.compile(
    r"""(?P<line>[ \t\r]*\n\s*|//[^\n]*|\#[^\n]*)
    |(?P<space>[ \t\r]+)
    |(?P<string>"(?:\\.|[^"\\\n])*+")
    |(?P<regex>/(?:\\.|[^/\\\n])++/)
    |(?P<unclosed>["/])
    |(?P<directive>%\w+)
    |(?P<name>[A-Za-z_?!][\w-]*)
    |(?P<count>\{\s*+\d*+\s*+,?\s*+\d*+\s*+\}|~\s*+\d++(?:\s*+\.\.\s*+\d+)?)
    |(?P<alias>->\s*+\w+)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_Token = tuple[str, str]  # kind, text


def bounded(grammar: str) -> str:
    """Return the grammar with prepared JSON Schemas. Raises `ValueError` if it is too large or a schema is not
    supported.
    """
    check_length(grammar)
    out: list[str] = []
    definitions: dict[str, list[_Token]] = {}
    body: list[_Token] = []
    line_start = 0
    for kind, text in tokens(grammar):
        out.append(text)
        if kind == "line":
            line_start = len(body)
        elif text == ":" and line_start < len(body):
            name = body[line_start][1]
            del body[line_start:]
            body = definitions.setdefault(name.lstrip("?!_"), [])
            line_start = 0
        elif kind != "space":
            body.append((kind, text))
    if len(definitions) > MAX_RULES:
        raise ValueError(f"a grammar may have at most {MAX_RULES} rules, this one has {len(definitions)}")
    sizes: dict[str, int] = {}
    for name in definitions:
        _size(name, definitions, sizes)
    return "".join(out)


def check_length(grammar: str) -> None:
    """Raise `ValueError` if the grammar is too long."""
    if len(grammar) > MAX_LENGTH:
        raise ValueError(f"a grammar may have at most {MAX_LENGTH} characters, this one has {len(grammar)}")


def tokens(grammar: str) -> Iterator[_Token]:
    """Split a grammar into tokens that cover all of its text. Raises `ValueError` for unsupported directives and for
    unclosed quotes, since searching for the end from each quote would take quadratic time.
    """
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        assert match is not None
        assert match.lastgroup is not None
        kind, text, at = match.lastgroup, match[0], match.end()
        if kind == "unclosed":
            what = "string" if text == '"' else "regular expression"
            raise ValueError(f"a {what} is not closed in its line: {grammar[at - 1 : at + 20]!r}")
        if kind == "directive" and text not in DIRECTIVES:
            raise ValueError(f"{text} is not supported; supported are {', '.join(DIRECTIVES)}")
        if text in ("%json", "%regex"):
            at += len(grammar[at:]) - len(grammar[at:].lstrip())
            try:
                value, at = json.JSONDecoder().raw_decode(grammar, at)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{text} must be followed by JSON: {error}") from None
            text += " " + (prepare(value) if text == "%json" else json.dumps(value))
        yield kind, text


def _size(name: str, definitions: dict[str, list[_Token]], sizes: dict[str, int]) -> int:
    """Return the positions of a terminal as one regular expression. Rules count 0, since the library counts them
    itself.
    """
    if name not in sizes:
        sizes[name] = 1  # ends the recursion if it contains itself, which the library refuses
        is_terminal = name.isupper()
        positions = Positions()
        for kind, text in definitions[name]:
            if kind == "string":
                positions.atom(len(text) - 2)
            elif kind == "regex":
                positions.atom(read(text[1:-1])[1])
            elif kind == "name":
                inner = text.lstrip("?!_")
                terminal = is_terminal and inner.isupper() and inner in definitions
                positions.atom(_size(inner, definitions, sizes) if terminal else 1)
            elif kind == "count" and is_terminal:
                positions.repeat(max(int(number) for number in re.findall(r"\d{1,9}", text) or ["1"]))
            elif text in "([":
                positions.open()
            elif text in ")]":
                positions.close()
            if positions.total > MAX_POSITIONS:
                raise ValueError(f"{name} may have at most {MAX_POSITIONS} positions, repetitions written out")
        sizes[name] = max(positions.total, 1) if is_terminal else 1
    return sizes[name]
