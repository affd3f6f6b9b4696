"""A queue that is fair between tenants."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from typing import Generic, TypeVar

from engine.core.fairness.tenants import group_of

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items in the order: the first one of each group of tenants, then the second one of each, and so on.

    Within a group: the first one of each tenant, then the second one of each.
    """

    def __init__(self) -> None:
        # Group → tenant → items, of groups and tenants that have items; the first is next.
        self._groups: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, in no particular order."""
        for tenants in self._groups.values():
            for queue in tenants.values():
                yield from queue

    def add(self, tenant: str, item: T) -> None:
        self._groups.setdefault(group_of(tenant), OrderedDict()).setdefault(tenant, deque()).append(item)

    def pop(self, skip: Container[str] = ()) -> T:
        """Remove and return the next item of a group that is not in `skip`. Raises `KeyError` if there is none."""
        group = next((group for group in self._groups if group not in skip), None)
        if group is None:
            raise KeyError
        tenants = self._groups.pop(group)
        tenant, queue = tenants.popitem(last=False)
        item = queue.popleft()
        if queue:
            tenants[tenant] = queue
        if tenants:
            self._groups[group] = tenants
        return item
