"""Prepares JSON Schemas for the grammar library: sound, bounded, portable.

The library refuses most unsupported keywords. This module also refuses what the library would enforce only partially or
at great cost, and tightens what JSON Schema validators check more strictly than the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

from engine.structured.exclusive import Judge
from engine.structured.references import (
    SCHEMA,
    SCHEMA_LIST,
    SCHEMA_MAP,
    drop_endless,
    keep_targets,
    name_recursive,
    subschemas,
)
from engine.structured.regex import portable
from engine.structured.rewrites import also, looks_ahead, rewrite
from engine.structured.unique import MARK, has_mark
from engine.structured.values import pointed_to

Schema: TypeAlias = dict[str, Any]

MAX_LENGTH = 150_000  # characters of a schema's JSON without annotations
MAX_ANNOTATED_LENGTH = 1_000_000  # including annotations
MAX_DEPTH = 64
MAX_REFERENCES = 800
MAX_PROPERTIES = 1000  # per object; the library takes quadratic time
MAX_ENUM_VALUES = 10_000  # in the whole schema
MAX_TEXT_LENGTH = 10_000  # of a string value
MAX_WRITTEN = 2_000_000  # approximate characters after rewriting, which repeats schemas
EXACT = 2**53  # largest integer up to which floats are exact
MAX_SHOWN = 40  # characters of a format's name
MOST_DECIMALS = 6  # most decimals of `multipleOf`

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains")
_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(SCHEMA, ("a schema", lambda value: isinstance(value, dict | bool))),
    "items": ("a schema", lambda value: isinstance(value, dict | bool) or _is_list_of(value, dict | bool)),
    **dict.fromkeys(
        SCHEMA_MAP[:-1],
        ("an object of schemas", lambda value: _is_map_of(value, lambda each: isinstance(each, dict | bool))),
    ),
    **dict.fromkeys(SCHEMA_LIST[:-1], ("a list of schemas", lambda value: _is_list_of(value, dict | bool) and value)),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), ("a number", lambda value: isinstance(value, int | float))),
    **dict.fromkeys(_COUNTS, ("a whole number", lambda value: type(value) is int and 0 <= value < 2**31)),
    "required": ("a list of names", lambda value: _is_names(value)),
    "dependentRequired": ("an object of lists of names", lambda value: _is_map_of(value, _is_names)),
    "dependencies": (
        "an object of schemas and lists of names",
        lambda value: _is_map_of(value, lambda each: isinstance(each, dict | bool) or _is_names(each)),
    ),
    "type": ("a type or a list of types", lambda value: isinstance(value, str) or (_is_list_of(value, str) and value)),
    "enum": ("a list", lambda value: isinstance(value, list)),
    **dict.fromkeys(("pattern", "format", "$ref"), ("a text", lambda value: isinstance(value, str))),
}

# Annotations: they do not affect instances, and often make up most of a schema.
_ANNOTATIONS = ("title", "description", "markdownDescription", "enumDescriptions", "$comment", "default", "examples")
_ITEM = re.compile(r"/items/(?=[0-9]+(?:/|$))")  # in a JSON pointer: an element of a list of schemas
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {  # the library's own formats ignore leap years and are more lenient than validators
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
_LIBRARY_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_HINTS = ("int64", "float", "double", "password")  # formats that do not restrict the type
# Keywords that the library does not support, unless a rewrite has replaced them.
_LACKING = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip


def prepare(schema: Any, notes: list[str] | None = None, lenient: bool = False) -> str:
    """Return a schema (parsed, or as JSON) as JSON for the library. Raises `ValueError`, which names an unsupported
    keyword.

    `lenient`: omit what cannot be enforced. `notes` gets a line about each omission, including unknown formats.
    """
    text = schema if isinstance(schema, str) else _dump(schema)
    _check_length(text, MAX_ANNOTATED_LENGTH)
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"a JSON Schema may be at most {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise ValueError(f"the JSON Schema is not valid JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ValueError(f"a JSON Schema must be an object, got {type(parsed).__name__}")
    if isinstance(parsed, bool):
        if not parsed:
            raise ValueError("nothing matches the JSON Schema false")
        parsed = {}
    _check_depth(parsed, MAX_DEPTH)
    parsed.pop("x-guidance", None)  # options of the library
    dialect = str(parsed.pop("$schema", ""))  # all are converted to draft 2020-12
    preparation = _Preparation(parsed, lenient, is_draft_4="draft-04" in dialect)
    preparation.run()
    _check_written(parsed)
    drop_endless(parsed)
    if not preparation.has_resources:
        name_recursive(parsed)
        _check_written(parsed)
    if notes is not None:
        notes += dict.fromkeys(preparation.notes)
    return _dump(parsed)


def _check_length(text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"a JSON Schema may have at most {limit} characters, this one has {len(text)}")


def _dump(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the JSON Schema cannot be written as JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any, levels: int) -> None:
    if not levels:
        raise ValueError(f"a JSON Schema may be at most {MAX_DEPTH} levels deep")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, levels - 1)


def _written_length(value: Any, lengths: dict[int, int]) -> int:
    """Return the length of a value as JSON. `lengths`: cache by object id."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, dict | list):
        return 8
    if id(value) not in lengths:
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        lengths[id(value)] = 2 + sum(map(_written_length, inner, repeat(lengths)))
    return lengths[id(value)]


def _check_written(schema: Any) -> None:
    """Raise `ValueError` if the schema is too large once repeated parts are written out."""
    try:
        written = _written_length(schema, {})
    except RecursionError:
        raise ValueError(f"a JSON Schema may be at most {MAX_DEPTH} levels deep, conditions written out") from None
    if written > MAX_WRITTEN:
        raise ValueError("the conditions and repetitions of the JSON Schema are too large when they are written out")


@dataclass
class _Preparation:
    """Changes all schemas inside a schema in place. First normalises all of them, since rewrites look at other
    schemas.
    """

    root: Schema
    is_lenient: bool = False
    is_draft_4: bool = False
    notes: list[str] = field(default_factory=list)  # about what is not enforced
    num_references: int = 0
    num_enum_values: int = 0
    leads_elsewhere: bool = False  # some `$ref` is not a path in this schema
    has_resources: bool = False  # some subschema has an `$id`

    def run(self) -> None:
        self._apply(self.shapes, self.older)
        if not self.has_resources:
            self._fix_anchors()
            keep_targets(self.root)
        _check_length(text := _dump(self.root), MAX_LENGTH)
        # The unmodified schema: rewrites narrow schemas, so what a schema refuses must be read from this one.
        as_given = json.loads(text)
        self.judge = Judge(partial(pointed_to, as_given), notes=self.notes)
        of_kinds = (self.values, self.objects, self.arrays, self.numbers, self.strings)
        self._apply(self.rewrites, self.references, *of_kinds, *([self.leftovers] if self.is_lenient else []))
        if (self.leads_elsewhere or self.has_resources) and has_mark(self.root):
            raise ValueError("uniqueItems is supported where every $ref is a path in this schema")

    def _apply(self, *rules: Callable[[Schema], None]) -> None:
        stack: list[Any] = [self.root]
        seen: dict[int, Schema] = {}  # keeps them alive, so that no new object gets the id of a dropped schema
        while stack:
            schema = stack.pop()
            if id(schema) in seen:
                continue
            if isinstance(schema, dict):
                seen[id(schema)] = schema
                for rule in rules:
                    rule(schema)
                stack += subschemas(schema)
                if isinstance(target := pointed_to(self.root, schema.get("$ref", "")), dict):
                    stack.append(target)  # it may be at a position that is not searched for schemas
            elif not isinstance(schema, bool):
                raise ValueError(f"a schema must be an object or a boolean, got {_dump(schema)[:80]}")

    def _fix_anchors(self) -> None:
        """Replace a `$dynamicRef` to the only such anchor in the document by a `$ref`."""
        found: dict[str, list[str]] = {}
        owners: list[Schema] = []
        stack: list[tuple[Any, Any]] = [(self.root, None)]  # the second is (key, position of the parent)
        while stack:
            value, at = stack.pop()
            if isinstance(value, dict) and value.keys() & {"$dynamicAnchor", "$dynamicRef"}:
                owners.append(value)
                if "$dynamicAnchor" in value:
                    found.setdefault(f"#{value['$dynamicAnchor']}", []).append(_pointer(at))
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            stack += [(each, (key, at)) for key, each in inner if isinstance(each, dict | list)]
        for schema in owners:
            pointers = found.get(str(schema.get("$dynamicRef")), [])
            if len(pointers) == 1 and "$ref" not in schema:
                del schema["$dynamicRef"]
                schema["$ref"] = pointers[0]
        if not any("$dynamicRef" in schema for schema in owners):
            for schema in owners:
                schema.pop("$dynamicAnchor", None)

    def shapes(self, schema: Schema) -> None:
        for name in _ANNOTATIONS:
            schema.pop(name, None)
        if schema is not self.root:
            schema.pop("$schema", None)
            self.has_resources |= "$id" in schema
        for name in schema.keys() & set(_COUNTS):
            if isinstance(schema[name], float) and schema[name].is_integer():
                schema[name] = int(schema[name])
        for name in schema.keys() & _SHAPES.keys():
            wanted, is_right = _SHAPES[name]
            if not is_right(schema[name]):
                raise ValueError(f"{name} must be {wanted}, got {_dump(schema[name])[:80]}")

    def older(self, schema: Schema) -> None:
        """Convert the keywords of older drafts to those of 2020-12."""
        if self.is_draft_4:
            self._draft_4(schema)
        if str(schema.get("$id", "")).startswith("#"):
            schema["$anchor"] = schema.pop("$id")[1:]
        if "$ref" in schema:
            schema["$ref"] = _ITEM.sub("/prefixItems/", schema["$ref"])
        if isinstance(schema.get("items"), list):
            if first := schema.pop("items"):
                schema["prefixItems"] = first
            if "additionalItems" in schema:
                schema["items"] = schema["additionalItems"]
        schema.pop("additionalItems", None)  # no effect beside one schema for all items

    def _draft_4(self, schema: Schema) -> None:
        """Convert `id` and exclusive bounds, which are booleans. An `enum` of one value stands for `const`."""
        if isinstance(schema.get("id"), str):
            schema["$id"] = schema.pop("id")
        if "const" in schema:
            self._leave_out(schema, "const")
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.capitalize()}"
            if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
                schema[exclusive] = schema.pop(bound)

    def rewrites(self, schema: Schema) -> None:
        rewrite(schema, self.judge)

    def references(self, schema: Schema) -> None:
        if "$ref" in schema:
            self.num_references += 1
            own, hash, path = schema["$ref"].partition("#")
            if own and own == str(self.root.get("$id", self.root.get("id"))).removesuffix("#"):
                schema["$ref"] = hash + path or "#"
            self.leads_elsewhere |= pointed_to(self.root, schema["$ref"]) is None
        if self.num_references > MAX_REFERENCES:
            raise ValueError(f"$ref: a JSON Schema may have at most {MAX_REFERENCES} of them")

    def values(self, schema: Schema) -> None:
        given = [schema["const"]] if "const" in schema else []
        given += schema.get("enum", [])
        self.num_enum_values += len(given)
        if self.num_enum_values > MAX_ENUM_VALUES:
            raise ValueError(f"enum: a JSON Schema may have at most {MAX_ENUM_VALUES} values in all")
        for value in given:
            _check_value(value)

    def objects(self, schema: Schema) -> None:
        num_properties = len(schema.get("properties", {}))
        if num_properties > MAX_PROPERTIES:
            raise ValueError(f"properties: an object may have at most {MAX_PROPERTIES}, got {num_properties}")
        # The library might generate the same additional property twice.
        if schema.get("minProperties", 0) > len(schema.get("required", ())) + 1:
            if self.is_lenient:
                self._leave_out(schema, "minProperties")
                return
            raise ValueError("minProperties is supported up to one more than the number of required properties")
        if "patternProperties" in schema:
            schema["patternProperties"] = {
                _portable("patternProperties", self._plain(pattern)): inner
                for pattern, inner in schema["patternProperties"].items()
            }

    def _plain(self, pattern: str) -> str:
        return self.judge.texts.pattern([pattern]) or pattern if looks_ahead(pattern) else pattern

    def arrays(self, schema: Schema) -> None:
        schema.pop(MARK, None)
        if schema.get("uniqueItems") is False or schema.get("maxItems", 2) <= 1:
            schema.pop("uniqueItems", None)
        if schema.get("uniqueItems") is True and not self.is_lenient:
            schema[MARK] = schema.pop("uniqueItems")  # enforced by `UniqueItems`

    def numbers(self, schema: Schema) -> None:
        for name in _BOUNDS:
            bound = schema.get(name, 0)
            if abs(bound) <= EXACT:  # booleans of older drafts have the values 1 and 0
                continue
            if (bound < 0) != (name in ("minimum", "exclusiveMinimum")):
                raise ValueError(f"{name} must be at most 2**53 away from 0, got {bound}")
            schema[name] = EXACT if bound > 0 else -EXACT  # such as the bounds of 64-bit integers, which no one needs
        step = schema.get("multipleOf", 1)
        if not (0 < step <= 1000 and (step * 64 % 1 == 0 or round(step, MOST_DECIMALS) == step)):
            raise ValueError(f"multipleOf must be at most 1000, and a multiple of 1/64 or 0.000001, got {step}")

    def strings(self, schema: Schema) -> None:
        if "pattern" in schema:
            schema["pattern"] = _portable("pattern", schema["pattern"])
        name = schema.get("format")
        if name == "int32":
            del schema["format"]
            _add(schema, {"minimum": -(2**31), "maximum": 2**31 - 1})
        elif name in FORMATS:
            del schema["format"]
            _add(schema, {"pattern": FORMATS[name]})
        elif name is not None and name not in _LIBRARY_FORMATS:
            del schema["format"]
            if name not in _HINTS:
                self.notes.append(f"the format {name[:MAX_SHOWN]!r} is not enforced: it is an annotation")

    def leftovers(self, schema: Schema) -> None:
        for name in _LACKING:
            if name in schema:
                self._leave_out(schema, name)
        if "oneOf" in schema:
            also(schema, {"anyOf": schema["oneOf"]})
            self._leave_out(schema, "oneOf")

    def _leave_out(self, schema: Schema, name: str) -> None:
        del schema[name]
        self.notes.append(f"{name} is not enforced" + (", but for anyOf" if name == "oneOf" else ""))


def _add(schema: Schema, also: Schema) -> None:
    """Restrict the schema to instances that also match `also`."""
    if schema.keys() & also.keys():
        schema["allOf"] = [*schema.get("allOf", []), also]
    else:
        schema |= also


def _portable(name: str, pattern: str) -> str:
    try:
        return portable(pattern, in_json=True)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _pointer(at: Any) -> str:
    """Return the JSON pointer of a position (key, position of the parent)."""
    keys: list[str] = []
    while at is not None:
        keys.append(str(at[0]).replace("~", "~0").replace("/", "~1"))
        at = at[1]
    return "/".join(["#", *reversed(keys)])


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _is_names(value: Any) -> bool:
    return _is_list_of(value, str)


def _is_map_of(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_right, value.values()))


def _check_value(value: Any) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("enum, const: integers must be less than 2**63 away from 0")
    if isinstance(value, str) and len(value) > MAX_TEXT_LENGTH:
        raise ValueError(f"enum, const: texts may have at most {MAX_TEXT_LENGTH} characters")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_value(inner)
