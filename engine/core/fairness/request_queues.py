"""The scheduler's queues: running requests, waiting requests, and their order within and between owners."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from engine.core.fairness.arrivals import Visits
from engine.core.request import Request

FAVOURED_STEPS = 32  # an owner is favoured for at most this many of its own steps
FAVOURED_REQUESTS = 8  # an owner with more unfinished requests is not favoured
OUTPUT_WEIGHT = 2  # a generated token counts as this many prompt tokens

_Key = tuple[int, bool, int, int, int, str]


@dataclass(slots=True, eq=False)
class Owner:
    """An API key, user or client address that has unfinished requests."""

    name: str
    service: int  # weighted tokens computed for it, plus the service of the other owners when it arrived
    favoured_until: int  # the service at which it stops being favoured
    num_favoured_steps: int = 0
    is_favoured: bool = True
    waiting: OrderedDict[str, Request] = field(default_factory=OrderedDict)  # in queue order
    num_running: int = 0
    key: _Key | None = None  # its sort key among the owners with waiting requests


class RequestQueues:
    """All unfinished requests: which run, which wait, and in what order.

    `running` holds the requests that have a device row and blocks. All others wait, in one queue per owner.

    **Within an owner**, requests are in queue order: by priority, then by arrival. Of one priority, every running
    request is older than every waiting one.

    **Between owners**, a virtual token counter decides (Sheng et al., 2024, "Fairness in Serving Large Language
    Models"). It counts the service of each owner: the tokens computed for it, with each generated token counted
    `OUTPUT_WEIGHT` times. The next request to run has the lowest priority value of all waiting requests. If several
    owners have such a request, the owner with the least service is next. A new owner starts with the service of the
    others, so an idle owner neither saves up credit nor falls behind.

    **Favoured owners** go first within a priority. A new owner is favoured for its first tokens and steps, unless it
    has many requests. Heavy users therefore hardly delay an occasional short request.

    **`running`** is sorted: requests of favoured owners first, then the oldest request of each other owner, then the
    second oldest of each, and so on. The last request, which is preempted first, is therefore the youngest of the owner
    with the most running requests. The first request stays first until it finishes or a favoured owner arrives. With a
    single owner this is queue order, and no service is counted.
    """

    def __init__(self, favour: int, visits: Visits) -> None:
        """`favour`: weighted tokens for which a new owner is favoured. `visits`: told when owners arrive and leave."""
        self.running: list[Request] = []
        self.num_waiting = 0
        self.is_shared = False  # more than one owner has unfinished requests
        self._favour, self._visits = favour, visits
        self._owners: dict[str, Owner] = {}
        self._heads: list[_Key] = []  # keys of the owners with waiting requests, sorted: the first one runs next
        self._by_id: dict[str, Request] = {}
        self._num_arrivals = self._newest_service = 0
        self._favoured: dict[str, Owner] = {}
        self._num_first = 0  # requests of favoured owners at the start of `running`, as of its last sorting
        self._is_sorted = True  # whether `running` is

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests in the order of their arrival."""
        return iter(self._by_id.values())

    def find(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def owner_of(self, request: Request) -> Owner:
        return self._owners[request.engine_request.owner]

    @property
    def waiting(self) -> list[Request]:
        """All waiting requests, by owner."""
        return [request for owner in self._owners.values() for request in owner.waiting.values()]

    @property
    def has_favoured(self) -> bool:
        """Whether some owners, but not all, are favoured."""
        return 0 < len(self._favoured) < len(self._owners)

    def add(self, request: Request) -> None:
        """Put a new request in its owner's queue."""
        self._num_arrivals += 1
        request.order = (request.engine_request.priority, self._num_arrivals)
        owner = self._owners.get(request.engine_request.owner) or self._new_owner(request)
        self._by_id[request.request_id] = request
        last = next(reversed(owner.waiting.values()), request)
        owner.waiting[request.request_id] = request
        self.num_waiting += 1
        if request.order < last.order:
            _sort(owner)
        if len(owner.waiting) + owner.num_running > FAVOURED_REQUESTS:
            self._stop_favouring(owner)
        self._place(owner)

    def first_waiting(self) -> Request:
        return next(iter(self._owners[self._heads[0][-1]].waiting.values()))

    def should_give_way(self) -> bool:
        """Whether the last running request should be preempted for the first waiting one.

        True if its owner has more than twice as many running requests, and the preempted request would wait behind the
        first waiting one. So no owner loses its only running request, and the preempted request does not come back at
        once.
        """
        if not self.running:
            return False
        last, first = self.running[-1], self.first_waiting()
        having, lacking = self.owner_of(last), self.owner_of(first)
        behind = last.order[0], not having.is_favoured, having.service
        ahead = first.order[0], not lacking.is_favoured, lacking.service
        return having.num_running > 2 * lacking.num_running + 1 and behind >= ahead

    def num_ahead(self, request: Request) -> int:
        """Return how many running requests will be ahead of a waiting one once it runs."""
        if not self.is_shared:
            return len(self.running)
        own = self.owner_of(request)
        most = own.num_running + 1  # requests of another owner are ahead: this one is its owner's youngest
        return sum(
            each.num_running if each.is_favoured > own.is_favoured else min(each.num_running, most)
            for each in self._owners.values()
            if each.is_favoured >= own.is_favoured
        )

    def start(self, request: Request) -> None:
        """Move a waiting request to `running`."""
        owner = self.owner_of(request)
        del owner.waiting[request.request_id]
        self.num_waiting -= 1
        owner.num_running += 1
        self._place(owner)
        if self.is_shared or (self.running and request.order < self.running[-1].order):
            self._is_sorted = False
        self.running.append(request)

    def stop_last(self) -> Request:
        """Move the last running request back to its owner's queue, ahead of younger and lower-priority requests."""
        request = self.running.pop()
        owner = self.owner_of(request)
        first = next(iter(owner.waiting.values()), request)
        owner.waiting[request.request_id] = request
        owner.waiting.move_to_end(request.request_id, last=False)
        self.num_waiting += 1
        owner.num_running -= 1
        self._is_sorted = self._is_sorted and not self.is_shared
        if first.order < request.order:
            _sort(owner)
        self._place(owner)
        return request

    def remove(self, request: Request) -> None:
        """Remove a finished or aborted request."""
        del self._by_id[request.request_id]
        owner = self.owner_of(request)
        if owner.waiting.pop(request.request_id, None) is not None:
            self.num_waiting -= 1
        else:
            self.running.remove(request)
            owner.num_running -= 1
            self._is_sorted = self._is_sorted and not self.is_shared
        self._place(owner)
        if not (owner.waiting or owner.num_running):
            del self._owners[owner.name]
            self._visits.left(owner.name)
            self._favoured.pop(owner.name, None)
            self.is_shared = len(self._owners) > 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the request's first `num_tokens` tokens to its owner, except those that were charged before."""
        start, end, num_prompt = request.num_charged, num_tokens, request.num_prompt_tokens
        if end <= start:
            return
        request.num_charged = end
        owner = self.owner_of(request)
        owner.service += end - start + (OUTPUT_WEIGHT - 1) * (max(end, num_prompt) - max(start, num_prompt))
        self._newest_service = owner.service
        if owner.service >= owner.favoured_until:
            self._stop_favouring(owner)
        self._place(owner)

    def _stop_favouring(self, owner: Owner) -> None:
        if owner.is_favoured:
            owner.is_favoured = self._is_sorted = False
            del self._favoured[owner.name]

    def favoured_step(self) -> None:
        """Record that a step was for favoured owners only."""
        for owner in [owner for owner in self._favoured.values() if owner.num_running]:
            owner.num_favoured_steps += 1
            if owner.num_favoured_steps == FAVOURED_STEPS:
                self._stop_favouring(owner)
                self._place(owner)

    def sort_running(self) -> int:
        """Sort `running`. Returns how many requests of favoured owners are at its start."""
        if not self._is_sorted:
            self._is_sorted = True
            self.running.sort(key=lambda each: each.order)
            self._num_first = 0
            if self.is_shared:
                keys = self._running_keys()
                self.running.sort(key=keys.__getitem__)
                self._num_first = sum(owner.num_running for owner in self._owners.values() if owner.is_favoured)
        return self._num_first if self.is_shared else 0

    def _running_keys(self) -> dict[Request, tuple[bool, int, tuple[int, int]]]:
        """Return the sort key of each running request. `running` is in queue order."""
        ranks: Counter[str] = Counter()
        keys = {}
        for request in self.running:
            owner = self.owner_of(request)
            keys[request] = not owner.is_favoured, ranks[owner.name], request.order
            ranks[owner.name] += 1
        return keys

    def _new_owner(self, request: Request) -> Owner:
        """Create the owner of its first request."""
        name = request.engine_request.owner
        service = self._heads[0][2] if self._heads else self._newest_service
        if len(self._owners) == 1:  # nothing was counted while there was one owner
            (other,) = self._owners.values()
            service = other.service
            if sum(map(_to_do, islice(self, FAVOURED_REQUESTS))) > 2 * _to_do(request):
                self._stop_favouring(other)  # otherwise neither owner pauses for the other
                self._place(other)
            for each in self.running:
                each.num_charged = max(each.num_charged, each.num_computed_tokens)
        owner = self._owners[name] = Owner(name, service, service + self._favour)
        self._favoured[name] = owner
        self._visits.came(name, request.engine_request.arrival)
        self.is_shared = len(self._owners) > 1
        return owner

    def _place(self, owner: Owner) -> None:
        """Update the owner's position among the owners with waiting requests."""
        key: _Key | None = None
        if owner.waiting:
            (priority, arrival) = next(iter(owner.waiting.values())).order
            key = priority, not owner.is_favoured, owner.service, owner.num_running, arrival, owner.name
        if key == owner.key:
            return
        if owner.key is not None:
            del self._heads[bisect_left(self._heads, owner.key)]
        if key is not None:
            insort(self._heads, key)
        owner.key = key

    def check(self) -> None:
        """Assert all invariants."""
        everyone = [*self.running, *self.waiting]
        assert {request.request_id: request for request in everyone} == self._by_id
        assert len(everyone) == len(self._by_id), "a request is both running and waiting"
        assert self.num_waiting == len(self.waiting)
        assert self._heads == sorted(owner.key for owner in self._owners.values() if owner.key is not None)
        for owner in self._owners.values():
            running = [request for request in self.running if self.owner_of(request) is owner]
            waiting = list(owner.waiting.values())
            assert running or waiting, "an owner without requests"
            assert owner.num_running == len(running)
            assert (owner.key is None) == (not waiting)
            assert [r.order for r in waiting] == sorted(r.order for r in waiting), "a queue is out of order"
            for priority in {r.engine_request.priority for r in running + waiting}:
                oldest_waiting = min((r.order for r in waiting if r.engine_request.priority == priority), default=None)
                for r in running:
                    overtakes = oldest_waiting is not None and r.order > oldest_waiting
                    assert r.engine_request.priority != priority or not overtakes, "a request overtook an older one"
        assert self.is_shared == (len(self._owners) > 1)
        assert self._favoured == {owner.name: owner for owner in self._owners.values() if owner.is_favoured}
        if self._is_sorted:
            ranks: Counter[str] = Counter()
            keys = []
            for request in self.running:
                owner = self.owner_of(request)
                keys.append((not owner.is_favoured, ranks[owner.name], request.order))
                ranks[owner.name] += 1
            assert keys == sorted(keys), "the running requests are out of order"


def _to_do(request: Request) -> int:
    """Return an upper bound of the weighted tokens that the request still needs."""
    num_prompt = request.num_prompt_tokens
    prompt = max(num_prompt - request.num_computed_tokens, 0)
    return prompt + OUTPUT_WEIGHT * (request.max_num_tokens - max(request.num_tokens, num_prompt))


def _sort(owner: Owner) -> None:
    owner.waiting = OrderedDict(sorted(owner.waiting.items(), key=lambda item: item[1].order))
