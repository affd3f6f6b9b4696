"""References between the schemas of a document: subschemas, recursion without end, and recursion beside keywords."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias

from engine.structured.values import pointed_to

Schema: TypeAlias = dict[str, Any]

MAX_WRITTEN_OUT = 20_000  # schemas
MAX_ROUNDS = 16  # iterations when looking for endless recursion
_TOO_LARGE = "$ref: recursion beside other keywords is too large when it is written out"
# Keywords whose value is a schema, an object of schemas or a list of schemas.
SCHEMA = ("additionalProperties", "items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
SCHEMA_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
SCHEMA_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_REWRITTEN = frozenset(  # keywords that rewrites may remove
    ("anyOf", "oneOf", "not", "if", "then", "else", "contains", "propertyNames", "patternProperties",
     "dependentSchemas", "dependencies")
)  # fmt: skip


def subschemas(schema: Schema) -> Iterator[Any]:
    for name in SCHEMA:
        if isinstance(schema.get(name), dict):
            yield schema[name]
    for name in SCHEMA_MAP:
        if isinstance(schema.get(name), dict):
            yield from (each for each in schema[name].values() if not isinstance(each, list))
    for name in SCHEMA_LIST:
        if isinstance(schema.get(name), list):
            yield from schema[name]


def keep_targets(root: Schema) -> None:
    """Make what pointers into rewritten keywords refer to definitions, in place."""
    names: dict[str, str] = {}
    for schema in _all(root):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or _REWRITTEN.isdisjoint(reference.split("/")):
            continue
        if isinstance(target := pointed_to(root, reference), dict):
            name = names.setdefault(reference, f"target-{len(names)}")
            root.setdefault("$defs", {})[name] = target
            schema["$ref"] = f"#/$defs/{name}"


def drop_endless(root: Schema) -> None:
    """Replace each `$ref` to a schema without finite instances by `false`, in place. Raises `ValueError` if the root is
    one.

    Computes a least fixed point: a schema counts as infinite until shown to be finite. In doubt, it counts as finite.
    """
    targets: dict[str, Any] = {}
    sources: dict[str, list[Schema]] = {}
    stack: list[Any] = [root]
    while stack:
        schema = stack.pop()
        if isinstance(schema, dict):
            stack += subschemas(schema)
            reference = schema.get("$ref")
            if isinstance(reference, str):
                targets.setdefault(reference, pointed_to(root, reference))
                sources.setdefault(reference, []).append(schema)
    finite = {reference: False for reference, target in targets.items() if isinstance(target, dict)}
    unknown = list(finite)
    for _ in range(MAX_ROUNDS):
        before = len(unknown)
        for reference in unknown:
            finite[reference] = _is_finite(targets[reference], finite)
        unknown = [reference for reference in reversed(unknown) if not finite[reference]]
        if len(unknown) == before:
            break
    else:
        return
    if unknown and not _is_finite(root, finite):
        raise ValueError(f"$ref: {unknown[0]!r} refers to itself without end, nothing can match it")
    for schema in [each for reference in unknown for each in sources[reference]]:
        schema.clear()
        schema["enum"] = []


def _is_finite(schema: Any, finite: dict[str, bool]) -> bool:
    """Return whether a finite instance may match, given the references that are known to be finite."""
    if not isinstance(schema, dict):
        return schema is not False
    if "const" in schema or "enum" in schema:
        return schema.get("enum") != []

    def every(schemas: Any) -> bool:
        return all(_is_finite(each, finite) for each in schemas)

    reference = schema.get("$ref")
    if isinstance(reference, str) and not finite.get(reference, True):
        return False
    if not every(schema.get("allOf") or ()):
        return False
    for name in ("anyOf", "oneOf"):
        if schema.get(name) and not any(_is_finite(each, finite) for each in schema[name]):
            return False
    types = schema.get("type")
    kinds = {types} if isinstance(types, str) else {"null"} if types is None else set(types)
    return bool(kinds - {"object", "array"}) or any(_OF_KIND[kind](schema, every) for kind in kinds)


def _finite_object(schema: Schema, every: Callable[[Any], bool]) -> bool:
    properties = schema.get("properties") or {}
    rest = schema.get("additionalProperties", True) if not schema.get("patternProperties") else True
    return every(properties.get(name, rest) for name in schema.get("required") or ())


def _finite_array(schema: Schema, every: Callable[[Any], bool]) -> bool:
    least, items = schema.get("minItems", 0), schema.get("items", True)
    first = schema.get("prefixItems", [])
    return every(first[:least]) and (least <= len(first) or every([items]))


_OF_KIND = {"object": _finite_object, "array": _finite_array}


def name_recursive(root: Schema) -> None:
    """Make each schema that leads to itself and has keywords beside a `$ref` a definition, with what it refers to
    written out, in place.

    The library combines keywords with what a `$ref` beside them refers to, and cannot do so while it reads that.
    """
    try:
        _name_recursive(root)
    except RecursionError:
        raise ValueError(_TOO_LARGE) from None


def _name_recursive(root: Schema) -> None:
    names: dict[str, str] = {}
    kept, left = _on_the_way(root), [MAX_WRITTEN_OUT]
    for schema in _recursive(root):
        if id(schema) in kept or not _is_joined(schema):
            continue
        given = json.dumps(schema, sort_keys=True)
        if given not in names:
            names[given] = f"joined-{len(names)}"
            root.setdefault("$defs", {})[names[given]] = _written_out(schema, root, frozenset(), left)
        schema.clear()
        schema["$ref"] = f"#/$defs/{names[given]}"


def _written_out(schema: Schema, root: Schema, within: frozenset[str], left: list[int]) -> Schema:
    """Return the schema with what it refers to in place of `$ref`, but for references to what they are within.

    `left` [1]: how many more schemas may be written.
    """
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(_TOO_LARGE)
    found = dict(schema)
    for word in ("allOf", "anyOf", "oneOf"):
        if word in found:
            found[word] = [
                _written_out(each, root, within, left) if isinstance(each, dict) else each for each in found[word]
            ]
    reference = str(found.get("$ref", ""))
    target = pointed_to(root, reference) if reference not in within else None
    if isinstance(target, dict) and target is not root:
        del found["$ref"]
        found["allOf"] = [*found.get("allOf", ()), _written_out(target, root, within | {reference}, left)]
    return found


def _is_joined(schema: Schema) -> bool:
    if "$ref" in schema:
        return len(schema) > 1
    return any("$ref" in each or _is_joined(each) for each in schema.get("allOf", ()) if isinstance(each, dict))


def _on_the_way(root: Schema) -> set[int]:
    """Return the ids of the root and of all that JSON pointers pass through: these are not moved."""
    found = {id(root)}
    for schema in _all(root):
        target: Any = root
        for part in schema["$ref"].split("/")[1:] if isinstance(schema.get("$ref"), str) else ():
            target = pointed_to(target, f"#/{part}")
            found.add(id(target))
    return found


def _all(root: Schema) -> list[Schema]:
    stack, found = [root], {}
    while stack:
        schema = stack.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            stack += subschemas(schema)
            stack.append(pointed_to(root, str(schema.get("$ref", ""))))
    return list(found.values())


def _recursive(root: Schema) -> list[Schema]:
    """Return the schemas that lead to a schema that leads to itself."""
    schemas = {id(each): each for each in _all(root)}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for number, schema in schemas.items():
        own = {word: value for word, value in schema.items() if word not in ("$defs", "definitions")}
        inner = [*subschemas(own), pointed_to(root, str(schema.get("$ref", "")))]
        sorter.add(number, *(id(each) for each in inner if isinstance(each, dict)))
    with contextlib.suppress(CycleError):
        sorter.prepare()
    while ready := sorter.get_ready():
        for number in ready:
            del schemas[number]
        sorter.done(*ready)
    return list(schemas.values())
