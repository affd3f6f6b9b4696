"""Rewrites JSON Schema keywords that the grammar library does not support in terms of keywords that it does.

A rewritten schema has the same instances or fewer, so generated instances are always valid. Keywords that cannot be
rewritten remain, and the library refuses them by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

from engine.structured.exclusive import MAX_BRANCHES, MAX_LEVELS, Judge, Schema, exclusive, views
from engine.structured.languages import NOTHING
from engine.structured.regex import MAX_LENGTH, end_of_group
from engine.structured.values import TYPES, escaped, listed, pattern_without, values_of, without

MAX_AHEAD = 16  # lookaheads in a pattern
_OTHERS = frozenset(["anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "not", "$dynamicRef", "$recursiveRef"])
MAX_PATTERNS = 16  # overlapping patterns in patternProperties
MAX_CONTAINED = 16  # largest supported `minContains`
MAX_OTHERS = 400  # characters of the pattern for names that no other pattern matches; the library compares all of them
MAX_UNIQUE = 6  # values of which all subsets are written out
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OF_ANY = ("type", "enum", "const", "anyOf", "allOf", "oneOf", "not", "if", *_REFERENCES)  # keywords for all types
_OF_TEXTS = ("pattern", "minLength", "maxLength")
_OF_OBJECTS = ("properties", "required", "patternProperties", "additionalProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties")  # fmt: skip
_OF_ARRAYS = ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_RESTRICTING = frozenset((*_OF_ANY, *_OF_TEXTS, *_OF_OBJECTS, *_OF_ARRAYS, *_OF_NUMBERS))
# Keyword of a limit → schema of what exceeds it.
_BEYOND: dict[str, Callable[[Any], Schema]] = {
    "minLength": lambda least: {"type": "string", "maxLength": least - 1} if least else {"enum": []},
    "maxLength": lambda most: {"type": "string", "minLength": most + 1},
    "minItems": lambda least: {"type": "array", "maxItems": least - 1} if least else {"enum": []},
    "maxItems": lambda most: {"type": "array", "minItems": most + 1},
    "minimum": lambda least: {"type": "number", "exclusiveMaximum": least},
    "maximum": lambda most: {"type": "number", "exclusiveMinimum": most},
    "exclusiveMinimum": lambda least: {"type": "number", "maximum": least},
    "exclusiveMaximum": lambda most: {"type": "number", "minimum": most},
}
_NO_TEXT = {"type": [kind for kind in TYPES if kind not in ("string", "integer")]}
_LOOKS = re.compile(r"\(\?<?[=!]")
_AHEAD = re.compile(r"\(\?[=!]")


def rewrite(schema: Schema, judge: Judge) -> None:
    """Rewrite this schema in place, without its subschemas. `judge`: of its document."""
    _unevaluated(schema, judge)  # before other rewrites add schemas
    _pattern(schema, judge)
    _negation(schema, judge)
    _dependent(schema)
    _conditions(schema, judge)
    _contains(schema, judge)
    _unique(schema)
    _names(schema, judge)
    _counts(schema)
    _possible(schema, judge)
    _one_of(schema, judge)


def _pattern(schema: Schema, judge: Judge) -> None:
    """Replace lookaheads by an equivalent pattern, or turn leading ones into separate patterns."""
    pattern = schema.get("pattern", "")
    if not looks_ahead(pattern) or len(pattern) > MAX_LENGTH:
        return
    if (found := judge.texts.pattern([pattern])) is not None:
        schema["pattern"] = found
        return
    for _ in range(MAX_AHEAD):  # each iteration searches the rest of the pattern
        if not pattern.startswith("^(?=") or (end := end_of_group(pattern, 1)) is None:
            return
        also(schema, {"pattern": f"^(?:{pattern[4 : end - 1]})"})
        pattern = schema["pattern"] = "^" + pattern[end:]


def looks_ahead(pattern: str) -> bool:
    return _AHEAD.search(pattern) is not None


def _negation(schema: Schema, judge: Judge) -> None:
    """Rewrite `not` of types, of values if the allowed ones are listed or strings, and of conditions on properties."""
    refused = schema.get("not")
    if refused is False or refused is True:
        schema.pop("not")
        if refused:
            schema["enum"] = []
    elif isinstance(refused, dict) and refused.keys() == {"type"}:
        kinds = listed(refused["type"])
        types = [kind for kind in listed(schema.get("type", list(TYPES))) if kind not in kinds]
        if "number" in kinds:
            types = [kind for kind in types if kind != "integer"]
        elif "integer" in kinds and "number" in types:
            if "type" in schema:
                return  # non-integers alone cannot be expressed
            types.remove("number")
        schema["type"] = types
        del schema["not"]
    elif (
        isinstance(refused, dict)
        and "not" in schema
        and (opposites := _opposites(schema, refused, judge) or _some_opposites(schema, refused, judge)) is not None
    ):
        del schema["not"]
        also(schema, _any_of(opposites))


def _dependent(schema: Schema) -> None:
    """Rewrite `dependentRequired`, `dependentSchemas` and `dependencies`: the name is absent, or the rest holds."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependent = schema.get(keyword)
        if not isinstance(dependent, dict):
            continue
        del schema[keyword]
        for name, needed in dependent.items():
            more = {"required": [name, *needed]} if isinstance(needed, list) else {"required": [name]}
            there = more if isinstance(needed, list) else {"allOf": [more, needed]}
            also(schema, {"anyOf": [{"properties": {name: False}}, there]})


def _one_of(schema: Schema, judge: Judge) -> None:
    """Convert `oneOf` to `anyOf` if at most one branch can match."""
    if "oneOf" not in schema:
        return
    branches = exclusive(schema, judge, partial(_opposites, judge=judge))
    if branches is not None:
        del schema["oneOf"]
        also(schema, {"anyOf": branches})


def _unevaluated(schema: Schema, judge: Judge) -> None:
    """Rewrite `unevaluatedProperties` and `unevaluatedItems` if the schemas for the same instance always apply."""
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if schema.get(keyword) in (True, {}):
            del schema[keyword]
    if "unevaluatedItems" in schema and not schema.keys() & {*_OTHERS, "$ref", "allOf", "contains"}:
        schema.setdefault("items", schema.pop("unevaluatedItems"))
    if "unevaluatedProperties" not in schema:
        return
    always, rest = views(schema, judge.resolve), schema.pop("unevaluatedProperties")
    if not any(view.keys() & _OTHERS for view in always):
        schema |= _closed(always, rest)
    elif schema.keys() & _OTHERS == {"anyOf"} and not any(
        view.keys() & _OTHERS for view in always if view is not schema
    ):
        schema["anyOf"] = [
            {"allOf": [each, _closed([*always, *views(each, judge.resolve)], rest)]} for each in schema["anyOf"]
        ]
    else:  # conditional schemas evaluate more names: without those names, nothing is left unevaluated
        schema |= _closed(always, False)


def _closed(always: list[Schema], rest: Any) -> Schema:
    """Return a schema by which properties that these schemas do not mention match `rest`."""
    if any(view.keys() & {"additionalProperties", "unevaluatedProperties"} for view in always):
        return {}  # all are mentioned
    own = always[0]
    closed: Schema = {"additionalProperties": rest}
    for keyword in ("properties", "patternProperties"):
        if names := {name: True for view in always for name in view.get(keyword, {})}:
            closed[keyword] = names | own.get(keyword, {})
    return closed


def _conditions(schema: Schema, judge: Judge) -> None:
    """Rewrite `if` with its negation, if that can be expressed; otherwise require both `then` and `else`."""
    if "if" not in schema:
        for name in ("then", "else"):
            schema.pop(name, None)  # no effect
        return
    condition = schema["if"]
    if isinstance(condition, bool):
        also(schema, schema.get("then" if condition else "else", True))
    elif (opposites := _opposites(schema, condition, judge)) is not None:
        met = {"allOf": [condition, schema.get("then", True)]}
        unmet = [{"allOf": [opposite, schema.get("else", True)]} for opposite in opposites]
        also(schema, {"anyOf": [met, *unmet]})
    else:
        also(schema, schema.get("then", True))
        also(schema, schema.get("else", True))
    for name in ("if", "then", "else"):
        schema.pop(name, None)


def _some_opposites(schema: Schema, condition: Any, judge: Judge) -> list[Schema] | None:
    found = _opposites(schema, condition, judge, partly=True)
    if found:
        judge.notes.append("not: of what it allows, some is left out")
    return found


def _opposites(
    schema: Schema, condition: Any, judge: Judge, levels: int = MAX_LEVELS, partly: bool = False
) -> list[Schema] | None:
    """Return schemas such that an instance of `schema` matches one if and only if it fails `condition`, or None.

    `partly`: if what fails some keywords cannot be expressed, return schemas of what fails the others.
    """
    if isinstance(condition, bool):
        return [] if condition else [{}]
    if not levels:
        return None
    judge.work_left -= 1
    said = condition.keys() & _RESTRICTING
    if condition.get("additionalProperties") in (True, {}):
        said -= {"additionalProperties"}
    parts: list[list[Schema] | None] = []
    if chosen := said & {"const", "enum"}:
        parts.append(_other_values(schema, {word: condition[word] for word in chosen}))
        said -= {"const", "enum", "type"}
    if "type" in said:
        kinds = _other_types(condition)
        if "integer" in listed(condition["type"]) and "number" in kinds:  # numbers that are no integers
            kinds.remove("number")
            parts.append(None)
        parts.append([{"type": kinds}] if kinds else [])
    is_object = "object" in listed(condition.get("type", "object"))
    for word in sorted(said - {"type"}):
        if word in ("properties", "required"):
            parts += _opposites_of_object(schema, condition, word, judge, levels, partly) if is_object else []
        else:
            parts.append(_opposite_of(word, schema, condition[word], judge, levels, partly))
    found = [each for part in parts for each in part or ()]
    return None if None in parts and not (partly and found) else found


def _opposite_of(word: str, schema: Schema, value: Any, judge: Judge, levels: int, partly: bool) -> list[Schema] | None:
    """Return schemas of what fails one keyword of a condition, like `_opposites`."""

    def inner(each: Any) -> list[Schema] | None:
        return _opposites(schema, each, judge, levels - 1, partly)

    match word:
        case "$ref":
            target = judge.resolve(value)
            return inner(target) if isinstance(target, dict) else None
        case "not":
            return [value] if isinstance(value, dict) else [{}] if value else []
        case "pattern":
            pattern = judge.texts.pattern([], [value])
            return None if pattern is None else [{"type": "string", "pattern": pattern}]
        case "anyOf" | "oneOf":
            parts = [inner(each) for each in value]
            is_exact = word == "anyOf" or partly  # what matches several of `oneOf` is left out
            return None if None in parts or not is_exact else [{"allOf": [_any_of(part or []) for part in parts]}]
        case "allOf":
            parts = [inner(each) for each in value]
            found = [each for part in parts for each in part or ()]
            return None if None in parts and not (partly and found) else found
        case "contains":
            others = _opposites({}, value, judge, levels - 1, partly)
            return None if others is None else [{"type": "array", "items": _any_of(others)}]
    return [_BEYOND[word](value)] if word in _BEYOND and not isinstance(value, bool) else None


def _other_types(condition: Schema) -> list[str]:
    """Return the schema of all other types than the condition's. Without `type`, a condition has all types."""
    return [kind for kind in TYPES if kind != "integer" and kind not in listed(condition.get("type", list(TYPES)))]


def _other_values(schema: Schema, condition: Schema) -> list[Schema] | None:
    named, chosen = values_of(schema), values_of(condition) or []
    if named is not None:
        return [{"enum": rest}] if (rest := without(named, chosen)) else []
    texts = [value for value in chosen if isinstance(value, str)]
    if schema.get("type", "string") != "string" or ("type" not in schema and len(texts) < len(chosen)):
        return None
    pattern = pattern_without(texts)
    others = [] if "type" in schema else [_NO_TEXT]
    return None if pattern is None else [{"type": "string", "pattern": pattern}, *others]


def _opposites_of_object(
    schema: Schema, condition: Schema, word: str, judge: Judge, levels: int, partly: bool
) -> list[list[Schema] | None]:
    """Return the objects that fail `required` or `properties` of a condition: a list for each name."""
    if word == "required":
        names = [name for name in condition["required"] if name not in schema.get("required", ())]
        return [[{"type": "object", "properties": {name: False}} for name in names]]
    found: list[list[Schema] | None] = []
    for name, value in condition["properties"].items():
        inner = schema.get("properties", {}).get(name)
        others = _opposites(inner if isinstance(inner, dict) else {}, value, judge, levels - 1, partly)
        found.append(
            None
            if others is None
            else [{"type": "object", "properties": {name: other}, "required": [name]} for other in others]
        )
    return found


def _contains(schema: Schema, judge: Judge) -> None:
    """Rewrite `contains`: the first elements match it. With `maxContains`, elements after the first few do not."""
    if "contains" not in schema:
        for name in ("minContains", "maxContains"):
            schema.pop(name, None)  # no effect
    if "contains" not in schema or "prefixItems" in schema:
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    items, inner = schema.get("items", True), schema["contains"]
    if max(least, most or 0) > MAX_CONTAINED:
        return
    first = [{"allOf": [inner, items]}] * least
    if most is not None:
        others = _opposites(items if isinstance(items, dict) else {}, inner, judge, partly=True)
        if others is None or most < least:
            return
        first += [items] * (most - least)
        schema["items"] = {"allOf": [items, _any_of(others)]}
    for name in ("contains", "minContains", "maxContains"):
        schema.pop(name, None)
    if first:
        schema["prefixItems"] = first
    if least:
        schema["minItems"] = max(schema.get("minItems", 0), least)
        schema["type"] = "array" if "array" in listed(schema.get("type", "array")) else schema["type"]


def _unique(schema: Schema) -> None:
    """Rewrite `uniqueItems` for listed values: write out all subsets of a few values; for more, limit the length."""
    if schema.get("uniqueItems") is not True or schema.keys() & {"prefixItems", "contains"}:
        return
    values = values_of(schema.get("items"))
    if values is None:
        return
    values = [value for i, value in enumerate(values) if without([value], values[:i])]
    if len(values) > MAX_UNIQUE or schema.get("type") != "array":
        schema["maxItems"] = min(schema.get("maxItems", len(values)), len(values))
        return
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
    sets = [chosen for count in range(least, most + 1) for chosen in combinations(values, count)]
    for name in ("uniqueItems", "items", "minItems", "maxItems"):
        schema.pop(name, None)
    arrays = [
        {
            "type": "array",
            **({"prefixItems": [{"const": value} for value in chosen]} if chosen else {}),
            "minItems": len(chosen),
            "maxItems": len(chosen),
        }
        for chosen in sets
    ]
    also(schema, {"anyOf": arrays} if arrays else {"enum": []})


def _names(schema: Schema, judge: Judge) -> None:
    """Rewrite `propertyNames` with patterns, lengths and lists as `patternProperties`, and make these disjoint."""
    names = schema.get("propertyNames", True)
    pattern = _pattern_of(names, judge)
    if pattern == "":
        schema.pop("propertyNames", None)
    given, rest = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    if pattern == "":
        _patterns(schema, given, rest, judge)
        return
    if pattern is None or "allOf" in schema or "$ref" in schema:
        return
    properties = {name: inner for name, inner in schema.get("properties", {}).items() if _may_be(name, names)}
    if properties and (isinstance(rest, dict) or not _is_simple(names)):
        return  # patternProperties would apply to them too, and a pattern of all other names may be slow to match
    wanted = [(judge.texts.pattern([own, pattern]), inner) for own, inner in given.items()]
    if rest is not False:
        wanted.append((judge.texts.pattern([pattern], list(given)) if given else pattern, rest))
    allowed = [(each, inner) for each, inner in wanted if each is not None and each != NOTHING]
    found = _disjoint(allowed, judge)
    if found is None or any(each is None for each, _ in wanted):
        return
    del schema["propertyNames"]
    schema.pop("patternProperties", None)
    schema["properties"] = properties
    if found:
        schema["patternProperties"] = found
    schema["additionalProperties"] = False


def _patterns(schema: Schema, given: dict[str, Any], rest: Any, judge: Judge) -> None:
    """Return disjoint `patternProperties` that all regex dialects agree on."""
    if len(given) > 1 and (parted := _disjoint(list(given.items()), judge)) is not None:
        schema["patternProperties"] = parted
    elif len(given) > 1:
        _names_alone(schema, given, judge)
        return
    if rest is False or all(map(judge.texts.is_plain, given)):
        return
    own = list(schema.get("properties", {}))
    known = [f"^(?:{'|'.join(map(escaped, own))})$"] if own and rest is not True else []
    others = judge.texts.pattern([], [*given, *known])
    schema["additionalProperties"] = False
    if others is not None and others != NOTHING and len(others) <= MAX_OTHERS:
        schema["patternProperties"] = {**schema["patternProperties"], others: rest}


def _names_alone(schema: Schema, given: dict[str, Any], judge: Judge) -> None:
    """Return only literal names, from patterns and properties, if the overlap of patterns cannot be determined."""
    alternatives = [each for word in ("anyOf", "oneOf", "allOf") for each in schema.get(word, ())]
    required = [name for each in (schema, *alternatives) if isinstance(each, dict) for name in each.get("required", ())]
    spoken_of = [pattern for pattern in given if pattern.isidentifier()] + [
        name for name in required if not all(judge.texts.refuses(pattern, name) for pattern in given)
    ]
    names = dict.fromkeys(spoken_of, True) | schema.get("properties", {})
    judge.work_left -= len(names) * len(given)
    if not names or judge.work_left < 0:
        return
    schema["properties"] = {
        name: {"allOf": [inner, *(each for pattern, each in given.items() if not judge.texts.refuses(pattern, name))]}
        for name, inner in names.items()
    }
    del schema["patternProperties"]
    schema["additionalProperties"] = False
    judge.notes.append("patternProperties: where they overlap, only names that are spoken of are generated")


def _counts(schema: Schema) -> None:
    """Rewrite `minProperties` and `maxProperties` by requiring listed properties, or allowing only the first ones."""
    properties, required = schema.get("properties", {}), list(dict.fromkeys(schema.get("required", ())))
    free = [name for name, inner in properties.items() if inner is not False and name not in required]
    least, most = schema.get("minProperties", 0) - len(required), schema.get("maxProperties")
    if not free or not schema.keys() & {"minProperties", "maxProperties"} or least > 1:
        return
    schema.pop("minProperties", None)
    if most is not None:
        del schema["maxProperties"]
        kept = max(most - len(required), 0)
        alone = kept == 1 and all(name in properties for name in required)
        names = free[:MAX_BRANCHES] if alone else free[:kept]
        schema["properties"] = properties | {name: False for name in free if name not in names}
        schema.pop("patternProperties", None)
        schema["additionalProperties"] = False
        if alone:
            nothing: list[Schema] = [{"properties": dict.fromkeys(names, False)}] if least < 1 else []
            one = [{"properties": {other: other == name for other in names}, "required": [name]} for name in names]
            also(schema, {"anyOf": one + nothing})
            return
        free = names
    if least == 1:
        also(schema, _any_of([{"required": [name]} for name in free[:MAX_BRANCHES]]))


def _possible(schema: Schema, judge: Judge) -> None:
    """Drop alternatives that the rest of the schema rules out, or whose pattern cannot be expressed."""
    if "anyOf" not in schema:
        return
    kept = [each for each in schema["anyOf"] if not _is_beyond(each, judge)]
    if kept and len(kept) < len(schema["anyOf"]):
        judge.notes.append("pattern: alternatives with look-behind, or with look-ahead that is too large, are left out")
        schema["anyOf"] = kept
    if schema.keys() & {"required", "type"}:
        rest = {word: value for word, value in schema.items() if word not in ("anyOf", "allOf", "$ref")}
        kept = [each for each in schema["anyOf"] if not judge.disjoint(rest, each, set(TYPES))]
        schema |= {"anyOf": kept} if kept else {"enum": []}
        if not kept:
            del schema["anyOf"]


def _is_beyond(schema: Any, judge: Judge) -> bool:
    pattern = schema.get("pattern", "") if isinstance(schema, dict) else ""
    if len(pattern) > MAX_LENGTH or not _LOOKS.search(pattern):
        return False
    return not pattern.startswith("^(?=") and judge.texts.pattern([pattern]) is None


def _disjoint(patterns: list[tuple[str, Any]], judge: Judge) -> dict[str, Any] | None:
    """Return disjoint patterns with their schemas, or None if they cannot be determined."""
    found: list[tuple[str, Any]] = []
    for pattern, inner in patterns:
        parts: list[tuple[str, Any]] = []
        left: str | None = pattern
        for other, theirs in found:
            if left is None or left == NOTHING or judge.texts.are_disjoint(other, left):
                parts.append((other, theirs))
                continue
            both, rest = judge.texts.pattern([other, left]), judge.texts.pattern([other], [left])
            left = judge.texts.pattern([left], [other])
            if both is None or rest is None or left is None:
                return None
            parts += [(rest, theirs), (both, {"allOf": [theirs, inner]})]
        found = [each for each in [*parts, (left or NOTHING, inner)] if each[0] != NOTHING]
        if len(found) > MAX_PATTERNS:
            return None
    return dict(found)


def _may_be(name: str, names: Schema) -> bool:
    """Return whether `names` may allow the name."""
    values = values_of(names)
    in_list = values is None or name in values
    return in_list and names.get("minLength", 0) <= len(name) <= names.get("maxLength", len(name))


def _is_simple(names: Schema) -> bool:
    return not names.keys() & {"pattern", "not", "anyOf", "$ref"}


def _pattern_of(names: Any, judge: Judge, levels: int = MAX_LEVELS) -> str | None:
    """Return a pattern for the names, "" for all names; None if it cannot be expressed."""
    if isinstance(names, bool):
        return "" if names else NOTHING
    if not isinstance(names, dict) or not levels:
        return None
    judge.work_left -= 1
    said = names.keys() & {*_OF_ANY, *_OF_TEXTS}
    if "string" not in listed(names.get("type", "string")):
        return NOTHING
    said -= {"type"}
    if said == {"$ref"}:
        return _pattern_of(judge.resolve(names["$ref"]), judge, levels - 1)
    if said == {"anyOf"}:
        options = [_pattern_of(each, judge, levels - 1) for each in names["anyOf"]]
        return None if None in options else "" if "" in options else "|".join(f"(?:{each})" for each in options)
    if said == {"oneOf"}:
        options = [_pattern_of(each, judge, levels - 1) or "" for each in names["oneOf"]]
        are_apart = all(a and b and judge.texts.are_disjoint(a, b) for a, b in combinations(options, 2))
        return "|".join(f"(?:{each})" for each in options) if are_apart and all(options) else None
    if said == {"allOf"}:
        parts = [_pattern_of(each, judge, levels - 1) for each in names["allOf"]]
        return None if None in parts else judge.texts.pattern([each for each in parts if each])
    wanted: list[str | None] = []
    refused: list[str | None] = []
    if said <= {"enum", "const"} and said:
        texts = [value for value in values_of(names) or () if isinstance(value, str)]
        wanted.append("^(?:" + "|".join(map(escaped, texts)) + ")$" if texts else NOTHING)
    elif said <= {"pattern", "minLength", "maxLength", "not"}:
        if "pattern" in said:
            pattern = names["pattern"]
            wanted.append(judge.texts.pattern([pattern]) if looks_ahead(pattern) else pattern)
        if said & {"minLength", "maxLength"}:
            wanted.append(rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$")
        if "not" in said:
            refused.append(_pattern_of(names["not"], judge, levels - 1))
    else:
        return None
    if None in wanted or None in refused:
        return None
    patterns = [each for each in wanted if each]
    if refused or len(patterns) > 1:
        return judge.texts.pattern(patterns, [each or "" for each in refused])
    return patterns[0] if patterns else ""


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else {"enum": []}


def also(schema: Schema, more: Any) -> None:
    """Restrict the schema to instances that also match `more`."""
    if more is not True:
        schema["allOf"] = [*schema.get("allOf", []), more]
