"""Regular languages that can be intersected, subtracted and compared. No expression is executed.

Dialects differ in what an expression matches (`\\d`, `$` before a final newline). The `narrow` language contains what
all dialects match, the `wide` language what any of them may match: the first may be generated, the second must be
avoided by `not`. Derivatives by a character (Brzozowski) are the states of an automaton, which can be written as an
expression without lookaround. All work is bounded.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points, inclusive, sorted and not adjacent
Parsed: TypeAlias = tuple[Any, ...]

MAX_LENGTH = 2000  # characters of an expression
NOTHING = r"^[^\x{0}-\x{10ffff}]$"  # matches nothing

MAX_NODES = 100_000  # languages and derivatives computed or looked up in one comparison
FIRST = 8  # predefined languages
MAX_WORK = 400_000  # the same for a whole document
MAX_STATES = 1000
MAX_WRITTEN = 16_000  # characters of a written expression
MAX_REPEATED = 1000
MAX_NESTED = 40
_LAST = 0x10FFFF
_COUNT = re.compile(r"\{(\d{1,4})(?:(,)(\d{0,4}))?\}")
_CODE = re.compile(r"x\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
_GROUP = re.compile(r"\((?:\?:|\?P?<\w+>)?(?!\?)")
_LOOK = re.compile(r"\(\?([=!])")
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


class UndecidedError(ValueError):
    """An expression exceeds the bounds or uses an unsupported construct."""


def _ranges(found: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(found):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


_SURROGATES = (0xD800, 0xDFFF)


def _all_but(given: Ranges) -> Ranges:
    """Return the complement, without surrogates."""
    found, at = [], 0
    for low, high in _ranges([*given, _SURROGATES]):
        found.append((at, low - 1))
        at = high + 1
    return tuple(each for each in [*found, (at, _LAST)] if each[0] <= each[1])


_BEYOND_ASCII = (0x80, _LAST)
_DIGITS, _LETTERS = (0x30, 0x39), [(0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SETS = {  # (narrow, wide)
    "d": (_ranges([_DIGITS]), _ranges([_DIGITS, _BEYOND_ASCII])),
    "w": (_ranges([_DIGITS, *_LETTERS]), _ranges([_DIGITS, *_LETTERS, _BEYOND_ASCII])),
    "s": (_ranges([(9, 13), (32, 32)]), _ranges([(9, 13), (0x1C, 0x20), _BEYOND_ASCII])),
}
_SETS |= {name.upper(): (_all_but(wide), _all_but(narrow)) for name, (narrow, wide) in _SETS.items()}
_DOT = (_all_but(((10, 10), (13, 13), (0x2028, 0x2029))), _all_but(((10, 10),)))


class _Parser:
    """Parses an expression into nested tuples, with characters as narrow and wide ranges."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_LENGTH:
            raise UndecidedError("the expression is too long")
        self.pattern, self.at, self.level = pattern, 0, 0

    def parse(self) -> Parsed:
        found = self._alternatives()
        if self.at < len(self.pattern):
            raise UndecidedError("a parenthesis too many")
        return found

    def _alternatives(self) -> Parsed:
        self.level += 1
        if self.level > MAX_NESTED:
            raise UndecidedError("too many groups in groups")
        options = [self._sequence()]
        while self.pattern.startswith("|", self.at):
            self.at += 1
            options.append(self._sequence())
        self.level -= 1
        return options[0] if len(options) == 1 else ("alt", options)

    def _sequence(self) -> Parsed:
        found: list[Parsed] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            found.append(self._repeated(self._atom()))
        return found[0] if len(found) == 1 else ("seq", found)

    def _repeated(self, atom: Parsed) -> Parsed:
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if char in "*+?":
                least, most = (1 if char == "+" else 0), (1 if char == "?" else None)
                self.at += 1
            elif match := _COUNT.match(self.pattern, self.at):
                least = int(match[1])
                most = least if match[2] is None else int(match[3]) if match[3] else None
                self.at = match.end()
            else:
                break
            if max(least, most or 0) > MAX_REPEATED:
                raise UndecidedError("too many repetitions")
            if self.pattern.startswith("+", self.at):
                raise UndecidedError("a possessive repetition")
            if self.pattern.startswith("?", self.at):
                self.at += 1  # lazy quantifiers match the same texts
            atom = ("rep", atom, least, most)
        return atom

    def _atom(self) -> Parsed:
        pattern, start = self.pattern, self.at
        char = pattern[start]
        self.at += 1
        match char:
            case "^":
                return ("start",)
            case "$":
                return ("end",)
            case ".":
                return ("set", *_DOT)
            case "[":
                return ("set", *self._class())
            case "\\":
                return self._escape()
            case "(":
                return self._group(start)
            case "*" | "+" | "?":
                raise UndecidedError("nothing is repeated")
        return _char(ord(char))

    def _group(self, start: int) -> Parsed:
        look = _LOOK.match(self.pattern, start)
        match = look or _GROUP.match(self.pattern, start)
        if match is None:
            raise UndecidedError("a group of another kind")
        self.at = match.end()
        inner = self._alternatives()
        if not self.pattern.startswith(")", self.at):
            raise UndecidedError("a parenthesis too few")
        self.at += 1
        return ("look", inner, look[1] == "=") if look else inner

    def _escape(self) -> Parsed:
        char = self.pattern[self.at : self.at + 1]
        if char in ("A", "Z", "z"):
            self.at += 1
            return ("start",) if char == "A" else ("end",)
        return ("set", *self._escaped())

    def _escaped(self) -> tuple[Ranges, Ranges]:
        if match := _CODE.match(self.pattern, self.at):
            self.at = match.end()
            return _both(int(match[1] or match[2] or match[3], 16))
        char = self.pattern[self.at : self.at + 1]
        self.at += 1
        if char in _SETS:
            return _SETS[char]
        if char in _CONTROLS:
            return _both(_CONTROLS[char])
        if not char or char.isalnum():
            raise UndecidedError(f"the escape {char!r}")
        return _both(ord(char))

    def _class(self) -> tuple[Ranges, Ranges]:
        pattern = self.pattern
        if negated := pattern.startswith("^", self.at):
            self.at += 1
        narrow: list[tuple[int, int]] = []
        wide: list[tuple[int, int]] = []
        first = self.at
        while self.at < len(pattern) and (pattern[self.at] != "]" or self.at == first):
            low = self._member()
            is_range = pattern.startswith("-", self.at) and pattern[self.at + 1 : self.at + 2] not in ("]", "")
            if is_range and low[0] == low[1] and len(low[0]) == 1:
                self.at += 1
                high = self._member()
                if high[0] != high[1] or len(high[0]) != 1:
                    raise UndecidedError("a range to a class")
                low = (((low[0][0][0], high[0][-1][1]),),) * 2
                if low[0][0][0] > low[0][0][1]:
                    raise UndecidedError("a range backwards")
            narrow += low[0]
            wide += low[1]
        if self.at >= len(pattern):
            raise UndecidedError("a bracket too few")
        self.at += 1
        found = _ranges(narrow), _ranges(wide)
        return (_all_but(found[1]), _all_but(found[0])) if negated else found

    def _member(self) -> tuple[Ranges, Ranges]:
        char = self.pattern[self.at]
        self.at += 1
        if char == "\\":
            if self.pattern.startswith("b", self.at):
                self.at += 1
                return _both(8)
            return self._escaped()
        return _both(ord(char))


def _both(code: int) -> tuple[Ranges, Ranges]:
    return ((code, code),), ((code, code),)


def _char(code: int) -> Parsed:
    return ("set", *_both(code))


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    kind: str  # set, empty text, cat, or, and, not, rep
    parts: tuple[Any, ...]
    has_empty: bool  # contains the empty text


class Languages:
    """Creates languages. Equal ones, as far as detected, are the same object. Raises `UndecidedError` if there are
    too many.
    """

    def __init__(self, limit: int = MAX_NODES) -> None:
        self._limit = limit
        self._num_parts = 0  # members of unions and intersections visited so far
        self._made: dict[tuple[Any, ...], Language] = {}
        self._derived: dict[tuple[int, int], Language] = {}
        self.nothing = self._make("set", (), False)
        self.empty = self._make("empty", (), True)
        self.character = self._make("set", _all_but(()), False)
        self.anything = self.repeated(self.character, 0, None)

    @property
    def num_made(self) -> int:
        return len(self._made) + len(self._derived) + self._num_parts

    def of(self, pattern: str, narrow: bool) -> Language:
        """Return the texts in which the expression is found, as in JSON Schema's `pattern`."""
        parsed = _Parser(pattern).parse()
        first = self._translated(parsed, self.anything, True, narrow)
        later = self._translated(parsed, self.anything, False, narrow)
        return self.union([first, self.joined(self.character, self.joined(self.anything, later))])

    def text(self, text: str) -> Language:
        found = self.empty
        for char in reversed(text):
            found = self.joined(self._make("set", ((ord(char), ord(char)),), False), found)
        return found

    def _make(self, kind: str, parts: tuple[Any, ...], has_empty: bool) -> Language:
        key = (kind, *(id(part) if isinstance(part, Language) else part for part in parts))
        found = self._made.get(key)
        if found is None:
            if self.num_made >= self._limit:
                raise UndecidedError("the expressions are too large to compare")
            found = self._made[key] = Language(kind, parts, has_empty)
        return found

    def joined(self, first: Language, rest: Language) -> Language:
        if first is self.nothing or rest is self.nothing:
            return self.nothing
        if first is self.empty:
            return rest
        if rest is self.empty or first is rest is self.anything:
            return first
        if first.kind == "cat":
            return self.joined(first.parts[0], self.joined(first.parts[1], rest))
        return self._make("cat", (first, rest), first.has_empty and rest.has_empty)

    def union(self, options: list[Language]) -> Language:
        return self._several("or", options, self.nothing, self.anything)

    def intersection(self, parts: list[Language]) -> Language:
        return self._several("and", parts, self.anything, self.nothing)

    def _several(self, kind: str, given: list[Language], neutral: Language, final: Language) -> Language:
        self._num_parts += sum(len(each.parts) for each in given if each.kind == kind)
        if self.num_made >= self._limit:
            raise UndecidedError("the expressions are too large to compare")
        flat = [inner for each in given for inner in (each.parts if each.kind == kind else (each,))]
        parts = sorted({id(each): each for each in flat if each is not neutral}.values(), key=id)
        if any(each is final for each in parts):
            return final
        if kind == "and" and any(each is self.empty for each in parts):
            return self.empty if all(each.has_empty for each in parts) else self.nothing
        if kind == "or":
            sets = [each for each in parts if each.kind == "set"]
            if len(sets) > 1:
                merged = self._make("set", _ranges([every for each in sets for every in each.parts]), False)
                parts = sorted([merged, *(each for each in parts if each.kind != "set")], key=id)
        if len(parts) < 2:
            return parts[0] if parts else neutral
        has = [each.has_empty for each in parts]
        return self._make(kind, tuple(parts), any(has) if kind == "or" else all(has))

    def opposite(self, language: Language) -> Language:
        if language.kind == "not":
            found: Language = language.parts[0]
            return found
        if language is self.nothing or language is self.anything:
            return self.anything if language is self.nothing else self.nothing
        return self._make("not", (language,), not language.has_empty)

    def repeated(self, language: Language, least: int, most: int | None) -> Language:
        if most == 0 or language is self.empty:
            return self.empty
        if language is self.nothing:
            return self.empty if least == 0 else language
        if (least, most) == (1, 1) or (language.kind == "rep" and language.parts[1:] == (0, None)):
            return language
        return self._make("rep", (language, 0 if language.has_empty else least, most), not least or language.has_empty)

    def _translated(self, parsed: Parsed, rest: Language, at_start: bool | None, narrow: bool) -> Language:
        """Return the texts with a matching prefix and a remainder in `rest`. `at_start`: at the text's start; None:
        unknown.
        """
        match parsed:
            case ("set", *both):
                return self.joined(self._make("set", both[0 if narrow else 1], False), rest)
            case ("alt", options):
                return self.union([self._translated(each, rest, at_start, narrow) for each in options])
            case ("start",):
                if at_start is None:
                    raise UndecidedError("a beginning in the middle")
                return rest if at_start else self.nothing
            case ("end",):
                ends = self.empty if narrow else self.union([self.empty, self.text("\n")])
                return self.intersection([rest, ends])
            case ("look", inner, wanted):
                ahead = self._translated(inner, self.anything, at_start, narrow == wanted)
                return self.intersection([ahead if wanted else self.opposite(ahead), rest])
            case ("seq", items):
                starts = [at_start]
                for each in items[:-1]:
                    starts.append(starts[-1] if each[0] in ("start", "end", "look") else _after(each, starts[-1]))
                for each, start in zip(reversed(items), reversed(starts), strict=True):
                    rest = self._translated(each, rest, start, narrow)
                return rest
        _, inner, least, most = parsed
        if _is_plain(inner):
            return self.joined(self.repeated(self._translated(inner, self.empty, None, narrow), least, most), rest)
        if (least, most) == (1, 1):
            return self._translated(inner, rest, at_start, narrow)
        if (least, most) == (0, 1):
            return self.union([rest, self._translated(inner, rest, at_start, narrow)])
        return self._looking_at_each(inner, least, most, rest, narrow)

    def _looking_at_each(self, inner: Parsed, least: int, most: int | None, rest: Language, narrow: bool) -> Language:
        """Translate `(?:(?!…).)*` and `(?:.(?!…))*`. If narrow, the refused text occurs nowhere in the remaining
        text.
        """
        items = inner[1] if inner[0] == "seq" and len(inner[1]) == 2 else []
        looks = [each for each in items if each[0] == "look" and not each[2] and _is_plain(each[1])]
        chars = [each for each in items if each[0] == "set"]
        if not looks or not chars:
            raise UndecidedError("a condition in a repetition")
        many = self.joined(self.repeated(self._translated(chars[0], self.empty, None, narrow), least, most), rest)
        if not narrow:
            return many
        refused = self._translated(looks[0][1], self.anything, None, False)
        if items[0] is chars[0]:
            refused = self.joined(self.character, refused)
        refused = self.intersection([refused, self.joined(self.character, self.anything)])
        return self.intersection([many, self.opposite(self.joined(self.anything, refused))])

    def derivative(self, language: Language, code: int) -> Language:
        """Return the derivative: what may follow this character."""
        self._num_parts += 1
        if self.num_made >= self._limit:
            raise UndecidedError("the expressions are too large to compare")
        key = (id(language), code)
        if (found := self._derived.get(key)) is None:
            found = self._derived[key] = self._derive(language, code)
        return found

    def _derive(self, language: Language, code: int) -> Language:
        parts = language.parts
        match language.kind:
            case "set":
                return self.empty if any(low <= code <= high for low, high in parts) else self.nothing
            case "empty":
                return self.nothing
            case "or":
                return self.union([self.derivative(each, code) for each in parts])
            case "and":
                return self.intersection([self.derivative(each, code) for each in parts])
            case "not":
                return self.opposite(self.derivative(parts[0], code))
            case "cat":
                first, rest = parts
                after = self.joined(self.derivative(first, code), rest)
                return self.union([after, self.derivative(rest, code)]) if first.has_empty else after
        inner, least, most = parts
        fewer = self.repeated(inner, max(least - 1, 0), None if most is None else most - 1)
        return self.joined(self.derivative(inner, code), fewer)


def _after(parsed: Parsed, at_start: bool | None) -> bool | None:
    """Return whether what follows is at the start of the text."""
    match parsed:
        case ("set", *_):
            return False
        case ("rep", inner, least, _):
            return _after(inner, at_start) if least else None if at_start is not False else False
        case ("seq", items):
            for each in items:
                at_start = _after(each, at_start)
            return at_start
        case ("alt", options):
            found = {_after(each, at_start) for each in options}
            return found.pop() if len(found) == 1 else None
    return at_start


def _is_plain(parsed: Parsed) -> bool:
    """Return whether the expression has no conditions on its position."""
    match parsed:
        case ("seq" | "alt", items):
            return all(map(_is_plain, items))
        case ("rep", inner, *_):
            return _is_plain(inner)
    return bool(parsed[0] == "set")


@dataclass(frozen=True)
class _Automaton:
    """An automaton. States are numbers starting with 0, without dead states."""

    steps: dict[int, dict[int, Ranges]]
    ends: frozenset[int]


def _automaton(languages: Languages, language: Language, until_found: bool = False) -> _Automaton:
    """Build the automaton of a language. `until_found`: stop at the first accepting state."""
    pieces = _pieces(language)
    numbers, states = {id(language): 0}, [language]
    steps: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for number, state in enumerate(states):  # `states` grows
        if until_found and state.has_empty:
            break
        steps[number] = defaultdict(list)
        for piece in pieces:
            after = languages.derivative(state, piece[0][0])
            if after is languages.nothing:
                continue
            if id(after) not in numbers:
                if len(states) >= MAX_STATES:
                    raise UndecidedError("the expressions are too large to compare")
                numbers[id(after)] = len(states)
                states.append(after)
            steps[number][numbers[id(after)]] += piece
    ends = {number for number, state in enumerate(states) if state.has_empty}
    alive, before = set(ends), -1
    while len(alive) != before:
        before = len(alive)
        alive |= {number for number, nexts in steps.items() if nexts.keys() & alive}
    kept = {
        number: {after: _ranges(found) for after, found in nexts.items() if after in alive}
        for number, nexts in steps.items()
        if number in alive
    }
    return _Automaton(kept, frozenset(ends))


def _pieces(language: Language) -> list[list[tuple[int, int]]]:
    """Partition the characters into classes that no set in the language distinguishes."""
    sets: dict[Ranges, None] = {}
    stack, seen = [language], set()
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each.kind == "set":
            sets[each.parts] = None
        else:
            stack += [part for part in each.parts if isinstance(part, Language)]
    everything = _all_but(())
    edges = sorted({edge for given in (*sets, everything) for low, high in given for edge in (low, high + 1)})
    if len(edges) * len(sets) > 10 * MAX_NODES:
        raise UndecidedError("the expressions have too many classes of characters")
    found: dict[tuple[bool, ...], list[tuple[int, int]]] = defaultdict(list)
    for low, after in pairwise(edges):
        if not _SURROGATES[0] <= low <= _SURROGATES[1]:
            found[tuple(any(a <= low <= b for a, b in given) for given in sets)].append((low, after - 1))
    return list(found.values())


def _written(automaton: _Automaton) -> str | None:
    """Write an automaton as an expression by eliminating its states, or return None if it accepts nothing."""
    if 0 not in automaton.steps:
        return None
    arrows: dict[int, dict[int, str]] = {-1: {0: ""}}  # -1: before the first state, -2: after the last
    for state, nexts in automaton.steps.items():
        arrows[state] = {after: _class(found) for after, found in nexts.items()}
        if state in automaton.ends:
            arrows[state][-2] = ""
    into: dict[int, set[int]] = defaultdict(set)
    for state, outs in arrows.items():
        for after in outs:
            into[after].add(state)
    while len(arrows) > 1:
        state = min(arrows.keys() - {-1}, key=lambda each: _cost(each, len(into[each]), arrows[each]))
        outs = arrows.pop(state)
        loop = outs.pop(state, None)
        again = "" if loop is None else f"{_grouped(loop)}*"
        for after in outs:
            into[after].discard(state)
        for before in into.pop(state) - {state}:
            first = arrows[before].pop(state)
            for after, then in outs.items():
                path = _in_row(first) + again + _in_row(then)
                there = arrows[before].get(after)
                arrows[before][after] = path if there is None else _either(there, path)
                if len(arrows[before][after]) > MAX_WRITTEN:
                    raise UndecidedError("the expression would be too long")
                into[after].add(before)
    return f"^{_in_row(arrows[-1][-2])}$"


def _cost(state: int, num_before: int, outs: dict[int, str]) -> tuple[int, int]:
    """Order of elimination: chains of states first, from their ends, so that expressions nest."""
    return (0, -state) if num_before == 1 else (num_before * (20 + sum(map(len, outs.values()))), state)


def _class(found: Ranges) -> str:
    others = _all_but(found)
    negated, members = (False, found) if len(found) <= len(others) else (True, others)
    if not members:
        return r"[\s\S]"
    texts = [_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in members]
    if len(texts) == 1 and not negated and members[0][0] == members[0][1]:
        return texts[0]
    return f"[{'^' if negated else ''}{''.join(texts)}]"


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char in "_ ") else f"\\x{{{code:x}}}"


def _either(one: str, other: str) -> str:
    if not one or not other:
        return f"{_grouped(one or other)}?" if one or other else ""
    return f"{one}|{other}"


def _is_one(text: str) -> bool:
    if re.fullmatch(r"\\x\{[0-9a-f]+\}|[0-9A-Za-z_ ]|\[(?:[^\]\\]|\\.)*\]", text):
        return True
    if not text.startswith("(?:"):
        return False
    level = 0
    for at, char in enumerate(text):
        level += (char == "(") - (char == ")")  # literal parentheses are written as codes
        if not level:
            return at == len(text) - 1
    return False


def _grouped(text: str) -> str:
    return text if _is_one(text) else f"(?:{text})"


def _in_row(text: str) -> str:
    level = 0
    for char in text:
        level += (char == "(") - (char == ")")
        if char == "|" and not level:
            return f"(?:{text})"
    return text


class Texts:
    """Answers questions about expressions, with at most `work_left` languages and derivatives in total."""

    def __init__(self, work_left: int = MAX_WORK) -> None:
        self.work_left = work_left
        self._answers: dict[Any, Any] = {}

    def pattern(self, wanted: Sequence[str], refused: Sequence[str] = ()) -> str | None:
        """Return an expression without lookaround for the texts that match all of `wanted` and none of `refused`.

        Returns `NOTHING` if there are none, and None if it cannot be determined.
        """

        def work(languages: Languages) -> str:
            parts = [languages.of(each, narrow=True) for each in wanted]
            parts += [languages.opposite(languages.of(each, narrow=False)) for each in refused]
            return _written(_automaton(languages, languages.intersection(parts))) or NOTHING

        found: str | None = self._answer((tuple(wanted), tuple(refused)), work)
        return found

    def is_plain(self, pattern: str) -> bool:
        """Return whether all dialects certainly match the same texts."""

        def work(languages: Languages) -> bool:
            narrow = languages.opposite(languages.of(pattern, narrow=True))
            doubtful = languages.intersection([languages.of(pattern, narrow=False), narrow])
            return not _automaton(languages, doubtful, until_found=True).ends

        return bool(self._answer((pattern, "plain"), work))

    def are_disjoint(self, one: str, other: str) -> bool:
        """Return whether certainly no text matches both."""

        def work(languages: Languages) -> bool:
            both = languages.intersection([languages.of(each, narrow=False) for each in (one, other)])
            return not _automaton(languages, both, until_found=True).ends

        return bool(self._answer((one, other), work))

    def refuses(self, pattern: str, text: str) -> bool:
        """Return whether the text certainly does not match."""

        def work(languages: Languages) -> bool:
            language = languages.of(pattern, narrow=False)
            for char in text:
                language = languages.derivative(language, ord(char))
            return not language.has_empty

        return bool(self._answer((pattern, (text,), "text"), work))

    def _answer(self, key: Any, work: Callable[[Languages], Any]) -> Any:
        if key not in self._answers:
            self._answers[key] = None
            if self.work_left <= FIRST:
                return None
            languages = Languages(min(self.work_left, MAX_NODES))
            with contextlib.suppress(UndecidedError, RecursionError):
                self._answers[key] = work(languages)
            self.work_left -= languages.num_made
        return self._answers[key]
