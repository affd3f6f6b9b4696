"""Compiles the grammars that requests ask for, and checks that the model's vocabulary can follow them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from engine.core.params.structured import MAX_TAGS, StructuredOutputs, Tag, Tags
from engine.errors import ParameterError, TagsError
from engine.processing.grammar_cache import GrammarCache, TooSlowError
from engine.structured.arguments import prepare_arguments
from engine.structured.grammar import (
    Compiler,
    Vocabulary,
    choice_grammar,
    json_grammar,
    lark_grammar,
    library_schema,
    regex_grammar,
    text_grammar,
)
from engine.structured.harmony import compose_messages
from engine.structured.tags import MAX_TAGS_LENGTH, Instances, compose
from engine.structured.unique import refuse_unique_items
from engine.text.tokenizer import Tokenizer

GRAMMARS: dict[str, Callable[..., str]] = {  # field of StructuredOutputs → the grammar of its value
    "json": json_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
    "json_object": lambda _: json_grammar({"type": "object"}),
}
CHECK_SECONDS = 3.0  # time limit for compiling the schemas of one request's tags


class Grammars:
    """The grammars of structured outputs for one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: None: every grammar is refused."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._cache = GrammarCache(self._compile)

    def compiled(self, asked: StructuredOutputs) -> StructuredOutputs:
        """Return `asked` as one grammar. Raises `ParameterError` with the unsupported part, or `TagsError` if only
        schemas of tags are unusable.
        """
        return self._cache(asked)

    @cached_property
    def _compiler(self) -> Compiler:
        if self._tokenizer is None:
            raise ParameterError("structured_outputs", "need a tokenizer, and there is none (skip_tokenizer_init)")
        return Compiler(partial(vocabulary_of, self._tokenizer, self._vocab_size, self._eos_token_ids))

    def _compile(self, asked: StructuredOutputs) -> StructuredOutputs:
        content = None
        notes: list[tuple[int | None, str]] = []
        for name, write in GRAMMARS.items():
            if (value := getattr(asked, name)) is not None and value is not False:
                found: list[str] = []
                write = partial(write, notes=found) if name == "json" else write
                content = self._checked(f"structured_outputs.{name}", write, value)
                notes += [(None, note) for note in found]
        schemas = self._tag_grammars(asked.tags, notes, asked.in_messages) if asked.tags is not None else []
        if asked.tags is not None or asked.thoughts is not None or asked.in_messages:
            special = {text: i for text, i in self._special_tokens.items() if i not in self._eos_token_ids}
            if asked.in_messages:
                content = compose_messages(content, asked.tags, schemas, special)
            else:
                content = compose(content, asked.tags, schemas, asked.thoughts, special)
            self._checked("structured_outputs", lambda _: content, None)
        return StructuredOutputs(compiled=content, notes=tuple(notes))

    def _tag_grammars(self, tags: Tags, notes: list[tuple[int | None, str]], in_messages: bool) -> list[Instances]:
        if len(tags.tags) > MAX_TAGS:
            raise ParameterError("structured_outputs.tags", f"must be at most {MAX_TAGS}, got {len(tags.tags)}")
        grammars: list[Instances] = []
        reasons, length = {}, 0
        until = time.monotonic() + CHECK_SECONDS
        for place, tag in enumerate(tags.tags):
            if time.monotonic() > until:
                raise TooSlowError("structured_outputs.tags", "together, their schemas are too complex", ": ")
            try:
                found: list[str] = []
                grammars.append(self._instances(tags, tag, found, in_messages))
                notes += [(place, note) for note in found]
                length += len(last) if isinstance(last := grammars[-1], str) else len(json.dumps(tag.schema))
            except ValueError as error:
                reasons[place] = str(error)
            if length > MAX_TAGS_LENGTH:
                reason = f"their schemas may have {MAX_TAGS_LENGTH} characters in all"
                raise ParameterError("structured_outputs.tags", reason, ": ")
        if reasons:
            raise TagsError(reasons)
        return grammars

    def _instances(self, tags: Tags, tag: Tag, notes: list[str], in_messages: bool) -> Instances:
        if tag.syntax is None or in_messages:
            return self._tag_grammar(tag, notes, in_messages)
        if tag.grammar is not None:
            if not tag.lenient:
                raise ValueError("grammars are not supported in this model's format of tool calls")
            notes.append(f"{tag.grammar[0]} may be any text: its grammar is not enforced")
        prepared = prepare_arguments(tag.schema, tag.syntax, library_schema, notes, tag.lenient)
        alone = replace(tags, tags=[tag], required=True)
        self._checked("", lambda _: compose(None, alone, [prepared], None, {}), None)
        return prepared

    def _tag_grammar(self, tag: Tag, notes: list[str], in_messages: bool) -> str:
        if tag.grammar is not None:
            name, grammar = tag.grammar
            try:
                return self._checked("", partial(text_grammar, name), grammar)
            except ValueError as error:
                if not tag.lenient:
                    raise
                notes.append(f"{name} may be any text, for its grammar: {error}")
        found = self._checked("", partial(json_grammar, notes=notes, lenient=tag.lenient), tag.schema)
        if in_messages or tag.head is not None:  # no fixed text precedes the schema
            refuse_unique_items(found)
        return found

    def _checked(self, name: str, write: Callable[[Any], str], value: Any) -> str:
        """Return the grammar of a value. Raises `ParameterError` for the field `name`, or `ValueError` if that is
        empty.
        """
        try:
            grammar = write(value)
            self._compiler.check(grammar)
        except ValueError as error:
            raise (ParameterError(name, str(error), ": ") if name else ValueError(str(error))) from None
        return grammar

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Text → token id."""
        assert self._tokenizer is not None
        ids = sorted(i for i in self._tokenizer.special_ids if i < self._vocab_size)
        return {text: i for i in ids if (text := self._tokenizer.id_to_token(i))}


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> Vocabulary:
    special = tokenizer.special_ids.union(end_token_ids)
    tokens = [
        (tokenizer.id_to_token(i) or "").encode() if i in special else tokenizer.token_bytes(i)
        for i in range(vocab_size)
    ]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return Vocabulary(tokens, sorted(i for i in special if i < vocab_size), list(end_token_ids), encode)
