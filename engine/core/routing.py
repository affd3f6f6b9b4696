"""Which replica of an engine takes a request: one that has much of its prefix cached and is not busier than the others."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

CHUNK_TOKENS = 64  # the grain in which prefixes are told apart
ANSWER_TOKENS = 256  # prompt tokens that are as much work as an answer, whose length is not known yet
LOAD_PER_TOKEN = 3  # tokens of load that a request would rather avoid than compute one more token of its prompt
MOST_LOAD = 1.25  # times the mean load: a busier replica gets a request only when all are
SLACK = 3072  # tokens by which a load may exceed that: of few requests the mean says little
# Conversations come back to a replica when their users have thought, and are no load meanwhile. So work that is done counts,
# too: of about so many requests for each replica. New conversations begin where less was done; long ones stay.
RECENT_REQUESTS = 64
RECENT_PER_TOKEN = 10  # tokens of recent work that a request would rather avoid than compute one more of its prompt
MOST_AVOIDED = 1024  # tokens of a prompt that are computed again for that
MOST_WEIGHT = 1e9


class Router:
    """Sends each request where it costs the least: the prompt tokens that the replica must compute, and its load.

    The load of a replica is the work of its unfinished requests, in prompt tokens: what each had to compute, and
    `ANSWER_TOKENS` for its answer. A replica above `MOST_LOAD` times the mean, and `SLACK`, takes no more, whatever it has
    cached: so a prefix common to all requests is soon cached everywhere. Work of late counts, too, for less.

    What a replica has cached is not asked of it: the router remembers what it sent there, and forgets the oldest as the
    replica's cache does. A wrong guess costs time, never a wrong answer.
    """

    def __init__(self, num_replicas: int, capacity_tokens: int) -> None:
        """`capacity_tokens`: that the cache of one replica holds."""
        self._capacity = max(capacity_tokens // CHUNK_TOKENS, 1)
        self._loads = [0] * num_replicas
        # The loads that each was given, older ones for less: those that come count for more, up to `MOST_WEIGHT`.
        self._recent, self._weight = [0.0] * num_replicas, 1.0
        self._assigned: dict[str, tuple[int, int]] = {}  # of unfinished requests, by their ids: replica and load
        # The names of the chunks that each replica has cached, the one to be forgotten next first; and for each name the
        # replicas that have it, as bits.
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[int, int] = {}

    @property
    def loads(self) -> Sequence[int]:
        """Of each replica."""
        return self._loads

    def add_replica(self) -> int:
        """One more, which has nothing cached; its number."""
        self._recent.append(sum(self._recent) / max(len(self._loads), 1))
        self._loads.append(0)
        self._cached.append(OrderedDict())
        return len(self._loads) - 1

    def choose(self, request_id: str, token_ids: Sequence[int], salt: str, eligible: Collection[int]) -> int:
        """The replica, of those `eligible` (at least one), that takes a new request. It is the request's until `end`."""
        names = chunk_names(token_ids, salt)
        chosen = min(eligible, key=self._cost(names, eligible))
        self.assign(request_id, chosen, len(token_ids), names)
        return chosen

    def ranked(self, names: Sequence[int], eligible: Collection[int]) -> list[int]:
        """Those eligible for a prompt whose chunks have these names, the cheapest first."""
        return sorted(eligible, key=self._cost(names, eligible))

    def assign(self, request_id: str, replica: int, num_tokens: int, names: Sequence[int]) -> None:
        """The replica has taken a request with a prompt of so many tokens. It is the request's until `end`."""
        load = num_tokens - CHUNK_TOKENS * self._num_leading(names)[replica] + ANSWER_TOKENS
        self._assigned[request_id] = replica, load
        self._loads[replica] += load
        self._weight *= 1 + 1 / (RECENT_REQUESTS * len(self._loads))
        self._recent[replica] += load * self._weight
        if self._weight > MOST_WEIGHT:
            self._recent, self._weight = [each / self._weight for each in self._recent], 1.0
        self._remember(replica, names)

    def _cost(self, names: Sequence[int], eligible: Collection[int]) -> Callable[[int], tuple[bool, float, int]]:
        loads, num_cached = self._loads, self._num_leading(names)
        most = MOST_LOAD * sum(map(loads.__getitem__, eligible)) / len(eligible) + SLACK
        recent, scale = self._recent, self._weight * RECENT_PER_TOKEN
        mean = sum(map(recent.__getitem__, eligible)) / len(eligible)

        def cost(replica: int) -> tuple[bool, float, int]:
            load = loads[replica]
            avoided = max(-MOST_AVOIDED, min((recent[replica] - mean) / scale, MOST_AVOIDED))
            return load > most, load / LOAD_PER_TOKEN + avoided - CHUNK_TOKENS * num_cached[replica], load

        return cost

    def end(self, request_id: str, num_generated: int = 0) -> None:
        """The request has ended after so many tokens, which the replica has cached, too. Unknown ids are fine."""
        if (assigned := self._assigned.pop(request_id, None)) is not None:
            replica, load = assigned
            self._loads[replica] -= load
            self._remember(replica, [hash((request_id, i)) for i in range(num_generated // CHUNK_TOKENS)])

    def forget(self, replica: int) -> None:
        """It has lost its cache."""
        for name in self._cached[replica]:
            self._drop(replica, name)
        self._cached[replica].clear()

    def _num_leading(self, names: Sequence[int]) -> list[int]:
        """How many of a prompt's first chunks each replica has cached."""
        found, having = [0] * len(self._loads), (1 << len(self._loads)) - 1
        for index, name in enumerate(names):
            still = having & self._holders.get(name, 0)
            for replica in _bits(having ^ still):
                found[replica] = index
            having = still
            if not having:
                break
        for replica in _bits(having):
            found[replica] = len(names)
        return found

    def _remember(self, replica: int, names: Sequence[int]) -> None:
        """The end of a prompt is forgotten before its beginning, as in the cache."""
        cached, holders = self._cached[replica], self._holders
        for name in reversed(names):
            cached[name] = None
            cached.move_to_end(name)
            holders[name] = holders.get(name, 0) | 1 << replica
        while len(cached) > self._capacity:
            self._drop(replica, cached.popitem(last=False)[0])

    def _drop(self, replica: int, name: int) -> None:
        self._holders[name] &= ~(1 << replica)
        if not self._holders[name]:
            del self._holders[name]


def _bits(bits: int) -> Iterator[int]:
    """The positions of those that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def chunk_names(token_ids: Sequence[int], salt: str) -> list[int]:
    """A name for each full chunk of a prompt, which stands for the whole prefix that ends with it.

    The last token is excepted: it is computed always. Names are equal in one process only, and collide with a chance of
    2⁻⁶⁴, which would mislead the router and nothing else.
    """
    data = array("q", token_ids).tobytes()
    size = CHUNK_TOKENS * array("q").itemsize
    names, name = [], hash(salt)
    for start in range(0, (len(token_ids) - 1) // CHUNK_TOKENS * size, size):
        name = hash((name, data[start : start + size]))
        names.append(name)
    return names
