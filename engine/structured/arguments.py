"""Grammars of objects that are not written as JSON: parameters between marks, and literals.

`prepare_arguments` reads a JSON Schema once; `ArgumentRules` writes it in Lark's notation with the vocabulary's special
tokens. Strings are written without quotes, so that a string which reads as another type that the schema allows is not
generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.core.params.structured import Literals, Parameters, Syntax
from engine.structured.json_schema import FORMATS, MAX_DEPTH, MAX_PROPERTIES
from engine.structured.kinds import ALL_KINDS, Schema, kind_of, kinds_of
from engine.structured.languages import Texts
from engine.structured.values import pointed_to

MAX_SCHEMAS = 5000  # with references written out
MAX_ITEMS = 64  # repetitions of an array's items that are written out
_LISTS = ("anyOf", "oneOf")
_HARD = ("allOf", "not", "if", "then", "else")  # not enforced for strings
_HARD_OBJECT = (*_HARD, "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", *_LISTS)  # fmt: skip
_HARD_ARRAY = (*_HARD, "contains", "uniqueItems", "prefixItems", "unevaluatedItems")
_ANYTHING = r"(?s:.*)"
# Texts that a parser may read as JSON or Python of this type. A lexer that has read `null` cannot tell whether more
# text follows, so no text begins with JSON's words.
_READ_AS = {
    "null": rf"\s*(null{_ANYTHING}|None\s*)",
    "boolean": rf"\s*(true{_ANYTHING}|false{_ANYTHING}|True\s*|False\s*)",
    "integer": rf"\s*-?[0-9]{_ANYTHING}",
    "number": rf"\s*-?[0-9]{_ANYTHING}",
    "array": rf"\s*\[{_ANYTHING}",
    "object": rf"\s*\{{{_ANYTHING}",
}


@dataclass(frozen=True, slots=True)
class Text:
    """Strings: one of `choices`, or those that match `patterns` as a whole."""

    choices: tuple[str, ...] | None = None
    patterns: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        return self.choices is None and not self.patterns


@dataclass(frozen=True, slots=True)
class Value:
    """A value: one of these alternatives. `is_any`: any value."""

    texts: tuple[Text, ...] = ()
    values: tuple[tuple[frozenset[str], str], ...] = ()  # JSON types, and the grammar library's schema
    arrays: tuple[tuple[Value, int, int | None], ...] = ()  # items and how many; only where JSON is not written
    objects: tuple[Arguments, ...] = ()
    is_any: bool = False

    @property
    def other_kinds(self) -> frozenset[str]:
        """The types besides strings."""
        return frozenset().union(*(kinds for kinds, _ in self.values))


@dataclass(frozen=True, slots=True)
class Arguments:
    """The properties of an object, each with whether it is required; `others`: of any other name."""

    properties: tuple[tuple[str, bool, Value], ...]
    others: Value | None = None


ANY = Value(is_any=True)


class ToJson(Protocol):
    """Prepares a schema for the grammar library. Raises `ValueError`."""

    def __call__(self, schema: dict[str, Any], notes: list[str], lenient: bool) -> dict[str, Any]: ...


def prepare_arguments(
    schema: dict[str, Any], syntax: Syntax, to_json: ToJson, notes: list[str], lenient: bool
) -> Arguments:
    """Return what the schema of an object allows. Raises `ValueError` for what cannot be enforced.

    `lenient`: leave it out instead, with a line in `notes`.
    """
    return _Preparation(schema, syntax, to_json, notes, lenient).arguments(schema, MAX_DEPTH)


@dataclass
class _Preparation:
    root: dict[str, Any]
    syntax: Syntax
    to_json: ToJson
    notes: list[str]
    is_lenient: bool
    texts: Texts = field(default_factory=Texts)
    num_schemas: int = 0

    @property
    def writes_json(self) -> bool:
        """Values other than strings are written as JSON; with `"` as the quote, strings are, too."""
        return not isinstance(self.syntax, Literals) or self.syntax.quote == '"'

    def arguments(self, schema: Schema, depth: int) -> Arguments:
        if not depth:
            raise ValueError(f"a JSON Schema may be at most {MAX_DEPTH} levels deep")
        schema = self._target(schema)
        self._leave_out(schema, _HARD_OBJECT)
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if len(properties) > MAX_PROPERTIES:
            raise ValueError(f"properties: an object may have at most {MAX_PROPERTIES}, got {len(properties)}")
        found = [(name, name in required, self.value(each, depth - 1)) for name, each in properties.items()]
        found += [(name, True, self.value({}, depth - 1)) for name in required if name not in properties]
        others = schema.get("additionalProperties", True)
        if others is False:
            return Arguments(tuple(found))
        return Arguments(tuple(found), self.value({} if others is True else others, depth - 1))

    def _count(self) -> None:
        """Count one schema: references may repeat them without bounds."""
        self.num_schemas += 1
        if self.num_schemas > MAX_SCHEMAS:
            raise ValueError("the schema is too large when its references are written out")

    def value(self, schema: Any, depth: int) -> Value:
        self._count()
        if schema is False:
            raise ValueError("nothing matches the JSON Schema false")
        if not isinstance(schema, Mapping) or not _constraints(schema):
            if self._has_quoted_strings:
                return Value(values=((ALL_KINDS, self._json({}, None)),))
            if isinstance(self.syntax, Parameters) and self.syntax.kinds:
                return Value((Text(),), tuple(self._values({}, ALL_KINDS - {"string"})))
            return ANY
        kinds = kinds_of(schema, self.root)
        if self._has_quoted_strings:
            return Value(values=((kinds, self._json(dict(schema), None)),))
        texts = tuple(self._texts(schema, depth)) if "string" in kinds else ()
        others = kinds - {"string"}
        if self.writes_json:
            return Value(texts, tuple(self._values(schema, others)))
        return self._nested(schema, texts, others, depth)

    @property
    def _has_quoted_strings(self) -> bool:
        return isinstance(self.syntax, Literals) and self.syntax.quote == '"'

    def _values(self, schema: Schema, kinds: frozenset[str]) -> Iterator[tuple[frozenset[str], str]]:
        """Return schemas for types other than strings: one for each mark that stands before values."""
        by_mark: dict[str, set[str]] = {}
        for kind in kinds:
            mark = self.syntax.value_mark(_marked(self.syntax, kind)) if isinstance(self.syntax, Parameters) else ""
            by_mark.setdefault(mark, set()).add(kind)
        for each in by_mark.values():
            yield frozenset(each), self._json(dict(schema), frozenset(each))

    def _json(self, schema: dict[str, Any], kinds: frozenset[str] | None) -> str:
        """Return the library's schema of the values of these types; None: all."""
        if kinds is not None:
            names = sorted(kinds - {"integer"} if "number" in kinds else kinds)
            options = next((name for name in _LISTS if name in schema), None)
            if options is None and "$ref" not in schema:
                schema = {**schema, "type": names}
            elif kinds != ALL_KINDS:
                schema = {"allOf": [schema, {"type": names}]}
            if isinstance(values := schema.get("enum"), list):
                schema["enum"] = [each for each in values if kind_of(each) in kinds]
        return json.dumps(self.to_json(self._rooted(schema), self.notes, self.is_lenient), ensure_ascii=False)

    def _rooted(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema whose references lead where they led from the schema of the whole object."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        return {**_moved(schema), "$defs": {"root": _moved(self.root)}}

    def _target(self, schema: Schema) -> Schema:
        """Follow references."""
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref")
            target = pointed_to(self.root, reference) if isinstance(reference, str) else None
            if not isinstance(target, Mapping):
                break
            schema = {**target, **{name: each for name, each in schema.items() if name != "$ref"}}
        return schema

    def _leave_out(self, schema: Schema, names: Sequence[str]) -> None:
        for name in names:
            if name in schema:
                if not self.is_lenient:
                    raise ValueError(f"{name} is not supported in this model's format of tool calls")
                self.notes.append(f"{name} is not enforced")

    # ---- strings ----

    def _texts(self, schema: Schema, depth: int) -> Iterator[Text]:
        self._count()
        schema = self._target(schema)
        options = [name for name in _LISTS if isinstance(schema.get(name), list)]
        self._leave_out(schema, [name for name in _HARD if name in schema])
        if options and depth:
            for each in schema[options[0]]:
                if isinstance(each, Mapping) and "string" in kinds_of(each, self.root):
                    yield from self._texts(each, depth - 1)
            return
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            yield Text(choices=tuple(each for each in values if isinstance(each, str)))
            return
        yield Text(patterns=tuple(self._patterns(schema)))

    def _patterns(self, schema: Schema) -> Iterator[str]:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            yield f"(?s:.{{{int(least)},{'' if most is None else int(most)}}})"
        wanted = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
        name = schema.get("format")
        if isinstance(name, str):
            if name in FORMATS:
                wanted.append(FORMATS[name])
            else:
                self.notes.append(f"the format {name[:40]!r} is not enforced")
        for each in wanted:
            found = self.texts.pattern([each])
            if found is not None:
                yield found.removeprefix("^").removesuffix("$")
            elif not self.is_lenient:
                raise ValueError("pattern: it is too complex")
            else:
                self.notes.append("pattern is not enforced")

    # ---- a relative of JSON ----

    def _nested(self, schema: Schema, texts: tuple[Text, ...], kinds: frozenset[str], depth: int) -> Value:
        schema = self._target(schema)
        options = next((schema[name] for name in _LISTS if isinstance(schema.get(name), list)), None)
        if options is not None:
            self._leave_out(schema, _HARD)
            found = [self.value(each, depth - 1) for each in options]
            if any(each.is_any for each in found):
                return ANY
            return Value(
                texts,
                tuple(value for each in found for value in each.values),
                tuple(array for each in found for array in each.arrays),
                tuple(inner for each in found for inner in each.objects),
            )
        plain = kinds - {"array", "object"}
        values = tuple(self._values(schema, plain)) if plain else ()
        arrays: list[tuple[Value, int, int | None]] = []
        if "array" in kinds:
            self._leave_out(schema, _HARD_ARRAY)
            items, least, most = schema.get("items", True), schema.get("minItems", 0), schema.get("maxItems")
            if max(least, most or 0) > MAX_ITEMS:
                raise ValueError(
                    f"minItems and maxItems are supported up to {MAX_ITEMS} in this model's format of tool calls"
                )
            arrays.append((self.value({} if items is True else items, depth - 1), least, most))
        objects = (self.arguments(schema, depth - 1),) if "object" in kinds else ()
        return Value(texts, values, tuple(arrays), objects)


def _constraints(schema: Schema) -> set[str]:
    """Return the keywords that restrict values."""
    return set(schema) - {"title", "description", "default", "examples", "$comment", "nullable", "deprecated"}


def _marked(syntax: Parameters, kind: str) -> str:
    return "number" if kind == "integer" and "integer" not in dict(syntax.kinds) else kind


def _moved(value: Any) -> Any:
    """Return a schema with its references below `#/$defs/root`."""
    if isinstance(value, Mapping):
        return {
            key: f"#/$defs/root{each[1:]}"
            if key == "$ref" and isinstance(each, str) and each.startswith("#")
            else _moved(each)
            for key, each in value.items()
        }
    return [_moved(each) for each in value] if isinstance(value, list) else value


class Rules(Protocol):
    """Writes rules in Lark's notation."""

    rules: list[str]

    def rule(self, name: str, *options: str) -> None: ...
    def literal(self, text: str) -> str: ...
    def special_id(self, mark: str) -> str | None:
        """Return a rule for a special token; None: the mark is written as text."""


class ArgumentRules:
    """Writes the rules of one object."""

    def __init__(self, out: Rules, syntax: Syntax, prefix: str) -> None:
        """`prefix`: of the names of all rules."""
        self._out, self._syntax, self._prefix = out, syntax, prefix
        self._num_rules = 0
        self._any: str | None = None

    def object(self, arguments: Arguments) -> str:
        """Return an expression for the properties; it may be empty."""
        if isinstance(self._syntax, Literals):
            return self._separated(arguments, self._syntax, self._syntax.assign)
        assert isinstance(self._syntax, Parameters)
        parts = [
            self._parameter(f"{self._syntax.key}{name}", value, is_required)
            for name, is_required, value in arguments.properties
        ]
        if arguments.others is not None:
            key = f"{self._out.literal(self._syntax.key)} {self._other_name(arguments)}"
            parts.append(f"({self._value(arguments.others, key)})*")
        return " ".join(parts)

    def _name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}{self._num_rules}"

    def _terminal(self, *patterns: str, refused: Sequence[str] = ()) -> str:
        name = self._name().upper()
        parts = [f"/{_slashed(each)}/" for each in patterns or [_ANYTHING]]
        parts += [f"~/{_slashed(each)}/" for each in refused]
        self._out.rules.append(f"{name}: {' & '.join(parts)}")
        return name

    def _other_name(self, arguments: Arguments) -> str:
        names = [re.escape(name) for name, _, _ in arguments.properties]
        return self._terminal(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", refused=["|".join(names)] if names else [])

    # ---- parameters between marks ----

    def _parameter(self, key: str, value: Value, is_required: bool) -> str:
        rule = self._name()
        self._out.rule(rule, self._value(value, self._out.literal(key)))
        return rule if is_required else f"{rule}?"

    def _value(self, value: Value, key: str) -> str:
        syntax = self._syntax
        assert isinstance(syntax, Parameters)
        end = self._out.literal(syntax.end)
        if value.is_any:
            value = Value((Text(),))
        options = []
        for kinds, schema in value.values:
            mark = syntax.value_mark(_marked(syntax, min(kinds)))
            options.append(f"{key} {self._out.literal(mark)} %json {schema} {end}")
        refused = [_READ_AS[kind] for kind in sorted(value.other_kinds)] if not syntax.kinds else []
        mark = self._out.literal(syntax.value_mark("string"))
        texts = [self._text(text, syntax.end, refused) for text in value.texts]
        options += [f"{key} {mark} {text}" for text in texts if text]
        if not options:
            raise ValueError("no value of enum can be written in this model's format of tool calls")
        return " | ".join(options)

    def _text(self, text: Text, end: str, refused: Sequence[str]) -> str:
        """Return an expression for a string and the mark after it; empty if there is no such string."""
        core = end.strip()
        before, _, after = end.partition(core)
        inside = [rf"{_ANYTHING}{re.escape(core)}{_ANYTHING}"]
        if text.choices is not None:
            choices = [
                each for each in text.choices if core not in each and not any(_matches(r, each) for r in refused)
            ]
            return f"({' | '.join(map(_quoted, choices))}) {self._out.literal(end)}" if choices else ""
        if text.is_free and not refused:
            body, lead = self._terminal(), ""
        else:
            body, lead = self._terminal(*text.patterns, refused=[*inside, *refused]), before
        if (token := self._out.special_id(core)) is not None:
            gap = f"{_quoted(lead)} " if lead else ""
            return f"{body} {gap}{token} {self._out.literal(after)}"
        rule = self._name()
        self._out.rules.append(f"{rule}[lazy]: {body} {_quoted(lead + core)}")
        return f"{rule} {self._out.literal(after)}"

    # ---- literals ----

    def _separated(self, arguments: Arguments, syntax: Literals, assign: str) -> str:
        """Return an expression for properties with separators between them."""
        written = []
        for name, is_required, value in arguments.properties:
            rule = self._name()
            self._out.rule(rule, f"{self._out.literal(name + assign)} {self._literal(value)}")
            written.append((rule, is_required))
        separator = self._out.literal(syntax.separator)
        tail = ""
        if arguments.others is not None:
            rule = self._name()
            self._out.rule(rule, f"{self._other_name(arguments)} {_quoted(assign)} {self._literal(arguments.others)}")
            tail = f"({separator} {rule})*"
            written.append((f"{rule} {tail}", False))
        # `first`: what may come from here on if no property came before; `rest`: the same after another property.
        first, rest, may_be_empty = "", "", True
        for index, (each, is_required) in reversed(list(enumerate(written))):
            is_tail = bool(tail) and index == len(written) - 1
            others = f" | {first}" if first and not is_required else ""
            first = self._ruled(f"{each} {rest}{others}")
            rest = self._ruled(tail if is_tail else f"({separator} {each}){'' if is_required else '?'} {rest}")
            may_be_empty = may_be_empty and not is_required
        return f"{first}?" if first and may_be_empty else first

    def _ruled(self, expression: str) -> str:
        rule = self._name()
        self._out.rule(rule, expression)
        return rule

    def _literal(self, value: Value) -> str:
        syntax = self._syntax
        assert isinstance(syntax, Literals)
        if syntax.quote == '"':
            return " | ".join(f"%json {schema}" for _, schema in value.values)
        if value.is_any:
            return self._any_rule(syntax)
        options = [f"%json {schema}" for _, schema in value.values]
        quote = self._out.literal(syntax.quote)
        options += [f"{quote} {text}" for each in value.texts if (text := self._text(each, syntax.quote, ()))]
        for items, least, most in value.arrays:
            options.append(f'"[" {self._items(self._literal(items), least, most)} "]"')
        options += [f'"{{" {self._separated(each, syntax, ":")} "}}"' for each in value.objects]
        rule = self._name()
        self._out.rule(rule, *options)
        return rule

    def _items(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return ""
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f"({item} {more})" if least else f"({item} {more})?"

    def _any_rule(self, syntax: Literals) -> str:
        if self._any is None:
            self._any = rule = self._name()
            text = self._text(Text(), syntax.quote, ())
            name = self._terminal(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
            self._out.rule(
                rule,
                f"{self._out.literal(syntax.quote)} {text}",
                '%json {"type": ["number", "boolean", "null"]}',
                f'"[" ({rule} ("," {rule})*)? "]"',
                f'"{{" ({name} ":" {rule} ("," {name} ":" {rule})*)? "}}"',
            )
        return self._any


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    return pattern.replace("/", r"\/")
