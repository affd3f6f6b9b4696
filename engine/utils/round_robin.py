"""A queue that is fair between tenants."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items in the order: the first one of each tenant, then the second one of each, and so on."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # of tenants that have items; the first is next

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, in no particular order."""
        for queue in self._queues.values():
            yield from queue

    def add(self, tenant: str, item: T) -> None:
        self._queues.setdefault(tenant, deque()).append(item)

    def pop(self) -> T:
        """Remove and return the next item. Raises `KeyError` if there is none."""
        tenant, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item
