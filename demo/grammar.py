"""Templates to text: `[a|b]` choices and `{slot}` values, and the way people type."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

Item = TypeVar("Item")

# Marks in a typed message: a kept piece never gets a typo, an exact piece is never touched at all.
KEEP, EXACT = "\x00", "\x01"


def pick(rng: random.Random, items: Sequence[Item]) -> Item:
    return items[int(rng.random() * len(items))]


def chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def held_out(value: object, parts: int = 10) -> bool:
    """Is a slot value (a name, a pair of numbers) held out from training? One in `parts` is, the same in every run."""
    return zlib.crc32(repr(value).encode()) % parts == 0


class Choice:
    """One of several sequences of nodes."""

    __slots__ = ("options",)

    def __init__(self, options: list[list[Any]]) -> None:
        self.options = options


class Slot:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@cache
def parse(template: str) -> list[Any]:
    """A template as a list of strings, slots and choices. Raises ValueError on unbalanced brackets."""
    sequence, rest = _parse_sequence(template, 0, closing="")
    assert rest == len(template)
    return sequence


def _parse_sequence(template: str, at: int, closing: str) -> tuple[list[Any], int]:
    sequence: list[Any] = []
    literal = ""
    while at < len(template) and template[at] not in closing:
        char = template[at]
        if char not in "[{":
            literal += char
            at += 1
            continue
        if literal:
            sequence.append(literal)
            literal = ""
        if char == "{":
            end = template.find("}", at)
            if end < 0:
                raise ValueError(f"no closing brace: {template}")
            sequence.append(Slot(template[at + 1 : end]))
            at = end + 1
        else:
            options = []
            while template[at] != "]":
                option, at = _parse_sequence(template, at + 1, closing="|]")
                if at >= len(template):
                    raise ValueError(f"no closing bracket: {template}")
                options.append(option)
            sequence.append(Choice(options))
            at += 1
    if literal:
        sequence.append(literal)
    return sequence, at


def render(rng: random.Random, template: str, slots: Mapping[str, object], mark: str = "") -> str:
    """One text of a template. `mark` is put around slot values, except around those that hold marks already."""
    parts: list[str] = []
    _render(rng, parse(template), slots, mark, parts)
    return "".join(parts)


def _render(rng: random.Random, sequence: list[Any], slots: Mapping[str, object], mark: str, parts: list[str]) -> None:
    for node in sequence:
        if type(node) is str:
            parts.append(node)
        elif type(node) is Choice:
            options = node.options
            _render(rng, options[int(rng.random() * len(options))], slots, mark, parts)
        else:
            value = str(slots[node.name])
            parts.append(value if not mark or KEEP in value or EXACT in value else mark + value + mark)


def sentence_case(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """The noun with a or an."""
    first = noun[0].lower()
    vowel = first in "aeio" or (first == "u" and not noun.startswith(("uni", "use", "uk")))
    return f"{'an' if vowel and not noun.startswith(('one', 'euro')) else 'a'} {noun}"


def join(items: Sequence[str], last: str = "and") -> str:
    """a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}"


class Typist:
    """Typing habits of one person: case, punctuation, typos. Applied to text with marks; returns text without them."""

    __slots__ = ("loud", "lower", "no_apostrophes", "no_commas", "no_end", "typos")

    def __init__(self, rng: random.Random) -> None:
        style = rng.random()
        careless = style > 0.55
        self.lower = careless and chance(rng, 0.85)
        self.no_end = careless and chance(rng, 0.75)
        self.no_commas = careless and chance(rng, 0.5)
        self.no_apostrophes = careless and chance(rng, 0.4)
        self.typos = 0.06 if style > 0.88 else 0.0
        self.loud = style < 0.012

    def type(self, rng: random.Random, text: str) -> str:
        pieces = text.replace(EXACT, f"{KEEP}{EXACT}{KEEP}").split(KEEP) if EXACT in text else text.split(KEEP)
        typed: list[str] = []
        exact = False
        for index, piece in enumerate(pieces):
            if piece == EXACT:
                exact = not exact
                continue
            if exact:
                typed.append(piece)
                continue
            # Marks come in pairs and never nest, so a piece at an odd place is a kept one, unless exact marks stand
            # before it: each of those adds two splits, which leaves the parity as it was.
            if self.lower:
                piece = piece.lower()
            elif self.loud:
                piece = piece.upper()
            if index % 2 == 0:
                if self.no_apostrophes:
                    piece = piece.replace("'", "")
                if self.no_commas:
                    piece = piece.replace(",", "")
                if self.typos:
                    piece = " ".join(
                        misspell(rng, word) if chance(rng, self.typos) else word for word in piece.split(" ")
                    )
            typed.append(piece)
        ends_exact = pieces[-1] == "" and len(pieces) > 1 and pieces[-2] == EXACT
        result = "".join(typed)
        if not ends_exact:
            result = result.rstrip(".!?") if self.no_end and result.rstrip(".!?") else result
        return result


def misspell(rng: random.Random, word: str) -> str:
    """The word with one letter swapped, lost, doubled or wrong; short words stay."""
    if len(word) < 4 or not word.isascii() or not word.isalpha():
        return word
    at = 1 + int(rng.random() * (len(word) - 2))
    kind = int(rng.random() * 4)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    return word[:at] + pick(rng, "abcdefghijklmnopqrstuvwxyz") + word[at + 1 :]


ONSETS = "b bl br c ch cl d dr f fl g gl gr h j k kl l m n p pl qu r s sh sk sl st t th tr v w y z"
VOWELS = "a e i o u a e i o ai ea ee ia io oo ou"
CODAS = ["", "", "", "", "l", "m", "n", "r", "s", "t", "k", "x", "nd", "rt", "ck", "sh"]


def made_up_word(rng: random.Random, syllables: int = 0) -> str:
    """A word that does not exist but could be said."""
    count = syllables or pick(rng, (1, 2, 2, 2, 3))
    return "".join(pick(rng, ONSETS.split()) + pick(rng, VOWELS.split()) + pick(rng, CODAS) for _ in range(count))
