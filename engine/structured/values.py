"""Values listed in schemas, and patterns that exclude texts."""

from __future__ import annotations

import re
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_EXCLUDED = 2000  # total characters of texts that a pattern excludes
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")  # special characters in patterns
_IN_CLASS = re.compile(r"[\\^\[\]&~-]")


def values_of(schema: Any) -> list[Any] | None:
    """Return the values that a schema allows, if it lists them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [False, True]
    return None


def without(values: list[Any], others: list[Any]) -> list[Any]:
    """Return the values that are not in `others`."""
    left_out = set(map(_key, others))
    return [value for value in values if _key(value) not in left_out]


def _key(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 equals 1.0, but not true."""
    match value:
        case bool():
            return "boolean", value
        case list():
            return ("array", *map(_key, value))
        case dict():
            return "object", frozenset((name, _key(inner)) for name, inner in value.items())
    return value


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def escaped(text: str) -> str:
    """Return a pattern for this text."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def pattern_without(texts: list[str]) -> str | None:
    """Return a pattern for all texts except these, or None if it would be too long."""
    if sum(map(len, texts)) > MAX_EXCLUDED:
        return None
    return f"^{_other_than(sorted(set(texts)))}$"


def _other_than(texts: list[str]) -> str:
    """Return a pattern for texts that share a prefix with some of `texts` and then differ. `texts`: sorted and
    unique.
    """
    ends = texts[:1] == [""]
    longer: dict[str, list[str]] = {}
    for text in texts[ends:]:
        longer.setdefault(text[0], []).append(text[1:])
    firsts = "".join(_IN_CLASS.sub(r"\\\g<0>", char) for char in longer)
    anything = r"[\s\S]"
    options = [f"[^{firsts}]{anything}*" if firsts else f"{anything}+"]
    options += [escaped(char) + _other_than(rests) for char, rests in longer.items()]
    return f"(?:{'|'.join(options)}){'' if ends else '?'}"


def pointed_to(root: Any, reference: str) -> Any:
    """Return the target of a JSON pointer into this document; None for other or broken references."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target: Any = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target
