"""`oneOf` as `anyOf`: branches of which an instance matches at most one, or that can be narrowed until that holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeAlias

from engine.structured.values import TYPES, listed, pattern_without, values_of, without

Schema: TypeAlias = dict[str, Any]
Resolve: TypeAlias = Callable[[str], Any]  # what a `$ref` points to, or None

MAX_NAMES = 8  # of which one tells two schemas apart
MAX_BRANCHES = 32
MAX_WORK = 100_000  # schemas, names and values that are looked at for all of one document
MAX_LEVELS = 6  # of schemas inside schemas, when two are compared
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
_ANNOTATIONS = ("title", "description", "$comment")
_RANGES = {"number": ("minimum", "maximum"), "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


def views(schema: Any, resolve: Resolve) -> list[Schema]:
    """Schemas of which an instance of `schema` matches each: itself, what it refers to, its `allOf`. Each is there once."""
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


def exclusive(schema: Schema, judge: Judge) -> list[Any] | None:
    """The branches of the schema's `oneOf`, narrowed so that `anyOf` of them says the same; None: not known how."""
    branches = list(schema["oneOf"])
    values = [value for branch in branches for value in values_of(branch) or ()]
    if len(branches) > MAX_BRANCHES:
        only_texts = all(map(values_of, branches)) and all(isinstance(value, str) for value in values)
        return branches if only_texts and len(set(values)) == len(values) else None
    types = _types(schema)
    for i, j in combinations(range(len(branches)), 2):
        if judge.work_left < 0:
            return None
        if judge.disjoint(branches[i], branches[j], types):
            continue
        narrowed = _parted(branches[i], branches[j], types, judge)
        if narrowed is None:
            return None
        branches[i], branches[j] = narrowed
    return branches


def _types(schema: Schema) -> set[str]:
    """Those that an instance may have; a number that is an integer is a number here."""
    values = values_of(schema)
    if values is not None:
        return {_KINDS.get(type(value), "object") for value in values}
    return {"number" if kind == "integer" else kind for kind in listed(schema.get("type", list(TYPES)))}


@dataclass
class Judge:
    """Compares the schemas of one document, for a while: they may be written to be compared for ever."""

    resolve: Resolve
    work_left: int = MAX_WORK

    def views(self, schema: Any) -> list[Schema]:
        found = views(schema, self.resolve)
        self.work_left -= sum(1 + len(each.get("enum", ())) + len(each.get("required", ())) for each in found)
        return found

    def disjoint(self, one: Any, other: Any, types: set[str], levels: int = MAX_LEVELS) -> bool:
        """Whether it is certain that no instance of one of `types` matches both."""
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
        if len(common) == 1 and (limits := _RANGES.get(next(iter(common)))):
            least, most = limits
            if any(a.get(most, float("inf")) < b.get(least, float("-inf")) for a, b in ((one, other), (other, one))):
                return True
        if common == {"array"} and one.get("minItems") and other.get("minItems"):
            items = [each.get("items", True) for each in (one, other) if "prefixItems" not in each]
            return len(items) == 2 and self.disjoint(items[0], items[1], set(TYPES), levels)
        if common != {"object"}:
            return False
        for a, b in ((one, other), (other, one)):
            if any(_forbids(b, name) for name in a.get("required", ())):
                return True
        both = set(one.get("required", ())) & set(other.get("required", ()))
        everything = set(TYPES)
        return any(
            self.disjoint(_property(one, name), _property(other, name), everything, levels) for name in sorted(both)
        )


def _property(schema: Schema, name: str) -> Any:
    return schema.get("properties", {}).get(name, True)


def _forbids(schema: Schema, name: str) -> bool:
    if name in schema.get("properties", {}):
        return schema["properties"][name] is False
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _parted(one: Any, other: Any, types: set[str], judge: Judge) -> tuple[Any, Any] | None:
    """Both, narrowed so that no instance of one matches the other as it was."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return None
    values, others = values_of(one), values_of(other)
    if values is not None and others is not None:
        return {"enum": without(values, others)}, {"enum": without(others, values)}
    if values is not None:
        return (False, found) if (found := _apart_from(other, values, types)) else None
    if others is not None:
        return (found, False) if (found := _apart_from(one, others, types)) else None
    for each in (one, other):
        kinds = [view["type"] for view in judge.views(each) if "type" in view]
        if (_types(each) & types) != {"object"} and (kinds or "object" not in types):
            return None
    left, right = _apart(one, other, judge), _apart(other, one, judge)
    return None if left is None or right is None else (left, right)


def _apart(schema: Schema, other: Schema, judge: Judge) -> Any:
    found = _without_a_name(schema, other, judge)
    return _with_a_name(schema, other, judge) if found is None else found


def _with_a_name(schema: Schema, other: Schema, judge: Judge) -> Any:
    """The schema's objects that have a name for which `other` allows nothing that the schema does. None: there is none."""
    own, others = judge.views(schema), judge.views(other)
    everything = set(TYPES)
    found = [
        name
        for name in dict.fromkeys(name for view in own for name in view.get("properties", {}))
        if all(_property(view, name) is not False for view in own)
        and any(
            _forbids(theirs, name) or judge.disjoint(_property(view, name), _property(theirs, name), everything)
            for view, theirs in product(own, others)
        )
    ]
    if not found:
        return None
    required = [{"required": [name]} for name in found[:MAX_NAMES]]
    return {"allOf": [schema, {"type": "object", **(required[0] if len(required) == 1 else {"anyOf": required})}]}


def _without_a_name(schema: Schema, other: Schema, judge: Judge) -> Any:
    """The schema's objects that lack a name which `other` requires. None: not known how."""
    own, others = (judge.views(each) for each in (schema, other))
    needed, free = ({name for view in each for name in view.get("required", ())} for each in (own, others))
    if names := sorted(free - needed):
        known = {name for view in own for name in view.get("properties", {})}
        name = next((name for name in names if name not in known), names[0])  # what the schema does not speak of
        return {"allOf": [schema, {"type": "object", "properties": {name: False}}]}
    says_nothing_else = all(view.keys() <= {"type", "required", "allOf", *_ANNOTATIONS} for view in others)
    return False if says_nothing_else else None


def _apart_from(schema: Schema, values: list[Any], types: set[str]) -> Schema | None:
    """The schema without these values, where they are texts."""
    if not all(isinstance(value, str) for value in values) or (pattern := pattern_without(values)) is None:
        return None
    texts = {"type": "string", "pattern": pattern}
    rest = sorted((_types(schema) & types) - {"string"})
    return {"allOf": [schema, {"anyOf": [{"type": rest}, texts]} if rest else texts]}
