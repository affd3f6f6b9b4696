"""A cache of compiled structured outputs: agents send the same tools with each request."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from engine.core.params.structured import StructuredOutputs
from engine.errors import ParameterError, TagsError

MAX_CHARACTERS = 4_000_000  # size of the cache
MIN_CHARACTERS = 400  # size of an entry in addition to its text

_encode = msgspec.msgpack.encode


class TooSlowError(ParameterError):
    """Refused after a time limit, possibly because the machine was busy."""


class GrammarCache:
    """Caches the results and `ValueError`s of a function of structured outputs. Thread-safe."""

    def __init__(self, make: Callable[[StructuredOutputs], StructuredOutputs]) -> None:
        """`make`: the function; its results have `compiled` set. A `TooSlowError` is not cached."""
        self._make, self._lock = make, threading.Lock()
        self._entries: OrderedDict[bytes, StructuredOutputs | ValueError] = OrderedDict()
        self._num_characters = 0

    def __call__(self, asked: StructuredOutputs) -> StructuredOutputs:
        key = _digest(asked)
        with self._lock:
            if (found := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
        if found is None:
            try:
                found = self._make(asked)
            except TooSlowError:
                raise
            except (ParameterError, TagsError) as error:
                found = copy.copy(error)  # without its traceback, which would keep the request alive
            except ValueError as error:
                found = ValueError(str(error))
            self._add(key, found)
        if isinstance(found, ValueError):
            raise copy.copy(found)
        return found

    def _add(self, key: bytes, found: StructuredOutputs | ValueError) -> None:
        if not key:
            return
        with self._lock:
            if key not in self._entries:
                self._entries[key] = found
                self._num_characters += _weight(found)
            while self._num_characters > MAX_CHARACTERS:
                self._num_characters -= _weight(self._entries.popitem(last=False)[1])


def _digest(asked: StructuredOutputs) -> bytes:
    """Return a hash of the request, order included; empty if it has values that JSON does not allow."""
    try:
        return hashlib.blake2b(_encode(asked)).digest()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""


def _weight(found: StructuredOutputs | ValueError) -> int:
    if isinstance(found, StructuredOutputs):
        return MIN_CHARACTERS + len(found.compiled or "") + sum(len(note) for _, note in found.notes)
    texts = found.reasons.values() if isinstance(found, TagsError) else [str(found)]
    return MIN_CHARACTERS + sum(map(len, texts))
