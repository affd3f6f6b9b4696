from __future__ import annotations

import re
from itertools import product

import pytest

from engine.structured.languages import NOTHING, Texts

TEXTS = ["".join(letters) for length in range(6) for letters in product("ab-.", repeat=length)]


@pytest.mark.parametrize(
    ("wanted", "refused"),
    [
        ([], [r"\.\."]),
        (["^[ab]+$"], ["ab", "^b"]),
        ([r"^(?!\.)(?!.*\.\.)[ab.]*b$"], []),
        ([r"^((?!\.{2}).)*$"], []),
        (["^(a|b-){1,3}$", "b"], []),
        ([r"^(?=.*a)(?=.*b).{2,3}$"], ["^[^a-]"]),
    ],
)
def test_what_is_written_matches_the_same_texts(wanted: list[str], refused: list[str]) -> None:
    written = Texts().pattern(wanted, refused)
    assert written is not None
    python = re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: rf"\U{int(code[1], 16):08x}", written))
    for text in TEXTS:
        right = all(re.search(each, text) for each in wanted) and not any(re.search(each, text) for each in refused)
        assert bool(python.search(text)) == right, text


def test_languages_are_compared() -> None:
    texts = Texts()
    assert texts.are_disjoint("^[a-z]+$", "^[0-9]*$")
    assert not texts.are_disjoint("^[a-z]*$", "^[0-9]*$")
    assert not texts.are_disjoint(r"^\d$", "^\u0663$")  # a digit to some readers
    assert texts.refuses("^a+$", "ab")
    assert not texts.refuses("^a+$", "aa")
    assert texts.pattern(["^a", "^b"]) == NOTHING


@pytest.mark.parametrize(
    "pattern", ["^(a|b)*a(a|b){12}$", "(" * 500 + ")" * 500, "(a{1000}){1000}", "a{900}b{900}", r"(a)\1", "(?<=a)b"]
)
def test_what_is_too_large_or_unknown_is_not_decided(pattern: str) -> None:
    texts = Texts()
    assert texts.pattern([], [pattern]) is None
    assert texts.work_left >= 290_000


def test_work_on_a_document_is_bounded() -> None:
    texts = Texts(work_left=10)
    assert texts.pattern([], ["^abcdefgh"]) is None
    assert not texts.are_disjoint("^a", "^b")
