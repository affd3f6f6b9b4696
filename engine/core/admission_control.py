"""Decides whether the first waiting request may start, and gives it its first blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.batch import EngineOutput, NewRequest
from engine.core.request import Request
from engine.core.request_table import RequestTable

_Prefix = Sequence[Sequence[int]]  # the first entries of each block table, see `BlockManager.match_prefix`


class AdmissionControl:
    """Starts waiting requests while there are blocks for them, and drops those that would miss their deadlines."""

    def __init__(self, requests: RequestTable, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._requests, self._blocks, self._clock = requests, requests.blocks, clock
        self.late: list[EngineOutput] = []  # of requests that were dropped, not returned to the caller yet
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens: looked up in the prefix cache, and found there
        # A request for which there were too few blocks, and the number of block releases by then.
        self._refused: tuple[Request, int] | None = None
        # The prefix found last, and what it was found for: request, number of its tokens, version of the cache.
        self._found: tuple[Request | None, int, int] = None, 0, 0
        self._prefix: _Prefix = ()

    def clear(self) -> None:
        """Forget the requests, as after `RequestTable.drain`."""
        self._refused = None
        self._found = None, 0, 0

    def drop_if_late(self, request: Request) -> bool:
        """Finish a waiting request if its first token would miss its deadline. Returns whether it did."""
        if not self._requests.deadlines.is_too_late(request, self._num_cached):
            return False
        self.late.append(self._requests.time_out(request))
        return True

    def take_late(self) -> list[EngineOutput]:
        """Return the final outputs of the requests dropped since the last call."""
        late, self.late = self.late, []
        return late

    def lacks_blocks(self, request: Request) -> bool:
        """Return whether there are too few blocks for the request."""
        if request.load is not None and not request.load.is_done:
            return False
        if not self._is_refused(request):
            prefix = self._cached(request)
            if self._blocks.fits(request, request.num_tokens, prefix, self._num_spare(request)):
                return False
            self._refuse(request)
        return True

    def admit(self, request: Request, room: Callable[[int], int]) -> NewRequest | None:
        """Move the first waiting request to `running`. Returns None if it must wait, usually for blocks.

        room: index of the first token that it must compute → how many tokens it may compute in the step. With 0 it runs
        without any: it waits for its image, ahead of younger requests, and the worker learns of it later.

        The request gets blocks for all its tokens at once (in a window group: for its window and one chunk), so that a
        long prompt does not preempt others chunk by chunk. It leaves one block per cache group for each request ahead
        of it, so that these do not preempt it when they need their next block.
        """
        if self._is_refused(request):
            return None
        if len(request.token_ids) < request.num_tokens:  # just preempted: a token of it is in flight
            return None
        if self._blocks.awaits_load(request, self._num_spare(request)):
            if request.load is None and not self._blocks.has_loads:  # there are too few blocks for a load
                self._refuse(request)
            return None
        prefix = self._cached(request)
        num_blocks = len(prefix[0]) if prefix else 0
        if prefix and self._blocks.awaits_state(request, num_blocks):
            return None
        num_computed = num_blocks * self._blocks.block_size
        step_end = max(min(request.num_tokens, num_computed + room(num_computed)), 1)
        if self._blocks.grow(request, request.num_tokens, prefix, self._num_spare(request), step_end) is None:
            self._refuse(request)
            return None
        self._requests.queues.start(request)
        request.load = None
        request.num_computed_tokens = num_computed
        request.is_rewound = request.is_unsent = False  # its new row is right
        request.num_charged = max(request.num_charged, request.num_computed_tokens)
        if not request.scheduled_time:
            self._record_first(request, num_blocks)
        return request.new_request(num_computed)

    def load(self, request: Request) -> None:
        """Begin to load the prefix of a request that is not the next to start."""
        if len(request.token_ids) == request.num_tokens:
            self._blocks.awaits_load(request, self._num_spare(request))

    def _record_first(self, request: Request, num_blocks: int) -> None:
        """Record the first start of a request, with a cached prefix of `num_blocks` blocks."""
        request.scheduled_time = self._clock()
        request.num_cached_tokens = request.num_computed_tokens
        request.prefix_miss, request.num_known_tokens = self._blocks.explain_miss(request, num_blocks)
        if self._blocks.enable_prefix_caching and request.reads_cache:
            self.prefix_queries += request.num_prompt_tokens
            self.prefix_hits += request.num_cached_tokens

    def _refuse(self, request: Request) -> None:
        self._refused = request, self._blocks.pools.num_releases

    def _is_refused(self, request: Request) -> bool:
        """Return whether there were too few blocks at the last attempt, and none has been released since."""
        return self._refused == (request, self._blocks.pools.num_releases)

    def _num_cached(self, request: Request) -> int:
        """Return how many of the request's tokens are in the prefix cache."""
        prefix = self._cached(request)
        return len(prefix[0]) * self._blocks.block_size if prefix else 0

    def _cached(self, request: Request) -> _Prefix:
        """Find the request's prefix in the cache, once for all questions on one admission."""
        if not request.reads_cache:
            return ()
        key = request, len(request.token_ids), self._blocks.version
        if key != self._found:
            self._found, self._prefix = key, self._blocks.match_prefix(request)
        return self._prefix

    def _num_spare(self, request: Request) -> int:
        """Return how many blocks a request must leave free for each cache group: one for each request ahead of it."""
        return self._requests.queues.num_ahead(request)
