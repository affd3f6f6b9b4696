"""Lark grammars inside JSON: objects with one string that, once decoded, is a sentence of the grammar.

Each terminal is written with JSON's short escapes; control characters without a short escape are excluded. A regular
expression becomes a rule of its parts, because the library's lexer does not backtrack, and an escape may end one
terminal or start the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from engine.structured.lark import bounded, check_length, tokens
from engine.structured.regex import pieces

_ESCAPED = '"\\\b\f\n\r\t'
_PLAIN = r'[^"\\\x00-\x1f]'
_OWN = "own_"  # prefix of the grammar's rule names: `start` is taken, and terminals become rules
_COMMON = {  # Lark's terminals available through `%import common.…`
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
}
_IMPORT = re.compile(r"%import\s+common\.(\w+)[ \t]*(?=\n|\Z)")


def object_with_text(name: str, grammar: str) -> str:
    """Return a grammar of JSON objects `{name: text}` whose text is a sentence of `grammar`. Raises `ValueError`."""
    check_length(grammar)
    imported = {found: _COMMON.get(found) for found in _IMPORT.findall(grammar)}
    if None in imported.values():
        raise ValueError(f"%import inside JSON is supported of {', '.join(_COMMON)}")
    written = "".join(map(_rewritten, tokens(_IMPORT.sub("", grammar))))
    written += "".join(f"\n{_own(found)}: {_rule(pattern or '')}" for found, pattern in imported.items())
    key = json.dumps(json.dumps(name))
    start = f'start: "{{" SPACE? {key} SPACE? ":" SPACE? "\\"" {_own("start")} "\\"" SPACE? "}}"\n'
    start += "SPACE: /[ \\t\\n]{1,4}/\n"
    return bounded(start + written)


def _own(name: str) -> str:
    bare = name.lstrip("?!")
    if not bare:
        return name  # a single punctuation mark
    return f"{_OWN}terminal_{bare.lower()}" if bare.isupper() else f"{_OWN}{bare}"


def _rewritten(token: tuple[str, str]) -> str:
    kind, text = token
    match kind:
        case "directive":
            raise ValueError(f"{text.split()[0]} is not supported inside JSON")
        case "string":
            return _literal(json.loads(text))
        case "regex":
            return _rule(text[1:-1].replace(r"\/", "/"))
        case "name":
            return _own(text)
        case "alias":
            return ""
    return text


def _literal(text: str) -> str:
    """Return a terminal for this text in JSON."""
    return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)


def _rule(pattern: str) -> str:
    """Return a regular expression as a part of a rule."""
    out: list[str] = []
    for atom, times in _repeated(pattern):
        escapes = [_literal(char) for char in _ESCAPED if _may_be(atom, char)]
        if atom in ("(", "|", ")"):
            if out and out[-1] in ("(", "|") and atom != "(":
                raise ValueError("a part of a regular expression that may be empty is not supported inside JSON")
            out += [atom, times] if times else [atom]
        elif not escapes:
            many = times in ("*", "+")
            out.append(f"/{_slashed(atom)}{'+' if many else ''}/" + ("?" if times == "*" else "" if many else times))
        elif atom.startswith("[") or atom == ".":
            plain = _PLAIN if atom == "." else f"[{atom}&&{_PLAIN}]"
            some = f"/{_slashed(plain)}{'+' if times in ('*', '+') else ''}/"
            out.append(f"({' | '.join([some, *escapes])}){times}")
        else:
            out.append(f"{escapes[0]}{times}" if not times else f"({escapes[0]}){times}")
    if not out:
        raise ValueError("an empty regular expression is not supported inside JSON")
    return f"({' '.join(out)})"


def _repeated(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield atoms and signs, each with its quantifier."""
    held: tuple[str, str] | None = None
    for piece, kind, _ in pieces(pattern):
        if kind == "flags" or (kind == "open" and piece not in ("(", "(?:")) or piece in ("^", "$"):
            raise ValueError(f"{piece} in a regular expression is not supported inside JSON")
        if kind == "count" or piece in ("*", "+", "?"):
            if held is not None and not held[1]:
                held = (held[0], piece)
            continue  # lazy quantifiers match the same texts
        if held is not None:
            yield held
        held = ("(" if kind == "open" else piece, "")
    if held is not None:
        yield held


def _may_be(atom: str, char: str) -> bool:
    if atom in ("(", "|", ")"):
        return False
    try:
        return re.fullmatch(atom, char) is not None
    except re.error:
        raise ValueError(f"{atom} is not supported inside JSON") from None


def _slashed(pattern: str) -> str:
    return pattern.replace("/", r"\/")
