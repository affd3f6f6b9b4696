"""`uniqueItems`: arrays that have no element twice, which no grammar of a bounded size says.

Beside its grammar, an answer is followed as JSON. An element that an array has already is an error; so that it does not
come to that, tokens that would complete one are taken out of the masks.
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

if TYPE_CHECKING:  # the API process does without
    import numpy as np

MARK = "x-uniqueItems"  # in schemas for the library, which does not read it
MAX_TRIALS = 64  # tokens that are tried one by one, where no more are allowed
MAX_CHOICES = 256  # values of an element that are known in advance
MAX_LOOKED_AT = 4096  # bytes of an element: in a longer one no token is taken out
_SPACES = b" \t\r\n"
_BEFORE_QUOTE = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
_BEFORE_END = re.compile(rb"([-+.0-9eE]*)[,\]}\s]")


class NotUniqueError(ValueError):
    """An array has an element twice."""


class Endings:
    """The tokens of a vocabulary that end a text or a number, by what they write before its end, and those of a value."""

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
    """An array or object that has begun."""

    schemas: list[Any]  # those that may describe it
    is_object: bool
    is_unique: bool = False
    key: str | int = 0  # of the present element
    start: int | None = None  # where this begins in the text; None: between elements
    values: dict[str, Any] = field(default_factory=dict)  # the elements so far, by a text that only equal ones share
    choices: frozenset[str] | None = None  # where an element is one of a few scalars: these, as JSON

    def copy(self) -> _Open:
        return replace(self, values=dict(self.values))


class UniqueItems:
    """Follows one answer. `begins`: the texts after which JSON begins, and its schema; b"": as the answer does."""

    def __init__(self, begins: Sequence[tuple[bytes, Any]]) -> None:
        self._begins = [(begin, schema) for begin, schema in begins if begin]
        at_once = [schema for begin, schema in begins if not begin]
        self._root: Any = at_once[0] if at_once else None
        self._text = bytearray()  # of the JSON; before it begins, of what comes before
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
        """Arrays with an element that may turn out to be one of them again, and what would close what is open in it."""
        for i, each in enumerate(self._open):
            is_short = each.start is None or len(self._text) - each.start <= MAX_LOOKED_AT
            if each.is_unique and each.values and is_short:
                yield each, "".join("}" if inner.is_object else "]" for inner in reversed(self._open[i + 1 :]))

    def advance(self, text: bytes) -> None:
        """`NotUniqueError` when an array has an element twice."""
        for byte in text:
            self._advance(byte)

    def _advance(self, byte: int) -> None:
        if self._state == "scalar" and byte in b",]}" + _SPACES:
            self._end()
        self._text.append(byte)
        if not self._open and self._state == "value" and byte not in b"{[" + _SPACES:
            self._state = "before"  # it is something else
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
        """A value is complete."""
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
        """Take out of a mask [words] int32 tokens that would complete an element again, or leave no other way.

        `NotUniqueError` when no token is left.
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
            mask[:] = before  # there may be more to come before the element ends

    def _may_come(self, token_id: int, matcher: LLMatcher, tokens: Sequence[bytes]) -> bool:
        """Whether the array stays without repetition after the token and what the grammar then forces."""
        after, trial = matcher.deep_copy(), self.copy()
        if not after.consume_token(token_id):
            return False
        try:
            trial.advance(tokens[token_id] + after.compute_ff_bytes())
        except NotUniqueError:
            return False
        return trial._can_differ()

    def _can_differ(self) -> bool:
        """Whether an element that is one of a few may still be one that is not there yet."""
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
    """For an answer that a grammar guides, as `json_grammar` or `compose` wrote it; None: it has no such arrays."""
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
    """`ValueError` when `of_grammar` finds such arrays in it."""
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
    """The same for values that JSON Schema holds for equal: 1 and 1.0, objects whatever their order."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _rest(so_far: Any, value: Any) -> str | None:
    """What the last text of `so_far` lacks to be that of `value`; None where more is different."""
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
    """Its values as JSON, where they are scalars that have but one spelling there, and few."""
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
    """The schemas, and all inside them for the same value, whether or not they hold."""
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
    """The schemas that may be for an element. A pattern is not matched: it may be for any name."""
    if isinstance(key, str):
        properties = schema.get("properties", {})
        yield from [properties[key]] if key in properties else [schema.get("additionalProperties")]
        yield from schema.get("patternProperties", {}).values()
        return
    items = schema.get("items")
    first = schema.get("prefixItems", items if isinstance(items, list) else [])
    if key < len(first):
        yield first[key]
    else:
        yield schema.get("additionalItems") if isinstance(items, list) else items
