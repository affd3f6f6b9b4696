"""Structured outputs: the required form of a completion, as clients specify it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.core.params.errors import ParameterError

MAX_TAGS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """Reasoning text before the answer, between two marks with optional white space around them."""

    begin: str
    end: str
    opened: bool  # the prompt ends with `begin`, so there is reasoning; else it is optional


class Syntax:
    """Syntax of an object other than JSON: `Parameters` or `Literals`."""

    __slots__ = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all texts that stand around names and values."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters(Syntax):
    """Syntax of an object whose properties stand between marks: `key`, a name, `value`, a value, `end`, for each of
    them.

    Strings are written as they are, without quotes and escapes; other values as JSON.
    """

    key: str
    value: str  # `{kind}` stands for the text in `kinds` of the value's JSON type
    end: str
    kinds: tuple[tuple[str, str], ...] = ()
    wrapping: tuple[str, str] = ("", "")  # marks that may stand around a text, as XML's CDATA

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.key, self.value, self.end)

    def value_mark(self, kind: str) -> str:
        """Return the mark before a value of this JSON type."""
        return self.value.replace("{kind}", dict(self.kinds).get(kind, "")) if self.kinds else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals(Syntax):
    """Syntax of an object as `name=value, name=value`, with literals of Python, JSON or the like as values."""

    assign: str = "="  # between a name and its value
    separator: str = ", "
    quote: str = '"'  # around a string; strings have escapes only if it is `"`

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.assign, self.separator, self.quote)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A part of an answer: `begin`, an instance of a JSON Schema, `end`.

    `grammar`: name of the instance's only property, a text, and a grammar of that text in Lark's notation.
    """

    begin: str
    schema: dict[str, Any]
    end: str
    grammar: tuple[str, str] | None = None
    syntax: Syntax | None = None  # of the instance, which is an object; None: JSON
    lenient: bool = False  # ignore the parts of schema or grammar that cannot be enforced; else they are an error
    head: str | None = None  # a regular expression: an alternative to `begin` at the start of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Tags, as the last part of an answer: `trigger`, `opening`, one tag or several with `between`, `closing`.

    The text before is free and ends where the model writes the trigger. Marks that spell special tokens of the
    vocabulary stand for those tokens.
    """

    trigger: str
    tags: list[Tag]
    opening: str = ""
    between: str = ""
    closing: str = ""
    several: bool = True  # false: exactly one tag
    required: bool = False  # no text, and at least one tag


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The required form of an answer: exactly one of the first five fields. Raises `ParameterError` otherwise.

    With `tags` the answer has that form or consists of tags; with `tags` alone it is free text that may end in tags.
    With `thoughts` the answer follows the reasoning. With `in_messages` the form applies to the final message of an
    answer in gpt-oss's harmony format, and tags are calls: `begin` is the function's name.
    """

    json: dict[str, Any] | str | None = None  # an instance of this JSON Schema
    regex: str | None = None  # a match of this regular expression, as a whole
    choice: list[str] | None = None  # one of these texts
    grammar: str | None = None  # a text of this context-free grammar, in Lark's notation or GBNF
    json_object: bool = False  # any JSON object
    tags: Tags | None = None
    thoughts: Thoughts | None = None
    in_messages: bool = False
    compiled: str | None = None  # the same, checked and in the engine's internal form; set by input processors
    notes: tuple[tuple[int | None, str], ...] = ()  # parts that are not enforced, each with the tag's index

    def __post_init__(self) -> None:
        if self.compiled is not None:
            return
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) > 1 or (not given and self.tags is None):
            got = ", ".join(given) or "none"
            reason = f"must have one of json, regex, choice, grammar, json_object, got {got}"
            raise ParameterError("structured_outputs", reason)
        if given and self.tags is not None and self.tags.required:
            raise ParameterError("structured_outputs", f"must have no {given[0]} where tags are required")
        for name, kinds in (("json", (dict, str)), ("regex", str), ("grammar", str), ("choice", list)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, kinds) and (value or value == {})):
                raise ParameterError(
                    f"structured_outputs.{name}", f"must not be empty or of type {type(value).__name__}"
                )
        if not all(isinstance(text, str) and text for text in self.choice or ()):
            raise ParameterError("structured_outputs.choice", "must be a list of non-empty texts")
        if self.tags is not None and not (self.tags.trigger and self.tags.tags):
            raise ParameterError("structured_outputs.tags", "must have a trigger and at least one tag")
