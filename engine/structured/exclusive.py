"""Converts `oneOf` to `anyOf` if an instance matches at most one branch, narrowing branches if necessary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from typing import Any, TypeAlias

from engine.structured.languages import Texts
from engine.structured.values import TYPES, listed, pattern_without, values_of, without

Schema: TypeAlias = dict[str, Any]
Resolve: TypeAlias = Callable[[str], Any]  # `$ref` → its target, or None
Opposites: TypeAlias = Callable[..., "list[Schema] | None"]

MAX_ITEMS = 16  # array elements and values that are compared
MAX_LENGTH = 2**31  # of arrays
MAX_NAMES = 8  # property names tried as discriminators
MAX_BRANCHES = 32
MAX_WORK = 100_000  # schemas, names and values examined per document
MAX_LEVELS = 6  # nesting depth when comparing two schemas
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
_RANGES = {"number": ("minimum", "maximum"), "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


def views(schema: Any, resolve: Resolve) -> list[Schema]:
    """Return all schemas that an instance of `schema` must match: itself, `$ref` targets and `allOf`, without
    duplicates.
    """
    found: dict[int, Schema] = {}
    rest = [schema]
    while rest:
        each = rest.pop()
        if isinstance(each, dict) and id(each) not in found:
            found[id(each)] = each
            rest += reversed(each.get("allOf", ()))
            if isinstance(reference := each.get("$ref"), str):
                rest.append(resolve(reference))
    return list(found.values())


def exclusive(schema: Schema, judge: Judge, opposites: Opposites) -> list[Any] | None:
    """Return the branches of the schema's `oneOf`, narrowed so that their `anyOf` is equivalent, or None if that fails.

    `opposites`: returns schemas that match exactly what a branch (second argument) does not, or None; `partly`: some of
    that.
    """
    branches = list(schema["oneOf"])
    values = [value for branch in branches for value in values_of(branch) or ()]
    if len(branches) > MAX_BRANCHES:
        only_texts = all(map(values_of, branches)) and all(isinstance(value, str) for value in values)
        return branches if only_texts and len(set(values)) == len(values) else None
    types, found = _types(schema), list(branches)
    # Compare the original branches: a narrowed branch tells less about what it refuses.
    for i, j in combinations(range(len(branches)), 2):
        if judge.work_left < 0:
            return None
        if _without_formats(branches[i]) == _without_formats(branches[j]):
            found[i] = found[j] = False  # `format` is an annotation: such an instance matches both branches
            continue
        if judge.disjoint(branches[i], branches[j], types):
            continue
        for partly in (False, True):
            narrowed = [
                _minus(branches[a], branches[b], types, judge, partial(opposites, partly=partly))
                for a, b in ((i, j), (j, i))
            ]
            if narrowed != [None, None]:
                break
        else:
            return None
        if None in narrowed:
            judge.notes.append("oneOf: of alternatives that overlap, some are left out")
        for k, more in zip((i, j), narrowed, strict=True):
            if not more or found[k] is False:
                found[k] = False
            elif found[k] is branches[k]:
                found[k] = {"allOf": [branches[k], more]}
            else:
                found[k]["allOf"].append(more)
    return found


def _without_formats(schema: Any) -> Any:
    return {word: value for word, value in schema.items() if word != "format"} if isinstance(schema, dict) else schema


def _types(schema: Schema) -> set[str]:
    """Return the types that an instance may have; integers count as numbers."""
    values = values_of(schema)
    if values is not None:
        return {_KINDS.get(type(value), "object") for value in values}
    return {"number" if kind == "integer" else kind for kind in listed(schema.get("type", list(TYPES)))}


@dataclass
class Judge:
    """Compares the schemas of a document with bounded work, since hostile schemas could make comparisons endless."""

    resolve: Resolve
    work_left: int = MAX_WORK
    texts: Texts = field(default_factory=Texts)
    notes: list[str] = field(default_factory=list)

    def types(self, schema: Any, levels: int = MAX_LEVELS) -> set[str]:
        """Return the types that an instance may have."""
        if schema is False:
            return set()
        found = set(TYPES) - {"integer"}
        for view in self.views(schema) if levels and self.work_left > 0 else ():
            found &= _types(view)
            for name in ("anyOf", "oneOf"):
                if view.get(name):
                    found &= set().union(*(self.types(each, levels - 1) for each in view[name]))
        return found

    def views(self, schema: Any) -> list[Schema]:
        found = views(schema, self.resolve)
        self.work_left -= sum(1 + len(each.get("enum", ())) + len(each.get("required", ())) for each in found)
        return found

    def disjoint(self, one: Any, other: Any, types: set[str], levels: int = MAX_LEVELS) -> bool:
        """Return whether certainly no instance of one of `types` matches both schemas."""
        if one is False or other is False:
            return True
        if not levels:
            return False
        for first, second in product(self.views(one), self.views(other)):
            self.work_left -= 1 + sum(
                len(each.get(name, ())) for each in (first, second) for name in ("enum", "required")
            )
            if self.work_left < 0:
                return False
            common = _types(first) & _types(second) & types
            if not common or self._differ(first, second, common, levels - 1):
                return True
            for options, rest in ((first, other), (second, one)):
                for name in ("anyOf", "oneOf"):
                    inner = options.get(name)
                    if inner and all(self.disjoint(each, rest, common, levels - 1) for each in inner):
                        return True
        return False

    def _differ(self, one: Schema, other: Schema, common: set[str], levels: int) -> bool:
        values, others = values_of(one), values_of(other)
        if values is not None and others is not None:
            return len(without(values, others)) == len(values)
        for a, b in ((one, other), (other, one)):
            if "not" in a and self._covers(a["not"], b, levels):
                return True
        if common == {"string"} and self._patterns_differ(one, other, values, others):
            return True
        if len(common) == 1 and (limits := _RANGES.get(next(iter(common)))):
            least, most = limits
            if any(a.get(most, float("inf")) < b.get(least, float("-inf")) for a, b in ((one, other), (other, one))):
                return True
        if common == {"array"}:
            length = min(max(each.get("minItems", 0) for each in (one, other)), MAX_ITEMS)
            return any(self.disjoint(_item(one, i), _item(other, i), set(TYPES), levels) for i in range(length))
        if common != {"object"}:
            return False
        for a, b in ((one, other), (other, one)):
            if any(self.forbids(b, name) for name in a.get("required", ())):
                return True
        both = set(one.get("required", ())) & set(other.get("required", ()))
        everything = set(TYPES)
        return any(
            self.disjoint(_property(one, name), _property(other, name), everything, levels) for name in sorted(both)
        )

    def _patterns_differ(self, one: Schema, other: Schema, values: list[Any] | None, others: list[Any] | None) -> bool:
        for a, given in ((one, others), (other, values)):
            if "pattern" in a and given is not None and all(isinstance(value, str) for value in given):
                return (
                    all(self.texts.refuses(a["pattern"], value) for value in given[:MAX_ITEMS])
                    and len(given) <= MAX_ITEMS
                )
        return "pattern" in one and "pattern" in other and self.texts.are_disjoint(one["pattern"], other["pattern"])

    def forbids(self, schema: Schema, name: str) -> bool:
        """Return whether certainly no object with this property matches."""
        if name in schema.get("properties", {}):
            return schema["properties"][name] is False
        patterns = schema.get("patternProperties", {})
        self.work_left -= len(patterns)
        return schema.get("additionalProperties") is False and all(
            inner is False or self.texts.refuses(pattern, name) for pattern, inner in patterns.items()
        )

    def _covers(self, wide: Any, schema: Schema, levels: int) -> bool:
        """Return whether certainly every instance of `schema` matches `wide`."""
        if wide is True or wide == {}:
            return True
        if not isinstance(wide, dict) or not levels:
            return False
        said = wide.keys() - {"title", "description", "$comment"}
        if said == {"anyOf"}:
            return any(self._covers(each, schema, levels - 1) for each in wide["anyOf"])
        values, allowed = values_of(schema), values_of(wide)
        if values is not None and said <= {"const", "enum", "type"} and allowed is not None:
            return not without(values, allowed) and _types({"enum": values}) <= _types(wide)
        if said == {"type"} and "integer" not in listed(wide["type"]):
            return _types(schema) <= _types(wide)
        if said <= {"required", "properties", "type"} and all(
            each is True for each in wide.get("properties", {}).values()
        ):
            is_object = "type" not in said or _types(schema) <= _types(wide)
            return is_object and set(wide.get("required", ())) <= set(schema.get("required", ()))
        return False


def _item(schema: Schema, index: int) -> Any:
    first = schema.get("prefixItems", [])
    return first[index] if index < len(first) else schema.get("items", True)


def _property(schema: Schema, name: str) -> Any:
    return schema.get("properties", {}).get(name, True)


def _minus(schema: Any, other: Any, types: set[str], judge: Judge, opposites: Opposites) -> Any:
    """Return constraints that keep instances of `schema` from matching `other`, or None if none are known."""
    if other is True or other == {}:
        return None
    schema = {} if schema is True else schema
    own, theirs = judge.types(schema) & types, judge.types(other) & types
    values, others = values_of(schema), values_of(other)
    if values is not None:
        rest = [value for value in values if judge.disjoint({"const": value}, other, types)]
        return {"enum": rest} if rest else None
    if others is not None and (found := _apart_from(others, own)):
        return found
    common = own & theirs
    parts: list[Schema] = [{"type": sorted(own - theirs)}] if own - theirs else []
    if "array" in common and (lengths := _other_lengths(schema, other, judge)):
        parts += lengths
        common = common - {"array"}
    if "object" in common and (found := _apart(schema, other, judge)):
        parts.append(found)
    elif common and (
        rests := [each for each in opposites(schema, other) or () if not judge.disjoint(each, schema, types)]
    ):
        parts += rests
    return parts[0] if len(parts) == 1 else {"anyOf": parts} if parts else None


def _other_lengths(schema: Schema, other: Schema, judge: Judge) -> list[Schema]:
    """Return the arrays of `schema` that are too short or too long for `other`."""
    least = max(view.get("minItems", 0) for view in judge.views(other))
    most = min(view.get("maxItems", MAX_LENGTH) for view in judge.views(other))
    shorter: list[Schema] = [{"type": "array", "maxItems": least - 1}] if least else []
    longer: list[Schema] = [{"type": "array", "minItems": most + 1}] if most < MAX_LENGTH else []
    return [each for each in shorter + longer if not judge.disjoint(each, schema, {"array"})]


def _apart(schema: Schema, other: Schema, judge: Judge) -> Any:
    return _without_a_name(schema, other, judge) or _with_a_name(schema, other, judge)


def _with_a_name(schema: Schema, other: Schema, judge: Judge) -> Any:
    """Return the objects with a property whose allowed values in both schemas are disjoint, or None if there is
    none.
    """
    own, others = judge.views(schema), judge.views(other)
    everything = set(TYPES)
    found = [
        name
        for name in dict.fromkeys(name for view in own for name in view.get("properties", {}))
        if all(_property(view, name) is not False for view in own)
        and any(
            judge.forbids(theirs, name) or judge.disjoint(_property(view, name), _property(theirs, name), everything)
            for view, theirs in product(own, others)
        )
    ]
    if not found:
        return None
    required = [{"required": [name]} for name in found[:MAX_NAMES]]
    return {"type": "object", **(required[0] if len(required) == 1 else {"anyOf": required})}


def _without_a_name(schema: Schema, other: Schema, judge: Judge) -> Any:
    """Return the objects that lack a property which `other` requires, or None if that cannot be expressed."""
    own, others = (judge.views(each) for each in (schema, other))
    needed, free = ({name for view in each for name in view.get("required", ())} for each in (own, others))
    if names := sorted(free - needed):
        known = {name for view in own for name in view.get("properties", {})}
        # Prefer a property that the schema does not mention.
        name = next((name for name in names if name not in known), names[0])
        return {"type": "object", "properties": {name: False}}
    return None


def _apart_from(values: list[Any], types: set[str]) -> Schema | None:
    """Return a schema of all values except these strings."""
    if not all(isinstance(value, str) for value in values) or (pattern := pattern_without(values)) is None:
        return None
    texts = {"type": "string", "pattern": pattern}
    rest = sorted(types - {"string"})
    return {"anyOf": [{"type": rest}, texts]} if rest else texts
