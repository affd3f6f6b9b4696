"""The scheduler's queues: running requests, waiting requests, and their order within and between tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from engine.core.fairness.arrivals import Arrivals
from engine.core.fairness.groups import Group, GroupKey, Tenant
from engine.core.fairness.tenants import group_of
from engine.core.request import Request

FAVOURED_STEPS = 32  # a group is favoured for at most this many of its own steps
FAVOURED_REQUESTS = 8  # a group with more unfinished requests is not favoured
OUTPUT_WEIGHT = 2  # a generated token counts as this many prompt tokens


class RequestQueues:
    """Orders all unfinished requests, running and waiting.

    `running` holds the requests that have a device row and blocks. All others wait, in one queue per tenant.

    **Within a tenant**, requests are in queue order: by priority, then by arrival. Of one priority, every running
    request is older than every waiting one.

    **Between groups** (see `group_of`; mostly a group has one tenant), a virtual token counter decides (Sheng et al.,
    2024, "Fairness in Serving Large Language Models"). It counts the service of each group: the tokens computed for it,
    with each generated token counted `OUTPUT_WEIGHT` times. The next request to run has the lowest priority value of
    all waiting requests. If several groups have such a request, the group with the least service is next. A new group
    starts with the service of the others, so an idle group neither saves up credit nor falls behind. **Between the
    tenants of a group** the same counter decides in the same way.

    **Favoured groups** go first within a priority. A new group is favoured for its first tokens and steps, unless it
    has many requests. Heavy users therefore hardly delay an occasional short request.

    **`running`** is sorted: requests of favoured groups first, then the first request of each other group, then the
    second of each, and so on; those of a group are sorted by its tenants alike, each tenant's by age. The last request,
    which is preempted first, is therefore one of the group with the most running requests. The first request stays
    first until it finishes or a favoured group arrives. With a single tenant this is queue order, and no service is
    counted.
    """

    def __init__(self, favour: int, arrivals: Arrivals) -> None:
        """`favour`: weighted tokens for which a new group is favoured. `arrivals`: records the arrivals of groups."""
        self.running: list[Request] = []
        self.num_waiting = 0
        self.is_shared = False  # more than one tenant has unfinished requests
        self._favour, self._arrivals = favour, arrivals
        self._groups: dict[str, Group] = {}
        self._tenants: dict[str, Tenant] = {}
        self._heads: list[GroupKey] = []  # keys of the groups with waiting requests, sorted: the first one runs next
        self._by_id: dict[str, Request] = {}
        self._num_arrivals = self._newest_service = 0
        self._favoured: dict[str, Group] = {}
        self._num_first = 0  # requests of favoured groups at the start of `running`, as of its last sorting
        self._is_sorted = True  # `running` is in order

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests in the order of their arrival."""
        return iter(self._by_id.values())

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request with this id, or None."""
        return self._by_id.get(request_id)

    def tenant_of(self, request: Request) -> Tenant:
        """Return the tenant of an unfinished request."""
        return self._tenants[request.engine_request.tenant]

    @property
    def waiting(self) -> list[Request]:
        """All waiting requests, by tenant."""
        return [request for tenant in self._tenants.values() for request in tenant.waiting.values()]

    @property
    def has_favoured(self) -> bool:
        """True if some groups, but not all, are favoured."""
        return 0 < len(self._favoured) < len(self._groups)

    def add(self, request: Request) -> None:
        """Put a new request in its tenant's queue."""
        self._num_arrivals += 1
        request.order = (request.engine_request.priority, self._num_arrivals)
        tenant = self._tenants.get(request.engine_request.tenant) or self._new_tenant(request)
        self._by_id[request.request_id] = request
        last = next(reversed(tenant.waiting.values()), request)
        tenant.waiting[request.request_id] = request
        self.num_waiting += 1
        tenant.group.num_requests += 1
        if request.order < last.order:
            tenant.sort_waiting()
        if tenant.group.num_requests > FAVOURED_REQUESTS:
            self._stop_favouring(tenant.group)
        tenant.place(self._heads)

    def first_waiting(self) -> Request:
        """Return the waiting request that runs next. There must be one."""
        group = self._groups[self._heads[0][-1]]
        return next(iter(group.tenants[group.heads[0][-1]].waiting.values()))

    def next_waiting(self, most: int) -> list[Request]:
        """Return up to `most` waiting requests, the first ones of each tenant."""
        most_each = -(-most // max(len(self._tenants), 1))
        first = (request for tenant in self._tenants.values() for request in islice(tenant.waiting.values(), most_each))
        return list(islice(first, most))

    def should_give_way(self) -> bool:
        """Return whether the last running request should be preempted for the first waiting one.

        It should if its group (of the same group: its tenant) has more than twice as many running requests, and the
        preempted request would wait behind the first waiting one. So none loses its only running request, and the
        preempted request is not the next to start.
        """
        if not self.running:
            return False
        last, first = self.running[-1], self.first_waiting()
        tenants = self.tenant_of(last), self.tenant_of(first)
        groups = tenants[0].group, tenants[1].group
        having, lacking = tenants if groups[0] is groups[1] else groups
        behind = last.order[0], not having.is_favoured, having.service
        ahead = first.order[0], not lacking.is_favoured, lacking.service
        return having.num_running > 2 * lacking.num_running + 1 and behind >= ahead

    def num_ahead(self, request: Request) -> int:
        """Return how many running requests will be ahead of a waiting one once it runs."""
        if not self.is_shared:
            return len(self.running)
        tenant = self.tenant_of(request)
        own = tenant.group
        most = tenant.num_running + 1  # requests of another tenant are ahead: this one is its tenant's youngest
        in_group = sum(min(each.num_running, most) for each in own.tenants.values())
        return in_group + sum(
            each.num_running if each.is_favoured > own.is_favoured else min(each.num_running, in_group + 1)
            for each in self._groups.values()
            if each is not own and each.is_favoured >= own.is_favoured
        )

    def start(self, request: Request) -> None:
        """Move a waiting request to `running`."""
        tenant = self.tenant_of(request)
        del tenant.waiting[request.request_id]
        self.num_waiting -= 1
        tenant.add_running(1)
        tenant.place(self._heads)
        if self.is_shared or (self.running and request.order < self.running[-1].order):
            self._is_sorted = False
        self.running.append(request)

    def stop_last(self) -> Request:
        """Move the last running request back to its tenant's queue, ahead of younger and lower-priority requests."""
        request = self.running.pop()
        tenant = self.tenant_of(request)
        first = next(iter(tenant.waiting.values()), request)
        tenant.waiting[request.request_id] = request
        tenant.waiting.move_to_end(request.request_id, last=False)
        self.num_waiting += 1
        tenant.add_running(-1)
        self._is_sorted = self._is_sorted and not self.is_shared
        if first.order < request.order:
            tenant.sort_waiting()
        tenant.place(self._heads)
        return request

    def remove(self, request: Request) -> None:
        """Remove a finished or aborted request."""
        del self._by_id[request.request_id]
        tenant = self.tenant_of(request)
        if tenant.waiting.pop(request.request_id, None) is not None:
            self.num_waiting -= 1
        else:
            self.running.remove(request)
            tenant.add_running(-1)
            self._is_sorted = self._is_sorted and not self.is_shared
        group = tenant.group
        group.num_requests -= 1
        tenant.place(self._heads)
        if not (tenant.waiting or tenant.num_running):
            del self._tenants[tenant.name], group.tenants[tenant.name]
            self.is_shared = len(self._tenants) > 1
        if not group.num_requests:
            del self._groups[group.name]
            self._arrivals.departed(group.name)
            self._favoured.pop(group.name, None)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the request's first `num_tokens` tokens to its tenant, except those that were charged before."""
        start, end, num_prompt = request.num_charged, num_tokens, request.num_prompt_tokens
        if end <= start:
            return
        request.num_charged = end
        tenant = self.tenant_of(request)
        group, served = (
            tenant.group,
            end - start + (OUTPUT_WEIGHT - 1) * (max(end, num_prompt) - max(start, num_prompt)),
        )
        tenant.service += served
        group.service += served
        group.newest_service, self._newest_service = tenant.service, group.service
        if group.service >= group.favoured_until:
            self._stop_favouring(group)
        tenant.place(self._heads)

    def _stop_favouring(self, group: Group) -> None:
        """Place one of its tenants afterwards."""
        if group.is_favoured:
            group.is_favoured = self._is_sorted = False
            del self._favoured[group.name]

    def favoured_step(self) -> None:
        """Record that a step was for favoured groups only."""
        for group in [group for group in self._favoured.values() if group.num_running]:
            group.num_favoured_steps += 1
            if group.num_favoured_steps == FAVOURED_STEPS:
                self._stop_favouring(group)
                next(iter(group.tenants.values())).place(self._heads)

    def sort_running(self) -> int:
        """Sort `running`. Returns how many requests of favoured groups are at its start."""
        if not self._is_sorted:
            self._is_sorted = True
            self.running.sort(key=lambda each: each.order)
            self._num_first = 0
            if self.is_shared:
                keys = self._keys_of(self.running)
                self.running.sort(key=keys.__getitem__)
                self._num_first = sum(group.num_running for group in self._groups.values() if group.is_favoured)
        return self._num_first if self.is_shared else 0

    def _keys_of(self, running: list[Request]) -> dict[Request, tuple[bool, int, tuple[int, int]]]:
        """Return the sort key of each running request, given in queue order."""
        of_tenant, of_group = Counter[str](), Counter[str]()
        ranks = {}
        for request in running:
            tenant = self.tenant_of(request)
            ranks[request] = of_tenant[tenant.name]
            of_tenant[tenant.name] += 1
        keys = {}
        for request in sorted(running, key=ranks.__getitem__):
            group = self.tenant_of(request).group
            keys[request] = not group.is_favoured, of_group[group.name], request.order
            of_group[group.name] += 1
        return keys

    def _new_tenant(self, request: Request) -> Tenant:
        """Create the tenant of its first request."""
        if len(self._tenants) == 1:  # nothing was counted while there was one tenant
            for each in self.running:
                each.num_charged = max(each.num_charged, each.num_computed_tokens)
        name = request.engine_request.tenant
        group = self._groups.get(group_of(name)) or self._new_group(group_of(name), request)
        tenant = self._tenants[name] = group.new_tenant(name)
        self.is_shared = len(self._tenants) > 1
        return tenant

    def _new_group(self, name: str, request: Request) -> Group:
        """Create the group of its first request."""
        service = self._heads[0][2] if self._heads else self._newest_service
        if len(self._groups) == 1:
            (other,) = self._groups.values()
            service = other.service
            if sum(map(_to_do, islice(self, FAVOURED_REQUESTS))) > 2 * _to_do(request):
                self._stop_favouring(other)  # otherwise neither group pauses for the other
                next(iter(other.tenants.values())).place(self._heads)
        group = self._groups[name] = self._favoured[name] = Group(name, service, service + self._favour)
        self._arrivals.arrived(name, request.engine_request.arrival)
        return group

    def check(self) -> None:
        """Assert all invariants."""
        everyone = [*self.running, *self.waiting]
        assert {request.request_id: request for request in everyone} == self._by_id
        assert len(everyone) == len(self._by_id), "a request is both running and waiting"
        assert self.num_waiting == len(self.waiting)
        assert self._heads == sorted(group.key for group in self._groups.values() if group.key is not None)
        for group in self._groups.values():
            tenants = [tenant for tenant in self._tenants.values() if tenant.group is group]
            assert tenants == list(group.tenants.values()), "a tenant of another group"
            assert group.heads == sorted(tenant.key for tenant in tenants if tenant.key is not None)
            assert (group.key is None) == (not group.heads)
            assert group.num_running == sum(tenant.num_running for tenant in tenants)
            assert group.num_requests == group.num_running + sum(len(tenant.waiting) for tenant in tenants) > 0
        for tenant in self._tenants.values():
            running = [request for request in self.running if self.tenant_of(request) is tenant]
            waiting = list(tenant.waiting.values())
            assert running or waiting, "a tenant without requests"
            assert tenant.num_running == len(running)
            assert (tenant.key is None) == (not waiting)
            assert [r.order for r in waiting] == sorted(r.order for r in waiting), "a queue is out of order"
            for priority in {r.engine_request.priority for r in running + waiting}:
                oldest_waiting = min((r.order for r in waiting if r.engine_request.priority == priority), default=None)
                for r in running:
                    overtakes = oldest_waiting is not None and r.order > oldest_waiting
                    assert r.engine_request.priority != priority or not overtakes, "a request overtook an older one"
        assert self.is_shared == (len(self._tenants) > 1)
        assert self._favoured == {group.name: group for group in self._groups.values() if group.is_favoured}
        if self._is_sorted and self.is_shared:
            keys = self._keys_of(sorted(self.running, key=lambda each: each.order))
            assert self.running == sorted(self.running, key=keys.__getitem__), "the running requests are out of order"


def _to_do(request: Request) -> int:
    """Return an upper bound of the weighted tokens that the request still needs."""
    num_prompt = request.num_prompt_tokens
    prompt = max(num_prompt - request.num_computed_tokens, 0)
    return prompt + OUTPUT_WEIGHT * (request.max_num_tokens - max(request.num_tokens, num_prompt))
