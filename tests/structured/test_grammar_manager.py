"""Grammars followed token by token, and the masks of many of them at once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from engine.structured import grammar, grammar_manager
from engine.structured.grammar import Compiler, Vocabulary, lark_grammar, regex_grammar
from engine.structured.grammar_manager import GrammarManager
from tests.support.walks import END, TOKENS

WORDS = 9  # 258 tokens


def follow(compiler: Compiler, names: list[str]) -> GrammarManager[str]:
    followed = GrammarManager[str](compiler)
    for i, name in enumerate(names):
        followed.add(name, regex_grammar(f"[a-{'klmnop'[i % 6]}]{{5,60}}[0-{i % 10}]+"), name)
    ready: list[str] = []
    while followed.num_held:
        compiled, errors = followed.take_compiled(idle=True)
        assert not errors
        ready += compiled
    assert sorted(ready) == sorted(names)
    return followed


def allowed(row: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_are_the_same_by_either_method(
    compiler: Compiler, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_manager, "FEW", 4)
    monkeypatch.setattr(grammar_manager, "MAX_THREADS", num_threads)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    names = [f"request-{i}" for i in range(12)]
    many, rng = follow(compiler, names), random.Random(0)
    alone = [follow(compiler, names) for _ in names]  # of each, one is asked: fewer than are filled by several threads
    methods = set()
    for _ in range(40):
        masks = np.zeros((len(names), WORDS), dtype=np.int32)
        assert many.fill(names, masks) == ([], {})
        methods.add((many._fill._alone.seconds > 0, many._fill._together.seconds > 0))
        for i, name in enumerate(names):
            single = np.zeros((1, WORDS), dtype=np.int32)
            assert alone[i].fill([name], single) == ([], {})
            assert np.array_equal(single[0], masks[i])
            token = rng.choice(allowed(masks[i]))
            many.advance(name, [token])
            alone[i].advance(name, [token])
    assert methods == {(True, False), (True, True)}, "both methods were tried"


def test_the_slower_method_is_tried_again(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager, "FEW", 4)
    names = [str(i) for i in range(4)]
    followed = follow(compiler, names)
    taken: list[str] = []
    clock = [0.0]

    def fill(name: str, seconds: list[float]) -> grammar_manager._Method:
        def method(found: object, masks: np.ndarray) -> None:
            taken.append(name)
            clock[0] += seconds[0]

        return grammar_manager._Method(method)

    monkeypatch.setattr(grammar_manager, "perf_counter", lambda: clock[0])
    alone, together = [1.0], [5.0]
    followed._fill._alone, followed._fill._together = fill("alone", alone), fill("together", together)
    masks = np.zeros((4, WORDS), dtype=np.int32)
    for _ in range(100):
        followed.fill(names, masks)
    assert taken[:2] == ["alone", "together"]
    assert taken.count("together") == 4, "at the beginning, and after 8, 16 and 32 more"
    together[0] = 0.01
    for _ in range(1000):
        followed.fill(names, masks)
    assert taken[-50:] == ["together"] * 50


@pytest.mark.parametrize("together", [False, True])
def test_requests_not_followed_may_have_all_tokens_and_errors_are_reported(compiler: Compiler, together: bool) -> None:
    names = ["good", "bad"]
    followed = follow(compiler, names)
    if together:
        followed._fill._alone = followed._fill._together
    followed.advance("bad", [ord("!")])
    masks = np.zeros((3, WORDS), dtype=np.int32)
    late_rows, errors = followed.fill(["stranger", *names], masks)
    assert late_rows == []
    assert masks[0].tolist() == [-1] * WORDS
    assert allowed(masks[1]) == list(range(ord("a"), ord("k") + 1))
    assert list(errors) == ["bad"]
    assert "doesn't satisfy the grammar" in errors["bad"]


@pytest.mark.parametrize("limits", [LLParserLimits(max_items_in_row=30), LLParserLimits(step_max_items=200)])
def test_a_grammar_that_outgrows_its_limits_on_the_way(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more has been written, the more ways there are to read it."""
    monkeypatch.setattr(grammar, "_LIMITS", limits)
    followed = GrammarManager[str](Compiler(lambda: Vocabulary(TOKENS, [256, END], [END])))
    followed.add("a", lark_grammar('start: s\ns: s s | "a" | "b" | /[a-z ]/'), "a")
    while followed.num_held:
        assert not followed.take_compiled(idle=True)[1]
    masks, errors, num_tokens = np.zeros((1, WORDS), dtype=np.int32), dict[str, str](), 0
    while not errors and num_tokens < 100:
        _, errors = followed.fill(["a"], masks)
        assert not followed.advance("a", [ord("a")])
        num_tokens += 1
    assert num_tokens > 5
    assert "too many things may come next" in errors["a"]


def test_by_a_deadline_masks_are_filled_round_robin(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(i) for i in range(16)]
    followed = follow(compiler, names)
    masks = np.zeros((16, WORDS), dtype=np.int32)
    assert followed.fill(names, masks, by_deadline=True) == ([], {}), "nothing is known to be slow"
    followed._fill._alone.seconds = followed._fill._together.seconds = 0.001
    followed._seconds_spent = 0.016
    for _ in range(3):
        followed.learn_deadline(missed=True, seconds_left=0.0)
    seen = [0] * 16
    for _ in range(8):
        monkeypatch.setattr(followed._fill, "_until_trial", 1000)
        followed._fill._alone.seconds = 0.001
        late_rows, _ = followed.fill(names, masks, by_deadline=True)
        assert len(late_rows) == 16 - int(0.0144 * 0.9**2 / 0.001)
        for i in late_rows:
            seen[i] += 1
    assert max(seen) - min(seen) <= 1, "all wait equally often"
    for _ in range(100):
        followed.learn_deadline(missed=True, seconds_left=0.0)
    late_rows, _ = followed.fill(names, masks, by_deadline=True)
    assert len(late_rows) == 12, "some are filled, however little time there is"
    assert followed.fill(names, masks) == ([], {}), "without a deadline all are"
    followed._seconds_spent = 0.004
    followed.learn_deadline(missed=False, seconds_left=0.0126)
    followed._fill._alone.seconds = 0.001
    late_rows, _ = followed.fill(names, masks, by_deadline=True)
    assert len(late_rows) == 2, "the device was busy for long enough for 10 more"
    followed._seconds_spent = 0.014
    followed.learn_deadline(missed=False, seconds_left=0.01)
    followed._fill._alone.seconds = 0.001
    assert followed.fill(names, masks, by_deadline=True) == ([], {})


def test_forced_tokens_come_at_once(compiler: Compiler) -> None:
    followed = GrammarManager[str](compiler)
    followed.add("a", regex_grammar("(hello|help) the world[.]!"), "a")
    while followed.num_held:
        followed.take_compiled(idle=True)
    masks, text = np.zeros((1, WORDS), dtype=np.int32), ""
    computed = 0
    while allowed(masks[0]) != [257]:
        computed += not followed._followed["a"].forced
        assert followed.fill(["a"], masks) == ([], {})
        if (token := allowed(masks[0])[-1]) < 256:
            text += chr(token)
            followed.advance("a", [token])
    assert text == "help the world.!"
    assert computed <= 4


def test_a_grammar_is_compiled_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = [regex_grammar(f"[a-c]{{3}}{i}") for i in range(3)]
    first = [compiler.compile(grammar) for grammar in grammars]
    first[0].consume_token(ord("a"))
    followed = GrammarManager[str](compiler)
    for i, written in enumerate(grammars):
        followed.add(str(i), written, f"request {i}")
    assert followed.take_compiled() == (["request 0", "request 1", "request 2"], {}), "cached grammars are not compiled"
    assert not followed._compile_thread.release(), "there is no thread"
    monkeypatch.setattr("engine.structured.grammar.MAX_COMPILED_LENGTH", len(grammars[0]))
    compiler.compile(regex_grammar("[x-z]"))
    assert [compiler.cached(grammar) for grammar in grammars] == [None] * 3, "what is kept is bounded"
    assert compiler._num_characters == sum(map(len, compiler._compiled)) <= len(grammars[0])
    masks = np.zeros((3, WORDS), dtype=np.int32)
    assert followed.fill(["0", "1", "2"], masks) == ([], {})
    assert allowed(masks[0]) == [97, 98, 99], "each begins at the beginning"


def test_a_grammar_that_cannot_be_compiled_fails_alone(compiler: Compiler) -> None:
    manager = GrammarManager[str](compiler)
    manager.add("good", regex_grammar("[a-c]{3}7"), "the good one")
    manager.add("bad", '{"grammars": [{"lark_grammar": "start: nowhere"}]}', "the bad one")
    ready: list[str] = []
    errors: dict[str, str] = {}
    while manager.num_held:
        compiled, failed = manager.take_compiled(idle=True)
        ready += compiled
        errors |= failed
    assert ready == ["the good one"]
    assert list(errors) == ["bad"]
    assert "nowhere" in errors["bad"]
    assert manager.num_followed == 1
    assert list(manager._weights) == ["good"]
    assert not manager.remove("good"), "it was not held any more"
    assert manager.num_followed == 0


class Panic(BaseException):
    """Panic as the library's in Rust: no `Exception`."""


def test_a_grammar_that_panics_is_told_apart(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c"]
    manager = follow(compiler, names)
    bad = manager._followed["b"].matcher

    def fill(wanted: Any, masks: np.ndarray) -> None:
        if any(followed.matcher is bad for followed, _ in wanted):
            raise Panic("index out of bounds")
        for _, i in wanted:
            masks[i] = 7

    monkeypatch.setattr(manager._fill._alone, "fill", fill)
    masks = np.zeros((3, WORDS), dtype=np.int32)
    assert manager.fill(names, masks) == ([], {"b": "index out of bounds"})
    assert masks[:, 0].tolist() == [7, -1, 7], "the others' masks are filled, and its own forbids nothing"


def test_a_grammar_that_panics_at_a_token(compiler: Compiler) -> None:
    manager = follow(compiler, ["a", "b"])

    class Panicking:
        def is_stopped(self) -> bool:
            raise Panic("unreachable")

    manager._followed["b"].matcher = Panicking()  # type: ignore[assignment]
    assert manager.advance("a", [107]) == ""
    assert manager.advance("b", [108]) == "unreachable"
    assert manager.advance("unknown", [108]) == ""


def test_large_grammars_of_one_tenant_hold_no_other(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager, "MAX_WEIGHT", 200)
    followed = GrammarManager[str](compiler)
    for i in range(4):
        followed.add(f"a{i}", regex_grammar("[ab]{30}" + "x" * 60), f"a{i}", "key a")
    for name, tenant in (("b", "key b"), ("c", "address 1/user c"), ("d", "address 1/user d")):
        followed.add(name, regex_grammar("[ab]{20}" + "y" * 60), name, tenant)

    def compiled() -> list[str]:
        found: list[str] = []
        while any(held.matcher is not None for held in followed._held.values()):
            ready, errors = followed.take_compiled(idle=True)
            assert not errors
            found += ready
        return sorted(found)

    assert compiled() == ["a0", "b", "c"], "one of each group: the user d shares the address of c"
    followed.remove("b")
    assert compiled() == [], "the others still fill the room"
    followed.remove("a0")
    assert compiled() == ["a1"]
    for name in ("a1", "c"):
        followed.remove(name)
    assert len(compiled()) == 2
    for name in ("a2", "a3", "d"):
        followed.remove(name)
    assert not followed._weights
    assert not followed.num_held


@pytest.mark.parametrize("seed", range(8))
def test_masks_after_drafts_are_those_of_a_grammar_that_has_taken_them(compiler: Compiler, seed: int) -> None:
    rng, names = random.Random(seed), [f"request-{seed}"]
    drafted, history = follow(compiler, names), list[int]()
    for _ in range(15):
        drafts, expected = list[int](), []
        taken = follow(compiler, names)
        for token in history:
            taken.advance(names[0], [token])
        for _ in range(4):  # drafts that are allowed, but for some
            mask = np.zeros((1, WORDS), dtype=np.int32)
            taken.fill(names, mask)
            expected.append(mask[0])
            right = allowed(mask[0])
            drafts.append(rng.choice(right) if rng.random() < 0.9 else 7)
            if drafts[-1] not in right:
                break
            taken.advance(names[0], drafts[-1:])
        masks = np.zeros((len(drafts) + 1, WORDS), dtype=np.int32)
        befores = [drafts[:number] for number in range(len(drafts) + 1)]
        assert drafted.fill(names * len(befores), masks, drafts=befores) == ([], {})
        for mask, wanted in zip(masks, expected, strict=False):
            assert np.array_equal(mask, wanted)
        kept = drafts[: rng.randint(0, len(expected) - 1)] or [rng.choice(allowed(expected[0]))]
        drafted.advance(names[0], kept)
        history += kept


def test_masks_after_drafts_are_late_with_the_first_one(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager, "LEAST", 1)
    names = ["a", "b"]
    followed = follow(compiler, names)
    monkeypatch.setattr(followed._fill, "number_in", lambda seconds: 0)
    masks = np.zeros((4, WORDS), dtype=np.int32)
    late, errors = followed.fill(["a", "a", "b", "b"], masks, by_deadline=True, drafts=[[], [3], [], [3]])
    assert errors == {}
    assert len(late) == 3, "one first mask is filled"
    assert {1, 3} <= set(late)
