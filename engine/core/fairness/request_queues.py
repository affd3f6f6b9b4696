"""The scheduler's queues: running requests, waiting requests, and their order within and between tenants."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from engine.core.fairness.arrivals import Arrivals
from engine.core.request import Request

FAVOURED_STEPS = 32  # a tenant is favoured for at most this many of its own steps
FAVOURED_REQUESTS = 8  # a tenant with more unfinished requests is not favoured
OUTPUT_WEIGHT = 2  # a generated token counts as this many prompt tokens

_Key = tuple[int, bool, int, int, int, str]


@dataclass(slots=True, eq=False)
class Tenant:
    """An API key, user or client address that has unfinished requests."""

    name: str
    service: int  # weighted tokens computed for it, plus the service of the other tenants when it arrived
    favoured_until: int  # the service at which it stops being favoured
    num_favoured_steps: int = 0
    is_favoured: bool = True
    waiting: OrderedDict[str, Request] = field(default_factory=OrderedDict)  # in queue order
    num_running: int = 0
    key: _Key | None = None  # its sort key among the tenants with waiting requests


class RequestQueues:
    """Orders all unfinished requests, running and waiting.

    `running` holds the requests that have a device row and blocks. All others wait, in one queue per tenant.

    **Within a tenant**, requests are in queue order: by priority, then by arrival. Of one priority, every running
    request is older than every waiting one.

    **Between tenants**, a virtual token counter decides (Sheng et al., 2024, "Fairness in Serving Large Language
    Models"). It counts the service of each tenant: the tokens computed for it, with each generated token counted
    `OUTPUT_WEIGHT` times. The next request to run has the lowest priority value of all waiting requests. If several
    tenants have such a request, the tenant with the least service is next. A new tenant starts with the service of the
    others, so an idle tenant neither saves up credit nor falls behind.

    **Favoured tenants** go first within a priority. A new tenant is favoured for its first tokens and steps, unless it
    has many requests. Heavy users therefore hardly delay an occasional short request.

    **`running`** is sorted: requests of favoured tenants first, then the oldest request of each other tenant, then the
    second oldest of each, and so on. The last request, which is preempted first, is therefore the youngest of the
    tenant with the most running requests. The first request stays first until it finishes or a favoured tenant arrives.
    With a single tenant this is queue order, and no service is counted.
    """

    def __init__(self, favour: int, arrivals: Arrivals) -> None:
        """`favour`: weighted tokens for which a new tenant is favoured. `arrivals`: records the arrivals of tenants."""
        self.running: list[Request] = []
        self.num_waiting = 0
        self.is_shared = False  # more than one tenant has unfinished requests
        self._favour, self._arrivals = favour, arrivals
        self._tenants: dict[str, Tenant] = {}
        self._heads: list[_Key] = []  # keys of the tenants with waiting requests, sorted: the first one runs next
        self._by_id: dict[str, Request] = {}
        self._num_arrivals = self._newest_service = 0
        self._favoured: dict[str, Tenant] = {}
        self._num_first = 0  # requests of favoured tenants at the start of `running`, as of its last sorting
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
        """True if some tenants, but not all, are favoured."""
        return 0 < len(self._favoured) < len(self._tenants)

    def add(self, request: Request) -> None:
        """Put a new request in its tenant's queue."""
        self._num_arrivals += 1
        request.order = (request.engine_request.priority, self._num_arrivals)
        tenant = self._tenants.get(request.engine_request.tenant) or self._new_tenant(request)
        self._by_id[request.request_id] = request
        last = next(reversed(tenant.waiting.values()), request)
        tenant.waiting[request.request_id] = request
        self.num_waiting += 1
        if request.order < last.order:
            _sort(tenant)
        if len(tenant.waiting) + tenant.num_running > FAVOURED_REQUESTS:
            self._stop_favouring(tenant)
        self._place(tenant)

    def first_waiting(self) -> Request:
        """Return the waiting request that runs next. There must be one."""
        return next(iter(self._tenants[self._heads[0][-1]].waiting.values()))

    def should_give_way(self) -> bool:
        """Return whether the last running request should be preempted for the first waiting one.

        It should if its tenant has more than twice as many running requests, and the preempted request would wait
        behind the first waiting one. So no tenant loses its only running request, and the preempted request is not the
        next to start.
        """
        if not self.running:
            return False
        last, first = self.running[-1], self.first_waiting()
        having, lacking = self.tenant_of(last), self.tenant_of(first)
        behind = last.order[0], not having.is_favoured, having.service
        ahead = first.order[0], not lacking.is_favoured, lacking.service
        return having.num_running > 2 * lacking.num_running + 1 and behind >= ahead

    def num_ahead(self, request: Request) -> int:
        """Return how many running requests will be ahead of a waiting one once it runs."""
        if not self.is_shared:
            return len(self.running)
        own = self.tenant_of(request)
        most = own.num_running + 1  # requests of another tenant are ahead: this one is its tenant's youngest
        return sum(
            each.num_running if each.is_favoured > own.is_favoured else min(each.num_running, most)
            for each in self._tenants.values()
            if each.is_favoured >= own.is_favoured
        )

    def start(self, request: Request) -> None:
        """Move a waiting request to `running`."""
        tenant = self.tenant_of(request)
        del tenant.waiting[request.request_id]
        self.num_waiting -= 1
        tenant.num_running += 1
        self._place(tenant)
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
        tenant.num_running -= 1
        self._is_sorted = self._is_sorted and not self.is_shared
        if first.order < request.order:
            _sort(tenant)
        self._place(tenant)
        return request

    def remove(self, request: Request) -> None:
        """Remove a finished or aborted request."""
        del self._by_id[request.request_id]
        tenant = self.tenant_of(request)
        if tenant.waiting.pop(request.request_id, None) is not None:
            self.num_waiting -= 1
        else:
            self.running.remove(request)
            tenant.num_running -= 1
            self._is_sorted = self._is_sorted and not self.is_shared
        self._place(tenant)
        if not (tenant.waiting or tenant.num_running):
            del self._tenants[tenant.name]
            self._arrivals.departed(tenant.name)
            self._favoured.pop(tenant.name, None)
            self.is_shared = len(self._tenants) > 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the request's first `num_tokens` tokens to its tenant, except those that were charged before."""
        start, end, num_prompt = request.num_charged, num_tokens, request.num_prompt_tokens
        if end <= start:
            return
        request.num_charged = end
        tenant = self.tenant_of(request)
        tenant.service += end - start + (OUTPUT_WEIGHT - 1) * (max(end, num_prompt) - max(start, num_prompt))
        self._newest_service = tenant.service
        if tenant.service >= tenant.favoured_until:
            self._stop_favouring(tenant)
        self._place(tenant)

    def _stop_favouring(self, tenant: Tenant) -> None:
        if tenant.is_favoured:
            tenant.is_favoured = self._is_sorted = False
            del self._favoured[tenant.name]

    def favoured_step(self) -> None:
        """Record that a step was for favoured tenants only."""
        for tenant in [tenant for tenant in self._favoured.values() if tenant.num_running]:
            tenant.num_favoured_steps += 1
            if tenant.num_favoured_steps == FAVOURED_STEPS:
                self._stop_favouring(tenant)
                self._place(tenant)

    def sort_running(self) -> int:
        """Sort `running`. Returns how many requests of favoured tenants are at its start."""
        if not self._is_sorted:
            self._is_sorted = True
            self.running.sort(key=lambda each: each.order)
            self._num_first = 0
            if self.is_shared:
                keys = self._running_keys()
                self.running.sort(key=keys.__getitem__)
                self._num_first = sum(tenant.num_running for tenant in self._tenants.values() if tenant.is_favoured)
        return self._num_first if self.is_shared else 0

    def _running_keys(self) -> dict[Request, tuple[bool, int, tuple[int, int]]]:
        """Return the sort key of each running request. `running` is in queue order."""
        ranks: Counter[str] = Counter()
        keys = {}
        for request in self.running:
            tenant = self.tenant_of(request)
            keys[request] = not tenant.is_favoured, ranks[tenant.name], request.order
            ranks[tenant.name] += 1
        return keys

    def _new_tenant(self, request: Request) -> Tenant:
        """Create the tenant of its first request."""
        name = request.engine_request.tenant
        service = self._heads[0][2] if self._heads else self._newest_service
        if len(self._tenants) == 1:  # nothing was counted while there was one tenant
            (other,) = self._tenants.values()
            service = other.service
            if sum(map(_to_do, islice(self, FAVOURED_REQUESTS))) > 2 * _to_do(request):
                self._stop_favouring(other)  # otherwise neither tenant pauses for the other
                self._place(other)
            for each in self.running:
                each.num_charged = max(each.num_charged, each.num_computed_tokens)
        tenant = self._tenants[name] = Tenant(name, service, service + self._favour)
        self._favoured[name] = tenant
        self._arrivals.arrived(name, request.engine_request.arrival)
        self.is_shared = len(self._tenants) > 1
        return tenant

    def _place(self, tenant: Tenant) -> None:
        """Update the tenant's position among the tenants with waiting requests."""
        key: _Key | None = None
        if tenant.waiting:
            (priority, arrival) = next(iter(tenant.waiting.values())).order
            key = priority, not tenant.is_favoured, tenant.service, tenant.num_running, arrival, tenant.name
        if key == tenant.key:
            return
        if tenant.key is not None:
            del self._heads[bisect_left(self._heads, tenant.key)]
        if key is not None:
            insort(self._heads, key)
        tenant.key = key

    def check(self) -> None:
        """Assert all invariants."""
        everyone = [*self.running, *self.waiting]
        assert {request.request_id: request for request in everyone} == self._by_id
        assert len(everyone) == len(self._by_id), "a request is both running and waiting"
        assert self.num_waiting == len(self.waiting)
        assert self._heads == sorted(tenant.key for tenant in self._tenants.values() if tenant.key is not None)
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
        assert self._favoured == {tenant.name: tenant for tenant in self._tenants.values() if tenant.is_favoured}
        if self._is_sorted:
            ranks: Counter[str] = Counter()
            keys = []
            for request in self.running:
                tenant = self.tenant_of(request)
                keys.append((not tenant.is_favoured, ranks[tenant.name], request.order))
                ranks[tenant.name] += 1
            assert keys == sorted(keys), "the running requests are out of order"


def _to_do(request: Request) -> int:
    """Return an upper bound of the weighted tokens that the request still needs."""
    num_prompt = request.num_prompt_tokens
    prompt = max(num_prompt - request.num_computed_tokens, 0)
    return prompt + OUTPUT_WEIGHT * (request.max_num_tokens - max(request.num_tokens, num_prompt))


def _sort(tenant: Tenant) -> None:
    tenant.waiting = OrderedDict(sorted(tenant.waiting.items(), key=lambda item: item[1].order))
