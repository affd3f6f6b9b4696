"""An in-memory store of callers' values, bounded in number and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Owned(Generic[T]):
    """One caller's values, least recently used first."""

    values: OrderedDict[str, tuple[T, int]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class OwnedStore(Generic[T]):
    """Values by caller and id. Each caller sees only its own values.

    When the store is full, the caller who holds the most loses its least recently used values.
    """

    def __init__(self, max_values: int, max_bytes: int) -> None:
        self._max_values, self._max_bytes = max_values, max_bytes
        self._owners: dict[str, _Owned[T]] = {}
        self._num_values = 0
        self.num_bytes = 0

    @property
    def owners(self) -> list[str]:
        return list(self._owners)

    def latest(self, owner: str) -> Iterator[T]:
        """Yield an owner's values, the most recently used first."""
        owned = self._owners.get(owner)
        return (value for value, _ in reversed(owned.values.values())) if owned is not None else iter(())

    def put(self, owner: str, key: str, value: T, num_bytes: int) -> None:
        """Store a value, replacing the owner's value of the same key. Evicts values when the store is full."""
        self.remove(owner, key)
        owned = self._owners.setdefault(owner, _Owned())
        owned.values[key] = value, num_bytes
        owned.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._num_values += 1
        while self.num_bytes > self._max_bytes or self._num_values > self._max_values:
            name, most = max(self._owners.items(), key=lambda item: self._fraction(item[1]))
            self.remove(name, next(iter(most.values)))

    def get(self, owner: str, key: str) -> T | None:
        owned = self._owners.get(owner)
        if owned is None or key not in owned.values:
            return None
        owned.values.move_to_end(key)
        return owned.values[key][0]

    def remove(self, owner: str, key: str) -> bool:
        """Remove a value; return whether it existed."""
        owned = self._owners.get(owner)
        if owned is None or key not in owned.values:
            return False
        _, num_bytes = owned.values.pop(key)
        owned.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        self._num_values -= 1
        if not owned.values:
            del self._owners[owner]
        return True

    def _fraction(self, owned: _Owned[T]) -> float:
        """Return the fraction of the store's limits that an owner uses."""
        return max(len(owned.values) / max(self._max_values, 1), owned.num_bytes / self._max_bytes)
