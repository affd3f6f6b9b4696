"""Regular expressions, choices and context-free grammars; and what is too much of each."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from engine.processing.grammars import vocabulary_of
from engine.structured.compile_threads import make_executor
from engine.structured.grammar import (
    Compiler,
    Vocabulary,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    text_grammar,
)
from engine.structured.lark import bounded
from engine.structured.regex import portable
from engine.text.tokenizer import Tokenizer
from tests.support.walks import END, TOKENS, allowed_by, walk


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{2}", r"[^\d\s]{4}", r"\W\D\S", r"(a|bc)*d?", r"[\w.]+@[\w]+\.(com|org)", "é+[à-ü]?", r"a{,3}b{2,}",
        r"{x}", r"[[\]&-]{3}", r"^abc$", r"\/\.\-\"", r"(?i)yes|no", "line\nbreak", r"\u00e9\x41",
        r"(?P<y>\d\d)(?:x|y)",
        r"[^a-z]{2}", r".{3}", r"\<b\>",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Possible (nested set|set intersection|set difference):FutureWarning")
def test_regex_sentences_match(pattern: str, compiler: Compiler) -> None:
    compiler.check(regex_grammar(pattern))
    matcher = compiler.compile(regex_grammar(pattern))
    python = pattern.replace("{,3}", "{0,3}").replace(r"\<", "<").replace(r"\>", ">")
    for seed in range(10):
        text = walk(matcher, random.Random(seed))
        assert text is not None
        assert re.fullmatch(python, text, re.DOTALL if "\n" in pattern else 0), text


@pytest.mark.parametrize(
    ("pattern", "translated"),
    [
        (r"[\d\D]", r"[0-9[^\p{Nd}]]"),
        (r"[^\w]", r"[^\p{L}\p{M}\p{N}\p{Pc}]"),
        ("[]a]", r"[\]a]"),
        ("[^]a]", r"[^\]a]"),
        ("a{b}", r"a\{b\}"),
        (r"\p{L}\u{1F600}", r"\p{L}\u{1F600}"),
        ("[a", "[a"),
        ("a\\", "a\\"),
    ],
)
def test_translation(pattern: str, translated: str) -> None:
    assert portable(pattern) == translated


def test_choices(compiler: Compiler) -> None:
    choices = ["yes", "yes, but", "no", 'quo"te', "new\nline", "日本", "🙂", "back\\slash", "a" * 300]
    matcher = compiler.compile(choice_grammar(choices))
    found = {walk(matcher, random.Random(seed)) for seed in range(200)}
    assert found == set(choices)


def test_lark_and_gbnf(compiler: Compiler) -> None:
    lark = 'start: "x" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,3}/'
    gbnf = 'root ::= "x" number ("," number)*\nnumber ::= [0-9] [0-9]?'
    for grammar in (lark, gbnf):
        compiler.check(lark_grammar(grammar))
        matcher = compiler.compile(lark_grammar(grammar))
        for seed in range(10):
            assert re.fullmatch(r"x\d{1,3}(,\d{1,3})*", walk(matcher, random.Random(seed)) or "")


def test_lark_with_a_schema_inside(compiler: Compiler) -> None:
    grammar = (
        'start: "<call>" call "</call>"\ncall: %json {"type": "object", "properties": {"a": {"type": "integer"}},\n'
    )
    grammar += ' "required": ["a"], "additionalProperties": false}  // that is all\n'
    compiler.check(lark_grammar(grammar))
    text = walk(compiler.compile(lark_grammar(grammar)), random.Random(1)) or ""
    assert isinstance(json.loads(text.removeprefix("<call>").removesuffix("</call>"))["a"], int)
    with pytest.raises(ValueError, match="multipleOf"):
        bounded('start: %json {"multipleOf": 1e-7}')
    with pytest.raises(ValueError, match="begins with a rule"):
        lark_grammar('{"grammars": [{"json_schema": {}}]}')
    with pytest.raises(ValueError, match="%json must be followed by JSON"):
        bounded("start: %json {")


def test_the_end_comes_when_the_grammar_allows_it(compiler: Compiler) -> None:
    matcher = compiler.compile(regex_grammar("ab?"))
    assert allowed_by(matcher) == [ord("a")]
    matcher.consume_token(ord("a"))
    assert allowed_by(matcher) == [ord("b"), END]
    matcher.consume_token(ord("b"))
    assert allowed_by(matcher) == [END]


def test_every_end_of_text_counts() -> None:
    compiler = Compiler(lambda: Vocabulary([b"a", b"b", b"<1>", b"<2>", b""], [2, 3], [2, 3]))
    matcher = compiler.compile(regex_grammar("a*"))
    assert allowed_by(matcher) == [0, 2, 3]
    none = Compiler(lambda: Vocabulary([b"a"], [], []))
    with pytest.raises(ValueError, match="no end of text"):
        none.compile(regex_grammar("a"))


def test_forced_text_has_the_tokens_that_the_model_has_learned(demo_model: Path) -> None:
    """If a grammar leaves no choice, a model must not be made to spell."""
    tokenizer = Tokenizer.from_folder(demo_model)
    compiler = Compiler(lambda: vocabulary_of(tokenizer, 3072, [2]))
    schema = {"const": {"location": "San Francisco", "number_of_days": 3, "größe": "👋"}}
    matcher = compiler.compile(json_grammar(schema))
    for token in tokenizer.encode('{"location": "San Francisco", "number_of_days": 3, "größe": "👋"}'):
        assert int.from_bytes(matcher.compute_bitmask(), "little") >> token & 1, tokenizer.token_text(token)
        matcher.consume_token(token)
    assert matcher.is_accepting()


def test_vocabularies_that_begin_texts_with_a_space() -> None:
    tokens = [b"</s>", b" name", b"name", b" ", b"\x02", *(bytes([byte]) for byte in b"name")]

    def encode(text: str) -> list[int]:
        return [1] if text == "name" else [3, 4, 2]

    matcher = Compiler(lambda: Vocabulary(tokens, [0], [0], encode)).compile(choice_grammar(["name"]))
    assert allowed_by(matcher) == [2]
    matcher = Compiler(lambda: Vocabulary(tokens, [0], [0], lambda _: [1])).compile(choice_grammar(["name"]))
    assert allowed_by(matcher) == [5], "without a way to write it, byte by byte"


def optional(inner: Any, _: int) -> Any:
    return {"type": "object", "properties": {"a": inner, "b": inner}}


def minimum(inner: Any, _: int) -> Any:
    return {"type": "array", "minItems": 1000, "items": inner}


def chain(num: int, last: str, link: Callable[[int], str]) -> str:
    return "start: R0\n" + "\n".join(f"R{i}: {link(i + 1)}" for i in range(num)) + f"\nR{num}: {last}"


def properties(num: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(num)}}


def references(num: int) -> Any:
    defs: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"minLength": 1}]} for i in range(num)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{num}": {"type": "string"}}}


def condition(otherwise: Any, _: int) -> Any:
    known = {name: {"const": 1} for name in "abc"}
    given = {name: {"enum": [1, 2]} for name in "abc"}
    return {"type": "object", "properties": given, "if": {"properties": known}, "then": True, "else": otherwise}


def contained(inner: Any, _: int) -> Any:
    return {"type": "array", "contains": inner, "minContains": 16}


def either(one: Any, other: Any, *, often: int = 1) -> Any:
    """`often`: how many times each branch refers to what it is."""
    branches = [{"allOf": [{"$ref": f"#/$defs/{name}"}] * often} for name in ("one", "other")]
    return {"oneOf": branches, "$defs": {"one": one, "other": other}}


HOSTILE: dict[str, Callable[[], str]] = {
    "a repetition": lambda: regex_grammar("x{1000000000}"),
    "a repetition within bounds": lambda: regex_grammar("x{20000}"),
    "repetitions of repetitions": lambda: regex_grammar("(((((a{10}){10}){10}){10}){10}){10}"),
    "repetitions of words": lambda: regex_grammar("([a-z]+ ){0,10000}"),
    "optional letters": lambda: regex_grammar("[a-z]?" * 1600),
    "stars": lambda: regex_grammar("a*" * 4999),
    "stars of stars": lambda: regex_grammar("((a*)*)*b"),
    "a large automaton": lambda: regex_grammar("(.*a.{20})"),
    "two large automata": lambda: regex_grammar("(?s:.*)(a|b)(?s:.){300}(c|d)(?s:.){300}"),
    "brackets": lambda: regex_grammar("(" * 4999 + "a" + ")" * 4999),
    "megabytes of regex": lambda: regex_grammar("ab" * 1_000_000),
    "megabytes of schema": lambda: json_grammar({"enum": ["x" * 3_000_000]}),
    "a deep schema": lambda: json_grammar('{"items":' * 60 + "{}" + "}" * 60),
    "a very deep schema": lambda: json_grammar('{"items":' * 100_000 + "{}" + "}" * 100_000),
    "twice as large at each level": lambda: json_grammar(reduce(optional, range(10), {"type": "string"})),
    "properties": lambda: json_grammar(properties(1000)),
    "too many properties": lambda: json_grammar(properties(3000)),
    "values": lambda: json_grammar({"enum": list(range(10_000))}),
    "alternatives": lambda: json_grammar({"anyOf": [properties(1) | {"required": [f"p{i}"]} for i in range(900)]}),
    "references": lambda: json_grammar(references(380)),
    "too many references": lambda: json_grammar(references(5000)),
    "products": lambda: json_grammar({"allOf": [{"anyOf": [{"const": i}, {"minLength": i}]} for i in range(20)]}),
    "products of patterns": lambda: json_grammar({"allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(15)]}),
    "lengths": lambda: json_grammar({"type": "string", "minLength": 2**31 - 1}),
    "items": lambda: json_grammar(reduce(minimum, range(20), {"type": "null"})),
    "remainders": lambda: json_grammar({"type": "integer", "multipleOf": 997, "minimum": 1}),
    "long choices": lambda: choice_grammar(["x" * 10_000] * 10),
    "choices": lambda: choice_grammar([f"choice {i}" for i in range(5000)]),
    "too many choices": lambda: choice_grammar([str(i) for i in range(100_000)]),
    "ambiguity": lambda: lark_grammar('start: s\ns: s s | "a" | "b" | /[a-z ]/'),
    "a chain of terminals": lambda: lark_grammar(chain(200, '"a"', lambda i: f'R{i} "x"')),
    "terminals doubled": lambda: lark_grammar(chain(40, '"a"', lambda i: f"R{i} R{i}")),
    "rules doubled": lambda: lark_grammar(chain(40, '"a"', lambda i: f"R{i} R{i}").replace("R", "r")),
    "rules repeated": lambda: lark_grammar('start: (("a" "b"){1000}){1000}'),
    "terminals repeated": lambda: lark_grammar('start: X{1000}\nX: Y{1000}\nY: "a"{1000}'),
    "a regex in a rule": lambda: lark_grammar("start: /(x{1000}){1000}/"),
    "too many rules": lambda: lark_grammar("\n".join(f"r{i}: r{i + 1}" for i in range(5000))),
    "brackets in GBNF": lambda: lark_grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "an import": lambda: lark_grammar("%declare X\nstart: X"),
    "spaces in a count": lambda: lark_grammar('start: "a" {' + " " * 10_000 + "x"),
    "strings that are not closed": lambda: lark_grammar("start: " + '"\\' * 20_000),
    "expressions that are not closed": lambda: text_grammar("input", "start: " + "/\\" * 2_000_000),
    "blank lines of GBNF": lambda: lark_grammar('root ::= "a" |' + "\n" * 40_000 + '"b"'),
    "itself, over and over": lambda: json_grammar({"unevaluatedProperties": False, "allOf": [{"$ref": "#"}] * 5000}),
    "branches that are themselves": lambda: json_grammar(
        either(*({"allOf": [{"$ref": f"#/$defs/{name}"}] * 150} for name in ("one", "other")))
    ),
    "lists compared with lists": lambda: json_grammar(
        either({"enum": [[i] for i in range(5000)]}, {"enum": [[i] for i in range(4999, 9000)]}, often=50)
    ),
    "many times one of two": lambda: json_grammar(
        either(*[{"allOf": [{"required": [f"p{i}"]} for i in range(100)]}] * 2)
        | {"allOf": [{"oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}]}] * 60}
    ),
    "conditions in conditions": lambda: json_grammar(reduce(condition, range(20), {})),
    "contained in what is contained": lambda: json_grammar(reduce(contained, range(8), {})),
    "looking ahead": lambda: json_grammar({"type": "string", "pattern": "^" + "(?=a)" * 18_000}),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_bounded(name: str, compiler: Compiler) -> None:
    """Refused, or cheap enough for the next hundred tokens; in the threads that are there for it."""
    with make_executor(1) as executor:
        start, reason = time.process_time(), "none"
        try:
            grammar = HOSTILE[name]()
            executor.submit(compiler.check, grammar).result()
            matcher = executor.submit(compiler.compile, grammar).result()
        except ValueError as error:
            matcher, reason = None, str(error)
        assert time.process_time() - start < 20, "seconds; a half of one is usual"
        dice = random.Random(0)
        worst = 0.0
        for _ in range(100 if matcher is not None else 0):
            start = time.process_time()
            assert matcher is not None
            options = allowed_by(matcher)
            matcher.consume_token(dice.choice(options))
            worst = max(worst, time.process_time() - start)
            if matcher.is_stopped():
                break
        assert worst < 2, "seconds; 0.02 are usual"
        assert 0 < len(reason) < 500


def test_what_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(lambda: Vocabulary(TOKENS, [256, END], [END]))
    grammar = lark_grammar('start: (("a" "b"){1000}){1000}')
    for _ in range(2):
        with pytest.raises(ValueError, match="too many things may come next"):
            compiler.check(grammar)
        monkeypatch.setattr(compiler, "_build", None)


def test_compiling_lets_others_run(compiler: Compiler) -> None:
    """The library gives up Python's lock: a thread beside it goes on."""
    ticks = 0
    with make_executor(1) as executor:
        for count in range(4998, 4900, -1):  # no other test has it compiled
            work, ticks = executor.submit(compiler.compile, regex_grammar("b*" * count)), 0
            while not work.done():
                ticks += 1
                time.sleep(0.001)
            if ticks > 10:  # fewer when the machine has no time for this thread
                break
    assert ticks > 10
