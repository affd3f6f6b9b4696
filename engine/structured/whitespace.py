"""White space in generated JSON: what `json.dumps` writes, compact or with an indent.

A model that is unsure likes to write blanks, so they are bounded by what a schema's levels need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.structured.kinds import kinds_of
from engine.structured.values import pointed_to

MAX_LEVELS = 6  # of indentation, where a schema does not bound them
INDENT = 4  # blanks of one level, at most
_MAX_OPEN = 64  # longest chain of references and combinations that is followed
_SAME_LEVEL = ("anyOf", "oneOf", "allOf")


def whitespace_options(schema: Any) -> Any:
    """Return the grammar library's options for the white space in instances of a prepared schema."""
    levels = _Levels(schema).of(schema, MAX_LEVELS)
    return {
        "whitespace_pattern": rf"\n {{0,{INDENT * levels}}}|\n\t{{0,{levels}}}",
        "item_separator": ", ?",
        "key_separator": ": ?",
    }


class _Levels:
    """Counts how deep objects and arrays can be nested."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[tuple[int, int], int] = {}
        self._num_open = 0  # schemas that are being looked at

    def of(self, schema: Any, most: int) -> int:
        """Return the number of levels, or `most` if there may be more."""
        if not most or schema is False:
            return 0
        if not isinstance(schema, Mapping) or self._num_open == _MAX_OPEN:
            return most
        key = (id(schema), most)
        if key not in self._found:
            self._found[key] = most  # for references to itself
            self._num_open += 1
            self._found[key] = self._count(schema, most)
            self._num_open -= 1
        return self._found[key]

    def _count(self, schema: Mapping[str, Any], most: int) -> int:
        kinds = kinds_of(schema, self._root)
        if not kinds & {"object", "array"}:
            return 0
        if "const" in schema or "enum" in schema:
            return most
        same = [each for name in _SAME_LEVEL for each in schema.get(name) or ()]
        if isinstance(reference := schema.get("$ref"), str):
            same.append(pointed_to(self._root, reference))
        counts = [self.of(each, most) for each in same]
        if not same or schema.keys() & {"properties", "items", "prefixItems", "additionalProperties"}:
            counts.append(1 + max((self.of(each, most - 1) for each in _below(schema, kinds)), default=0))
        return min(max(counts), most)


def _below(schema: Mapping[str, Any], kinds: frozenset[str]) -> Iterator[Any]:
    """Return the schemas of the members of objects and arrays; True for any member."""
    if "object" in kinds:
        yield from (schema.get("properties") or {}).values()
        yield from (schema.get("patternProperties") or {}).values()
        yield schema.get("additionalProperties", True)
    if "array" in kinds:
        items = schema.get("items", True)
        yield from items if isinstance(items, list) else [items]
        yield from schema.get("prefixItems") or ()
