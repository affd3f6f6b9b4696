"""Enforces `uniqueItems`, which no grammar of bounded size can express.

In addition to its grammar, an answer is parsed as JSON while it is generated. A duplicate element is an error. To
prevent it, tokens that would complete a duplicate are removed from the masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from engine.structured.values import listed, pointed_to, values_of

if TYPE_CHECKING:  # not imported in the API process
    import numpy as np

MARK = "x-uniqueItems"  # keyword in prepared schemas, ignored by the library
MAX_TRIALS = 64  # if at most this many tokens are allowed, each is tried
MAX_CHOICES = 256  # largest number of possible element values known in advance
MAX_LOOKED_AT = 4096  # bytes of an element; in longer elements no token is removed
_SPACES = b" \t\r\n"
_BEFORE_QUOTE = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
_BEFORE_END = re.compile(rb"([-+.0-9eE]*)[,\]}\s]")


class NotUniqueError(ValueError):
    """An array has a duplicate element."""


class Endings:
    """A vocabulary's tokens that end a string or a number, by the text before that end, and those that end other
    values.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        texts: dict[str, list[int]] = {}
        numbers: dict[str, list[int]] = {}
        values: dict[str, list[int]] = {}
        for i, token in enumerate(tokens):
            if (match := _BEFORE_QUOTE.match(token)) and (text := _parsed(f'"{_decoded(match[1])}"')) is not None:
                texts.setdefault(text, []).append(i)
            if match := _BEFORE_END.match(token):
                numbers.setdefault(match[1].decode(), []).append(i)
            value = token.strip(_SPACES + b",")
            if value[:1] in (b'"', b"[", b"{") and (parsed := _parsed(_decoded(value))) is not None:
                values.setdefault(_name(parsed), []).append(i)
        self.tokens = tokens
        import numpy as np

        self.values = {name: np.array(ids) for name, ids in values.items()}
        self.texts = {text: np.array(ids) for text, ids in texts.items()}
        self.numbers = {text: np.array(ids) for text, ids in numbers.items()}


@dataclass(slots=True)
class _Open:
    """An open array or object."""

    schemas: list[Any]  # schemas that may apply to it
    is_object: bool
    is_unique: bool = False
    key: str | int = 0  # of the current element
    start: int | None = None  # start of the current element in the text; None: between elements
    values: dict[str, Any] = field(default_factory=dict)  # the elements so far, by a canonical text
    choices: frozenset[str] | None = None  # the possible elements as JSON, if they are a few scalars

    def copy(self) -> _Open:
        return replace(self, values=dict(self.values))


class UniqueItems:
    """Follows one answer. `begins`: texts after which JSON begins, with its schema; b"": at the start of the answer."""

    def __init__(self, begins: Sequence[tuple[bytes, Any]]) -> None:
        self._begins = [(begin, schema) for begin, schema in begins if begin]
        at_once = [schema for begin, schema in begins if not begin]
        self._root: Any = at_once[0] if at_once else None
        self._text = bytearray()  # of the JSON; before it begins, the text before it
        self._open: list[_Open] = []
        self._state = "value" if at_once else "before"  # or key, text, scalar, between
        self._is_key = self._is_escaped = False

    def copy(self) -> UniqueItems:
        other = object.__new__(UniqueItems)
        other.__dict__.update(self.__dict__)
        other._text, other._open = bytearray(self._text), [each.copy() for each in self._open]
        return other

    @property
    def _pending(self) -> Iterator[tuple[_Open, str]]:
        """Return the arrays whose current element may become a duplicate, and the text that would complete it."""
        for i, each in enumerate(self._open):
            is_short = each.start is None or len(self._text) - each.start <= MAX_LOOKED_AT
            if each.is_unique and each.values and is_short:
                yield each, "".join("}" if inner.is_object else "]" for inner in reversed(self._open[i + 1 :]))

    def advance(self, text: bytes) -> None:
        """Parse more of the answer. Raises `NotUniqueError` for a duplicate element."""
        for byte in text:
            self._advance(byte)

    def _advance(self, byte: int) -> None:
        if self._state == "scalar" and byte in b",]}" + _SPACES:
            self._end()
        self._text.append(byte)
        if not self._open and self._state == "value" and byte not in b"{[" + _SPACES:
            self._state = "before"  # not JSON after all
        if self._state == "before":
            self._look_for_begin()
        elif self._state == "text":
            if self._is_escaped or byte == 0x5C:
                self._is_escaped = not self._is_escaped
            elif byte == 0x22:
                self._end_text()
        elif byte in b"{[":
            self._start(byte == 0x7B)
        elif byte in b"}]":
            self._open.pop()
            self._end()
        elif byte == 0x2C:
            top = self._open[-1]
            top.key = top.key if isinstance(top.key, str) else top.key + 1
            self._state = "key" if top.is_object else "value"
        elif byte == 0x22:
            self._is_key = self._state == "key"
            self._start_element()
            self._state = "text"
        elif byte not in _SPACES and byte != 0x3A and self._state == "value":
            self._start_element()
            self._state = "scalar"

    def _look_for_begin(self) -> None:
        for begin, schema in self._begins:
            if self._text.endswith(begin):
                self._root, self._state = schema, "value"
                self._text.clear()
                return

    def _start_element(self) -> None:
        if (top := self._open[-1]).start is None or top.is_object:
            top.start = len(self._text) - 1

    def _start(self, is_object: bool) -> None:
        if self._open:
            self._start_element()
            schemas = [each for schema in self._open[-1].schemas for each in _children(schema, self._open[-1].key)]
        else:
            schemas = [self._root]
        views = _views(schemas, partial(pointed_to, self._root))
        is_unique = not is_object and any(view.get(MARK) is True for view in views)
        top = _Open(views, is_object, is_unique)
        if is_unique:
            items = [each for view in views if view.get(MARK) is True for each in _children(view, 0)]
            found = [_choices(each) for each in items]
            top.choices = None if None in found else frozenset().union(*(each or () for each in found))
        self._open.append(top)
        self._state = "key" if is_object else "value"

    def _end_text(self) -> None:
        if self._is_key:
            top = self._open[-1]
            top.key = json.loads(bytes(self._text[top.start :]))
            self._state = "value"
        else:
            self._end()

    def _end(self) -> None:
        """Record a complete value."""
        self._state = "between"
        if not self._open:
            self._state = "before"
            self._text.clear()
            return
        top = self._open[-1]
        if top.is_unique and top.start is not None:
            value = json.loads(bytes(self._text[top.start :]))
            if (name := _name(value)) in top.values:
                raise NotUniqueError(f"uniqueItems: {name[:80]} would come twice")
            top.values[name] = value
        if not top.is_object:
            top.start = None

    def narrow(self, mask: np.ndarray, matcher: LLMatcher, endings: Endings) -> None:
        """Remove from a mask [words] int32 the tokens that would complete a duplicate, or leave no alternative to one.

        Raises `NotUniqueError` if no token is left.
        """
        if self._state == "before" or not any(True for _ in self._pending):
            return
        import numpy as np

        bits = mask.view(np.uint8)
        if np.unpackbits(bits).sum() <= MAX_TRIALS:
            for i in np.flatnonzero(np.unpackbits(bits, bitorder="little")):
                if not self._may_come(int(i), matcher, endings.tokens):
                    _remove(mask, i)
            if not mask.any():
                raise NotUniqueError("uniqueItems: there is no other element that may come")
            return
        before = mask.copy()
        for array, closing in self._pending:
            for ids in self._repeating(array, closing, endings):
                _remove(mask, ids)
        if not mask.any():
            mask[:] = before  # the element may still become longer

    def _may_come(self, token_id: int, matcher: LLMatcher, tokens: Sequence[bytes]) -> bool:
        """Return whether the array stays free of duplicates after the token and the tokens that the grammar then
        forces.
        """
        after, trial = matcher.deep_copy(), self.copy()
        if not after.consume_token(token_id):
            return False
        try:
            trial.advance(tokens[token_id] + after.compute_ff_bytes())
        except NotUniqueError:
            return False
        return trial._can_differ()

    def _can_differ(self) -> bool:
        """Return whether an element with few possible values may still become a new one."""
        top = self._open[-1] if self._open else None
        if top is None or top.choices is None or top.start is None or self._state not in ("text", "scalar"):
            return True
        begun = self._text[top.start :].decode(errors="ignore")
        return any(choice.startswith(begun) for choice in top.choices - top.values.keys())

    def _repeating(self, array: _Open, closing: str, endings: Endings) -> Iterator[np.ndarray]:
        if array.start is None:
            yield from (ids for name in array.values if (ids := endings.values.get(name)) is not None)
            return
        written = _decoded(bytes(self._text[array.start :]))
        if self._state == "text" and not self._is_key and not self._is_escaped:
            if (so_far := _parsed(f'{written}"{closing}')) is None:
                return
            for value in array.values.values():
                rest = _rest(so_far, value)
                if rest is not None and (ids := endings.texts.get(rest)) is not None:
                    yield ids
        elif self._state == "scalar":
            for digits, ids in endings.numbers.items():
                if (whole := _parsed(f"{written}{digits}{closing}")) is not None and _name(whole) in array.values:
                    yield ids


def of_grammar(grammar: str) -> UniqueItems | None:
    """Return the `UniqueItems` for a grammar written by `json_grammar` or `compose`; None if it has no such arrays."""
    if f'"{MARK}"' not in grammar:
        return None
    parsed = json.loads(grammar)
    begins = [
        (begin.encode(), schema)
        for each in parsed["grammars"]
        if isinstance(schema := each.get("json_schema"), dict) and has_mark(schema)
        for begin in parsed.get("begins", {}).get(each.get("name"), [""])
    ]
    return UniqueItems(begins) if begins else None


def refuse_unique_items(grammar: str) -> None:
    """Raise `ValueError` if the grammar has arrays with `uniqueItems`."""
    if of_grammar(grammar) is not None:
        raise ValueError(
            "uniqueItems is not supported in the arguments of tools that this model may call in several ways"
        )


def has_mark(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and value.get(MARK) is True) or any(map(has_mark, inner))


def _remove(mask: np.ndarray, ids: Any) -> None:
    import numpy as np

    ids = np.atleast_1d(ids)
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _name(value: Any) -> str:
    """Return a text that is the same for values equal in JSON Schema: 1 and 1.0, objects in any order."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _rest(so_far: Any, value: Any) -> str | None:
    """Return what `so_far` lacks to complete `value`, or None if they differ elsewhere."""
    if isinstance(so_far, str):
        return value[len(so_far) :] if isinstance(value, str) and value.startswith(so_far) else None
    if isinstance(so_far, dict) and isinstance(value, dict) and so_far.keys() == value.keys():
        key: Any = list(so_far)[-1]
        others = [name for name in so_far if name != key]
    elif isinstance(so_far, list) and isinstance(value, list) and len(so_far) == len(value):
        key = len(so_far) - 1
        others = list(range(key))
    else:
        return None
    if any(_name(so_far[each]) != _name(value[each]) for each in others):
        return None
    return _rest(so_far[key], value[key])


def _choices(schema: Any) -> frozenset[str] | None:
    """Return a schema's values as JSON, if they are a few scalars with a unique spelling."""
    values = values_of(schema)
    if values is None and isinstance(schema, dict):
        least, most = schema.get("minimum"), schema.get("maximum")
        if schema.get("type") == "integer" and isinstance(least, int) and isinstance(most, int):
            values = list(range(least, min(most + 1, least + MAX_CHOICES + 1)))
        elif "null" in (kinds := listed(schema.get("type"))) and {*kinds} <= {"null", "boolean"}:
            values = [None, False, True][: 2 * len(kinds) - 1]
    if values is None or len(values) > MAX_CHOICES or not all(isinstance(each, str | int | None) for each in values):
        return None
    return frozenset(map(_name, values))


def _views(schemas: Sequence[Any], resolve: Callable[[str], Any]) -> list[Any]:
    """Return the schemas and all their subschemas for the same value, whether or not they apply."""
    found: dict[int, Any] = {}
    stack = list(schemas)
    while stack:
        schema = stack.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found[id(schema)] = schema
        for name in ("allOf", "anyOf", "oneOf"):
            stack += schema.get(name, ())
        if "$ref" in schema:
            stack.append(resolve(schema["$ref"]))
    return list(found.values())


def _children(schema: Any, key: str | int) -> Iterator[Any]:
    """Return the schemas that may apply to an element. Patterns are not matched: they may apply to any name."""
    if isinstance(key, str):
        properties = schema.get("properties", {})
        yield from [properties[key]] if key in properties else [schema.get("additionalProperties")]
        yield from schema.get("patternProperties", {}).values()
        return
    first = schema.get("prefixItems", [])
    yield first[key] if key < len(first) else schema.get("items")
