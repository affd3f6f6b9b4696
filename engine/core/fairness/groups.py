"""Tenants with unfinished requests, in groups."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from engine.core.request import Request

_TenantKey = tuple[int, int, int, int, str]
GroupKey = tuple[int, bool, int, int, int, str]
K = TypeVar("K", _TenantKey, GroupKey)


@dataclass(slots=True, eq=False)
class Group:
    """An API key or client address that has unfinished requests, of one or more tenants."""

    name: str
    service: int  # weighted tokens computed for it, plus the service of the other groups when it arrived
    favoured_until: int  # the service at which it stops being favoured
    num_favoured_steps: int = 0
    is_favoured: bool = True
    num_requests: int = 0  # unfinished
    num_running: int = 0
    tenants: dict[str, Tenant] = field(default_factory=dict)
    newest_service: int = 0  # of the tenant that was served last
    heads: list[_TenantKey] = field(default_factory=list)  # of tenants with waiting requests, sorted
    key: GroupKey | None = None  # its sort key among the groups with waiting requests

    def new_tenant(self, name: str) -> Tenant:
        """Add a tenant, with the service of the others: a new name gives no credit."""
        known = self.heads[0][1] if self.heads else self.newest_service
        if len(self.tenants) == 1:  # nothing may have been counted meanwhile
            (other,) = self.tenants.values()
            known = other.service
        tenant = self.tenants[name] = Tenant(name, self, known)
        return tenant


@dataclass(slots=True, eq=False)
class Tenant:
    """An API key, a client address, or a user at one, that has unfinished requests."""

    name: str
    group: Group
    service: int  # weighted tokens computed for it, plus the service of the group's others when it arrived
    waiting: OrderedDict[str, Request] = field(default_factory=OrderedDict)  # in queue order
    num_running: int = 0
    key: _TenantKey | None = None  # its sort key among the group's tenants with waiting requests

    @property
    def is_favoured(self) -> bool:
        return self.group.is_favoured

    def add_running(self, change: int) -> None:
        self.num_running += change
        self.group.num_running += change

    def sort_waiting(self) -> None:
        self.waiting = OrderedDict(sorted(self.waiting.items(), key=lambda item: item[1].order))

    def place(self, groups: list[GroupKey]) -> None:
        """Update its position in its group, and the group's among the `groups` with waiting requests."""
        key: _TenantKey | None = None
        if self.waiting:
            priority, arrival = next(iter(self.waiting.values())).order
            key = priority, self.service, self.num_running, arrival, self.name
        self.key = _moved(self.group.heads, self.key, key)
        self.group.key = _moved(groups, self.group.key, _group_key(self.group))


def _group_key(group: Group) -> GroupKey | None:
    if not group.heads:
        return None
    priority, _, _, arrival, _ = group.heads[0]
    return priority, not group.is_favoured, group.service, group.num_running, arrival, group.name


def _moved(keys: list[K], old: K | None, new: K | None) -> K | None:
    """Replace a key of a sorted list by another one. None: it is not in the list. Returns the new one."""
    if new != old:
        if old is not None:
            del keys[bisect_left(keys, old)]
        if new is not None:
            insort(keys, new)
    return new
