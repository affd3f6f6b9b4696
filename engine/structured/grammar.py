"""Builds grammars for llguidance from requests, compiles them for a vocabulary, and tries them out.

A compiled grammar is an `LLMatcher` at its initial state. Compiling and trying release Python's global lock, and their
cost is bounded: the library limits its own work, and the limits here keep inputs where that accounting is reliable.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from engine.structured.json_schema import MAX_TEXT_LENGTH, prepare
from engine.structured.lark import bounded
from engine.structured.quoted_lark import object_with_text
from engine.structured.regex import portable
from engine.structured.unique import MARK, Endings, refuse_unique_items
from engine.structured.whitespace import whitespace_options

MAX_GBNF_LENGTH = 50_000
MAX_CHOICES = 5000
MAX_CHOICES_LENGTH = 100_000
MAX_ERROR_LENGTH = 300
MAX_CHECKED = 10_000  # results of `check` that are cached
MAX_COMPILED_LENGTH = 2_000_000  # total characters of cached compiled grammars, at about 50 bytes each
TRIAL_STEPS = 24
TRIAL_SECONDS = 0.3
_MARK = "\x02"  # put before a text to separate it from the space that some tokenizers add before the first word

_LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


def json_grammar(schema: dict[str, Any] | str, notes: list[str] | None = None, lenient: bool = False) -> str:
    """Return a grammar of all instances of a JSON Schema. `notes`, `lenient`: see `prepare`.

    Like the next functions, raises `ValueError` with what is wrong or not supported.
    """
    prepared = prepare(schema, notes, lenient)
    return LLMatcher.grammar_from_json_schema(prepared, overrides=whitespace_options(json.loads(prepared)))


def library_schema(schema: dict[str, Any], notes: list[str], lenient: bool) -> dict[str, Any]:
    """Return a JSON Schema in the library's form, for grammars that contain it."""
    grammar = json_grammar(schema, notes, lenient)
    refuse_unique_items(grammar)
    found: dict[str, Any] = json.loads(grammar)["grammars"][0]["json_schema"]
    return found


def regex_grammar(pattern: str) -> str:
    """Return a grammar of all texts that the pattern matches entirely."""
    return LLMatcher.grammar_from_regex(portable(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """Return a grammar of these texts."""
    if max(map(len, choices)) > MAX_TEXT_LENGTH:
        raise ValueError(f"a choice may have at most {MAX_TEXT_LENGTH} characters")
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHOICES_LENGTH:
        raise ValueError(f"there may be at most {MAX_CHOICES} choices of {MAX_CHOICES_LENGTH} characters in all")
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def lark_grammar(grammar: str) -> str:
    """Return the grammar for a context-free grammar in the notation of Lark or llama.cpp (GBNF)."""
    if grammar.lstrip().startswith("{"):
        raise ValueError("a grammar begins with a rule, not with {")
    if "::=" in grammar and len(grammar) <= MAX_GBNF_LENGTH:
        # The converter takes quadratic time on runs of blank lines.
        lines = [line for line in grammar.split("\n") if line.strip()]
        try:
            grammar = any_to_lark("\n".join(lines))
        except Exception as error:  # any error of the converter
            raise ValueError(f"the GBNF grammar cannot be read: {error}") from None
    return LLMatcher.grammar_from_lark(bounded(grammar))


def text_grammar(name: str, grammar: str) -> str:
    """Return a grammar of objects with a single property `name`, a string that follows a grammar in Lark's notation."""
    return LLMatcher.grammar_from_lark(object_with_text(name, grammar))


@dataclass(frozen=True)
class Vocabulary:
    """The text of each token. `tokens[i]` is b"" for an id without text. End-of-text tokens are special tokens.

    `encode`: encodes a text as the model's tokenizer does; None: one token per byte.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    end_token_ids: list[int]
    encode: Callable[[str], list[int]] | None = None


class Compiler:
    """Compiles grammars for one vocabulary. Thread-safe."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """`load`: called for the first grammar, since most servers never see one."""
        self._load: Callable[[], Vocabulary] | None = load
        self._load_lock, self._lock = threading.Lock(), threading.Lock()
        self._checked: dict[bytes, str] = {}  # digest of a grammar → the error that `check` found, or ""
        # At their initial state, the most recently used last.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_characters = 0  # total length of these grammars

    def compile(self, grammar: str) -> LLMatcher:
        """Compile a grammar. Takes a millisecond to a second, or no time if cached. Raises `ValueError` if it is
        invalid.
        """
        found = self.cached(grammar)
        if found is None:
            matcher = self._build(grammar)
            if f'"{MARK}"' in grammar:
                self.endings  # noqa: B018  computed here because it would delay the engine's loop
            found = matcher.deep_copy()
            self._keep(grammar, matcher)
        return found

    def _build(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes longest, so it is computed in advance
        if matcher.is_error():
            raise ValueError(explain(matcher.get_error()))
        return matcher

    def cached(self, grammar: str) -> LLMatcher | None:
        """Return the result of `compile` if the grammar is cached, else None."""
        with self._lock:
            if (matcher := self._compiled.get(grammar)) is None:
                return None
            self._compiled.move_to_end(grammar)
            return matcher.deep_copy()

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = matcher
                self._num_characters += len(grammar)
            while self._num_characters > MAX_COMPILED_LENGTH:
                self._num_characters -= len(self._compiled.popitem(last=False)[0])

    def check(self, grammar: str) -> None:
        """Compile a grammar and generate a few random tokens with it. Raises `ValueError` if that fails."""
        digest = hashlib.blake2b(grammar.encode(errors="surrogatepass")).digest()
        if (wrong := self._checked.get(digest)) is None:
            wrong = self._find_wrong(grammar)
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked[digest] = wrong
        if wrong:
            raise ValueError(wrong)

    def _find_wrong(self, grammar: str) -> str:
        try:
            self._try(self._build(grammar))
        except ValueError as error:
            return str(error) or type(error).__name__
        except BaseException as error:  # a Rust panic is not an `Exception`
            if type(error).__name__ != "PanicException":
                raise
            return "the grammar is beyond what the library can follow"
        return ""

    def _try(self, matcher: LLMatcher) -> None:
        dice = random.Random(0)
        until = time.monotonic() + TRIAL_SECONDS
        for _ in range(TRIAL_STEPS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if allowed:
                matcher.consume_token(_pick(allowed, dice))
            if matcher.is_error():
                raise ValueError(explain(matcher.get_error()))
            if matcher.is_stopped() or time.monotonic() > until:
                break

    def _tokenizer(self) -> LLTokenizer:
        with self._load_lock:
            if self._load is not None:
                self._vocabulary = self._load()
                self._made = _make_tokenizer(self._vocabulary)
                self._load = None
            return self._made

    @cached_property
    def endings(self) -> Endings:
        self._tokenizer()
        return Endings(self._vocabulary.tokens)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer().vocab_size


class _Tokens:
    """A vocabulary in the form that the library needs."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_token_ids
        self.eos_token_id = vocabulary.end_token_ids[0]
        self._encode, self._special = vocabulary.encode, frozenset(vocabulary.special_token_ids)
        self._byte_ids = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that a grammar forces: the masks allow only these.

        Another tokenisation of the same text would be unusual for the model and degrade what it writes next.
        """
        for mark in ("", _MARK):
            token_ids = self._encode(mark + text.decode()) if self._encode is not None else []
            for first in range(min(len(token_ids), 3)):  # after the mark, or a space that some tokenizers add
                found = token_ids[first:]
                if b"".join(self.tokens[i] for i in found) == text and self._special.isdisjoint(found):
                    return found
        return [self._byte_ids.get(bytes([byte]), 0) for byte in text]


def _make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    if not vocabulary.end_token_ids:
        raise ValueError("the model names no end of text, so nothing could end after the grammar")
    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary)), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.end_token_ids
    )


def _pick(bits: int, dice: random.Random) -> int:
    """Return the index of a random set bit, not uniformly distributed."""
    above = bits >> (start := dice.randrange(bits.bit_length()))
    return start + (above & -above).bit_length() - 1


def explain(error: str) -> str:
    """Return the library's error message without internal details."""
    if "oneOf constraints" in error:
        return "oneOf is supported where at most one of its schemas can match; anyOf takes any"
    if "grammar.symbols.len()" in error or "schema too large" in error:
        return "it is too large"
    if error.startswith(("NoExtension", "panic")):
        return "the grammar matches nothing"
    if "items; max is" in error or "Too many items" in error:
        return "too many things may come next at one place: fewer alternatives, or optional properties, would do"
    if "is not present in a registry" in error or error.startswith("Pointer"):
        return f"$ref leads nowhere: {error.partition(' and retrieving')[0]}"
    error = error.partition("<non-verbose/>")[0].partition("\n<")[0].strip()
    return " ".join(error.split())[:MAX_ERROR_LENGTH]
