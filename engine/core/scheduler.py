"""The scheduler: selects the requests of each step and the number of tokens that each computes.

One rule: every request's computed tokens catch up with its tokens. Prefill, decode, chunked prefill, prefix-cache hits
and resumption after preemption are all `granted = min(num_tokens - num_computed_tokens, budget)`.

`schedule()` for step n+1 runs before `update()` of step n. A token that a launched step samples counts in `num_tokens`
at once, so its request is scheduled again before the CPU knows the token. If it turns out to be the request's last
token, the request finishes and the result of step n+1 for it is discarded when read. A request that ends by length
wastes no step, because its end is known in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from time import monotonic

from engine.core.batch import (
    NewRequest,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerStats,
)
from engine.core.block_manager import BlockManager
from engine.core.cache_groups import FULL, CacheGroup
from engine.core.launched_steps import LaunchedSteps
from engine.core.request import Request

PAUSED_STEPS = 16  # most successive steps for favoured owners only; the next step is for all owners
# With several owners, the steps that a new request waits for take at most about this long, whichever is longer:
SHARED_STEPS = 16  # as many short steps
SHARED_SECONDS = 0.03
COMING_STEPS = SHARED_STEPS // 2  # the same limits while an idle owner is expected to return
COMING_SECONDS = SHARED_SECONDS / 2

_Batched = tuple[list[Request], ScheduledBatch]


@dataclass(slots=True)
class _Plan:
    """A step that is being planned."""

    decodes: list[Request] = field(default_factory=list)  # requests that compute one token each
    longer: list[Request] = field(default_factory=list)  # requests that compute more
    lengths: list[int] = field(default_factory=list)  # tokens of each request of `longer`
    partial: list[Request] = field(default_factory=list)  # requests with a chunk cut by the token budget
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.longer)

    def batch(self, last: _Batched) -> _Batched:
        """Return the requests in batch order, and the batch; `last`, the previous step's, if nothing changed."""
        num_decodes = len(self.decodes)
        requests = self.decodes + self.longer
        num_tokens = [1] * num_decodes + self.lengths
        partial = sorted(map(requests.index, self.partial))
        last_requests, last_batch = last
        is_same = requests == last_requests and not self.new_requests  # new requests have new rows
        if is_same and num_tokens == last_batch.num_tokens and partial == last_batch.partial:
            return last
        request_ids = [request.request_id for request in requests]
        return requests, ScheduledBatch(request_ids, num_tokens, sum(num_tokens), num_decodes, partial)


class Scheduler(LaunchedSteps):
    """Schedules requests step by step, within a token budget and a maximum number of running sequences.

    Order: first come, first served among requests of the same owner and priority, and fair between owners. The owner of
    a request is the API key, user or client address to which it is accounted. `RequestQueues` defines the order.

    Preemption: when blocks run out, the last running request loses its blocks, waits again, and is recomputed later,
    mostly from the prefix cache. The first running request therefore always progresses, and all requests finish. A
    waiting request takes the row or blocks of the last running one only if its own owner has far fewer running requests
    (`RequestQueues.should_give_way`). A higher priority alone never preempts a running request.

    Latency: owners do not wait long for each other's steps. While several owners have requests, a step gets only as
    many tokens as it computes in the time of a few short steps (`StepPace`). While an idle owner is expected to return
    (`Visits`), that time is halved, so that the owner's first step starts soon. While an owner is favoured, all others
    pause, except in every 17th step. With a single owner, and no other expected, the full token budget applies.

    Fast path: in most steps, most requests are steady, which means that they only append a token. `schedule` and
    `update` handle a request in a few operations while it has no more than `Request.steady_until` tokens.

    n > 1 needs no special case: each completion of a prompt finds the blocks of the previous completion in the prefix
    cache, in the very step that fills them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (FULL,),
        clock: Callable[[], float] = monotonic,
        num_batches: int = 1,
    ) -> None:
        """`num_batches`: batches that alternate where steps overlap, as in pipeline parallelism. A request with a token
        in flight is in no other step, so each batch takes an equal part of the running requests.
        """
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching, groups, max_num_batched_tokens)
        super().__init__(blocks, max_num_seqs, max_num_batched_tokens, max_model_len, clock)
        self._num_batches = num_batches
        self._num_paused = 0  # successive steps for favoured owners only
        self._refused: tuple[Request, int] | None = None  # a request that lacked blocks, and `num_releases` then
        self._last: _Batched = [], ScheduledBatch([], [], 0, 0, [])  # the last step's
        self._step = self._prefix_queries = self._prefix_hits = self._prompt_tokens = 0

    def drain(self) -> tuple[list[Request], list[Request]]:
        self._refused = None
        self._last = [], ScheduledBatch([], [], 0, 0, [])
        return super().drain()

    def has_work(self) -> bool:
        """Whether a request is unfinished, a time-out is not yet reported, or a launched step is not read back."""
        return bool(self.queues or self._in_flight or self._late)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The caller must launch it before any other call to the scheduler.

        An empty output must not be launched: the next non-empty one includes its `removed` requests.
        """
        assert len(self._in_flight) <= 1, "at most one step may be in flight"
        queues, plan = self.queues, _Plan()
        num_first = queues.sort_running()
        while queues.is_shared and queues.num_waiting and self._give_way():
            num_first = queues.sort_running()
        now = self._clock()
        self._fill(plan, num_first, self._budget(now))
        self._last = plan.batch(self._last)
        requests, batch = self._last
        removed: list[str] = []
        if batch.request_ids:
            self._step += 1
            self._in_flight.append((self._step, now, requests))
            removed, self._removed = self._removed, removed
        return SchedulerOutput(self._step, plan.new_requests, batch, plan.new_block_ids, removed)

    def _budget(self, now: float) -> int:
        """Return the token budget of the next step."""
        most, short = self.max_num_batched_tokens, self._pace.short
        num_waited = 1 + len(self._in_flight)  # steps that a request arriving now waits for
        seconds = self._visits.seconds_to_next(now) + max(COMING_STEPS * short, COMING_SECONDS)
        if self.queues.is_shared:
            seconds = min(seconds, max(SHARED_STEPS * short, SHARED_SECONDS))
        if seconds == inf:
            return most
        return min(self._pace.num_tokens(seconds / num_waited) or most, most)

    def _fill(self, plan: _Plan, num_first: int, budget: int) -> None:
        """Schedule the running requests, then admit waiting ones. The first `num_first` belong to favoured owners."""
        queues, num_preemptions = self.queues, self._num_preemptions
        running = iter(queues.running)  # preemption pops the tail, at or after the current request
        others_pause = queues.has_favoured and self._num_paused < PAUSED_STEPS
        budget = self._continue(self._part(islice(running, num_first)), budget, plan)
        if others_pause and num_preemptions == self._num_preemptions:
            self._admit_waiting(budget, plan, favoured=True)
        if others_pause and plan:
            self._num_paused += 1
            queues.favoured_step()
            return
        self._num_paused = 0
        budget = self._continue(self._part(running), budget, plan)
        if num_preemptions == self._num_preemptions:  # else blocks are short: admit no request
            self._admit_waiting(budget, plan)

    def _part(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Return the running requests for the next of `num_batches` batches: those with no token in flight."""
        if self._num_batches == 1:
            return requests
        known = (each for each in requests if each.num_tokens == len(each.token_ids))
        return islice(known, -(-len(self.queues.running) // self._num_batches))

    def _continue(self, running: Iterable[Request], budget: int, plan: _Plan) -> int:
        """Schedule running requests and return the remaining budget."""
        decodes = plan.decodes
        for request in running:
            if not budget:
                break
            num_tokens = request.num_tokens
            if num_tokens <= request.steady_until:
                request.num_computed_tokens = num_tokens
                request.num_tokens = num_tokens + 1
                decodes.append(request)
                budget -= 1
            elif num_tokens < request.max_num_tokens:  # else its last token is in flight
                granted = self._grant(request, budget, plan)
                if not granted:
                    break
                budget -= granted
        return budget

    def _admit_waiting(self, budget: int, plan: _Plan, favoured: bool = False) -> None:
        """Admit waiting requests in queue order. `favoured`: only those of favoured owners."""
        queues = self.queues
        while budget and queues.num_waiting and len(queues.running) < self.max_num_seqs:
            request = queues.first_waiting()
            if favoured and not queues.owner_of(request).is_favoured:
                break
            if self._deadlines.is_too_late(request, self._num_cached):
                self._late.append(self._time_out(request))
                continue
            new_request = self._admit(request)
            if new_request is None:
                break
            plan.new_requests.append(new_request)
            granted = self._grant(request, budget, plan)
            assert granted, "a new request has blocks for its first chunk"
            budget -= granted

    def _give_way(self) -> bool:
        """Preempt the last running request if the first waiting one needs its row or blocks and is entitled to them."""
        queues = self.queues
        if not queues.should_give_way():
            return False
        if len(queues.running) < self.max_num_seqs and not self._lacks_blocks(queues.first_waiting()):
            return False
        self._preempt_last()
        return True

    def _num_cached(self, request: Request) -> int:
        """Return how many of the request's tokens are in the prefix cache."""
        cached = self._cached(request)
        return len(cached[0]) * self.blocks.block_size if cached else 0

    def _lacks_blocks(self, request: Request) -> bool:
        """Whether there are too few free blocks to admit the request."""
        if not self._is_refused(request):
            cached = self._cached(request)
            if self.blocks.fits(request, request.num_tokens, cached, self._num_spare(request)):
                return False
            self._refused = request, self.blocks.pool.num_releases
        return True

    def _is_refused(self, request: Request) -> bool:
        """Whether the request lacked blocks when it was last tried and no block was released since."""
        return self._refused == (request, self.blocks.pool.num_releases)

    def _cached(self, request: Request) -> Sequence[Sequence[int]]:
        return self.blocks.match_prefix(request) if request.reads_cache else ()

    def _num_spare(self, request: Request) -> int:
        """Blocks to leave free when admitting the request: one in each group for each request that runs before it."""
        return self.queues.num_ahead(request) * len(self.blocks.groups)

    def stats(self, num_deferred: int = 0) -> SchedulerStats:
        """`num_deferred`: requests not yet added to the scheduler, because their grammars are being compiled."""
        return SchedulerStats(
            num_running=len(self.queues.running),
            num_waiting=self.queues.num_waiting,
            num_blocks=self.blocks.num_blocks,
            num_free_blocks=self.blocks.num_free_blocks,
            num_preemptions=self._num_preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_deferred=num_deferred,
            num_corrupted=self.num_corrupted,
        )

    def _admit(self, request: Request) -> NewRequest | None:
        """Move the first waiting request to `running`. Returns None if it cannot run yet, usually for lack of blocks.

        The request gets blocks for all its tokens at once (in a group with a window: for the window and a chunk), so
        that a long prompt does not preempt others chunk by chunk. One block of each group stays free for each running
        request before it, so that these do not preempt it when they need their next block.
        """
        if self._is_refused(request):
            return None
        if len(request.token_ids) < request.num_tokens:  # just preempted, with a token in flight
            return None
        cached = self._cached(request)
        if self.blocks.grow(request, request.num_tokens, cached, self._num_spare(request)) is None:
            self._refused = request, self.blocks.pool.num_releases
            return None
        self.queues.start(request)
        request.num_computed_tokens = len(cached[0]) * self.blocks.block_size if cached else 0
        request.num_charged = max(request.num_charged, request.num_computed_tokens)
        if not request.scheduled_time:
            request.scheduled_time = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            request.prefix_miss = self.blocks.miss_reason(request, len(cached[0]) if cached else 0)
            if self.blocks.enable_prefix_caching and request.reads_cache:
                self._prefix_queries += request.num_prompt_tokens
                self._prefix_hits += request.num_cached_tokens
        return NewRequest(
            request.engine_request,
            request.seed,
            request.token_ids.copy(),
            request.num_computed_tokens,
            [table.copy() for table in request.block_tables],
        )

    def _grant(self, request: Request, budget: int, plan: _Plan) -> int:
        """Schedule as many of the request's tokens as the budget allows, and return how many.

        Preempts the last running requests if blocks are missing. Returns 0 if the request preempted itself that way.
        """
        start = min(request.num_computed_tokens, request.num_tokens - 1)  # a deferred token is computed again
        wanted = request.num_tokens - start
        granted = min(wanted, budget)
        end = start + granted
        if end > request.num_slots:
            while (grown := self.blocks.grow(request, end)) is None:
                if self._preempt_last() is request:
                    return 0
            plan.new_block_ids[request.request_id] = grown
        request.num_computed_tokens = end
        if self.queues.is_shared:
            self.queues.charge(request, end)
        if start < request.num_prompt_tokens:
            self._prompt_tokens += min(end, request.num_prompt_tokens) - start
        if request.next_commit <= min(end, len(request.token_ids)):
            self.blocks.commit(request)
        if granted < wanted:
            plan.partial.append(request)
        else:
            request.num_tokens += 1
        if granted == 1:
            plan.decodes.append(request)
        else:
            plan.longer.append(request)
            plan.lengths.append(granted)
        return granted

    def check(self) -> None:
        """Assert every invariant of the queues and the blocks."""
        self.queues.check()
        running = self.queues.running
        self.blocks.check(running)
        assert len(running) <= self.max_num_seqs
        in_flight = [request for *_, requests in self._in_flight for request in requests]
        for request in [*running, *self.queues.waiting]:
            request.check(request in running, in_flight.count(request))
