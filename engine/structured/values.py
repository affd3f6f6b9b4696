"""Values that schemas name, and texts that are none of them."""

from __future__ import annotations

import re
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_EXCLUDED = 2000  # characters of texts that a pattern leaves out
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")  # in patterns
_IN_CLASS = re.compile(r"[\\^\[\]&~-]")


def values_of(schema: Any) -> list[Any] | None:
    """All that a schema allows, where it names them."""
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
    """Those that are not among `others`."""
    left_out = set(map(_key, others))
    return [value for value in values if _key(value) not in left_out]


def _key(value: Any) -> Any:
    """Equal where JSON has the values equal: 1 is 1.0, and true is neither."""
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
    """A pattern of this text."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def pattern_without(texts: list[str]) -> str | None:
    """A pattern of all texts but these; None where it would be too long."""
    if sum(map(len, texts)) > MAX_EXCLUDED:
        return None
    return f"^{_other_than(sorted(set(texts)))}$"


def _other_than(texts: list[str]) -> str:
    """`texts`: sorted, each once. What begins as they do goes on as none of them does."""
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
    """What a pointer into this document points to; None for other references, and for those that lead nowhere."""
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
