"""Chooses the replica for each request: one with much of its prefix cached that is not busier than the others."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

CHUNK_TOKENS = 64  # granularity of prefix matching
ANSWER_TOKENS = 256  # assumed work of a completion of unknown length, in prompt tokens
LOAD_PER_TOKEN = 3  # tokens of load that cost as much as computing one more prompt token
MOST_LOAD = 1.25  # times the mean load: a busier replica gets a request only if all are busier
SLACK = 3072  # tokens by which a load may exceed that, because the mean of few requests says little
# A conversation returns to its replica when its user has thought, and is no load meanwhile. So finished work counts,
# too: that of about so many requests per replica. New conversations go where less work was done; long conversations
# stay.
RECENT_REQUESTS = 64
RECENT_PER_TOKEN = 10  # tokens of recent work that cost as much as computing one more prompt token
MOST_AVOIDED = 1024  # most prompt tokens that are computed again to avoid recent work
MOST_WEIGHT = 1e9
ADAPTER_TOKENS = 2048  # prompt tokens that take as long as bringing a LoRA adapter into a slot


class Router:
    """Sends each request to the replica of least cost: the prompt tokens that it must compute, and its load.

    The load of a replica is the work of its unfinished requests, in prompt tokens: the uncached prompt tokens of each,
    and `ANSWER_TOKENS` for its completion. A replica above `MOST_LOAD` times the mean plus `SLACK` gets no more
    requests, whatever it has cached, so a prefix common to all requests is soon cached everywhere. Recent work counts
    too, with a lower weight.

    The router does not ask replicas for their cached prefixes. It remembers the prompts that it sent to each replica,
    and forgets the oldest ones as the replica's cache does. A wrong guess costs time, never a wrong answer.
    """

    def __init__(self, num_replicas: int, capacity_tokens: int, max_adapters: int = 0) -> None:
        """`capacity_tokens`: tokens that the KV cache of one replica holds. `max_adapters`: its LoRA adapters."""
        self._capacity = max(capacity_tokens // CHUNK_TOKENS, 1)
        self._loads = [0] * num_replicas
        # Recently assigned load of each replica. The weight of new load grows, up to `MOST_WEIGHT`, so older load
        # counts less.
        self._recent, self._weight = [0.0] * num_replicas, 1.0
        self._assigned: dict[str, tuple[int, int]] = {}  # replica and load of each unfinished request, by id
        # The names of the chunks that each replica has cached, the next to be forgotten first. For each name, the
        # replicas that have it, as a bit set.
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[int, int] = {}
        self._max_adapters = max_adapters
        # The versions of the adapters that each replica was sent requests for, the next to leave its slot first.
        self._adapters: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_replicas)]

    @property
    def loads(self) -> Sequence[int]:
        """The load of each replica."""
        return self._loads

    def add_replica(self) -> int:
        """Add a replica with an empty cache, and return its number."""
        self._recent.append(sum(self._recent) / max(len(self._loads), 1))
        self._loads.append(0)
        self._cached.append(OrderedDict())
        self._adapters.append(OrderedDict())
        return len(self._loads) - 1

    def choose(
        self, request_id: str, name_ids: Sequence[int], salt: str, eligible: Collection[int], adapter: str = ""
    ) -> int:
        """Choose one of the `eligible` replicas (at least one) and assign a new request to it until `end`. `name_ids`:
        of its prompt, see `EngineRequest`. `adapter`: the version of its LoRA adapter, if it has one.
        """
        names = chunk_names(name_ids, salt)
        chosen = min(eligible, key=self._cost(names, eligible, adapter))
        self.assign(request_id, chosen, len(name_ids), names)
        if adapter:
            self._adapters[chosen][adapter] = None
            self._adapters[chosen].move_to_end(adapter)
            while len(self._adapters[chosen]) > self._max_adapters:
                self._adapters[chosen].popitem(last=False)
        return chosen

    def ranked(self, names: Sequence[int], eligible: Collection[int]) -> list[int]:
        """Return the eligible replicas for a prompt with these chunk names, the cheapest first."""
        return sorted(eligible, key=self._cost(names, eligible))

    def assign(self, request_id: str, replica: int, num_tokens: int, names: Sequence[int]) -> None:
        """Assign a request with a prompt of `num_tokens` tokens to a replica until `end`."""
        load = num_tokens - CHUNK_TOKENS * self._num_leading(names)[replica] + ANSWER_TOKENS
        self._assigned[request_id] = replica, load
        self._loads[replica] += load
        self._weight *= 1 + 1 / (RECENT_REQUESTS * len(self._loads))
        self._recent[replica] += load * self._weight
        if self._weight > MOST_WEIGHT:
            self._recent, self._weight = [each / self._weight for each in self._recent], 1.0
        self._remember(replica, names)

    def _cost(
        self, names: Sequence[int], eligible: Collection[int], adapter: str = ""
    ) -> Callable[[int], tuple[bool, float, int]]:
        loads, num_cached = self._loads, self._num_leading(names)
        most = MOST_LOAD * sum(map(loads.__getitem__, eligible)) / len(eligible) + SLACK
        recent, scale = self._recent, self._weight * RECENT_PER_TOKEN
        mean = sum(map(recent.__getitem__, eligible)) / len(eligible)

        def cost(replica: int) -> tuple[bool, float, int]:
            load = loads[replica]
            avoided = max(-MOST_AVOIDED, min((recent[replica] - mean) / scale, MOST_AVOIDED))
            saved = CHUNK_TOKENS * num_cached[replica] + ADAPTER_TOKENS * (adapter in self._adapters[replica])
            return load > most, load / LOAD_PER_TOKEN + avoided - saved, load

        return cost

    def end(self, request_id: str, num_generated: int = 0) -> None:
        """Remove a finished request. The replica has cached its generated tokens too. Unknown ids are ignored."""
        if (assigned := self._assigned.pop(request_id, None)) is not None:
            replica, load = assigned
            self._loads[replica] -= load
            self._remember(replica, [hash((request_id, i)) for i in range(num_generated // CHUNK_TOKENS)])

    def forget(self, replica: int) -> None:
        """Forget the cached chunks and the adapters of a replica that has lost them."""
        for name in self._cached[replica]:
            self._drop(replica, name)
        self._cached[replica].clear()
        self._adapters[replica].clear()

    def _num_leading(self, names: Sequence[int]) -> list[int]:
        """Return how many of a prompt's first chunks each replica has cached."""
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
        """Record the chunks as cached. The end of a prompt is forgotten before its start, as in the cache."""
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
    """Yield the positions of the set bits."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def chunk_names(name_ids: Sequence[int], salt: str) -> list[int]:
    """Return a name for each full chunk of a prompt, which identifies the whole prefix that ends with the chunk.
    `name_ids`: of the prompt, see `EngineRequest`.

    The last token is left out, because it is always computed. Names are valid only within one process. They collide
    with a probability of 2⁻⁶⁴, and a collision only misleads the router.
    """
    data = array("q", name_ids).tobytes()
    size = CHUNK_TOKENS * array("q").itemsize
    names, name = [], hash(salt)
    for start in range(0, (len(name_ids) - 1) // CHUNK_TOKENS * size, size):
        name = hash((name, data[start : start + size]))
        names.append(name)
    return names
