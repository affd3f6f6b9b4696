"""Decides which requests run in the next step, and how many tokens each computes: queues, budgets, preemption.

There is one rule: a request's computed tokens catch up with its tokens. Prefill, chunked prefill, decode, prefix-cache
hits and resumption after preemption are all `granted = min(num_tokens - num_computed_tokens, budget)`.

`schedule()` for step n+1 runs before `update()` of step n. `num_tokens` includes the token that a launched step will
sample, so the request is scheduled again before the CPU knows that token. If it turns out to be a stop token, the
request finishes, and `update()` discards the result of step n+1 for it. A request that ends by length wastes no step.
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
from engine.core.kv.block_manager import BlockManager
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.launched_steps import LaunchedSteps
from engine.core.request import Request

PAUSED_STEPS = 16  # successive steps for favoured owners only, before all owners get one
# While several owners have requests, a new request waits for the steps in flight at most about as long as this many
# short steps take, or this many seconds, whichever is longer.
SHARED_STEPS = 16
SHARED_SECONDS = 0.03
# The same while an idle owner is expected to send a request.
EXPECTED_STEPS = SHARED_STEPS // 2
EXPECTED_SECONDS = SHARED_SECONDS / 2

_Batched = tuple[list[Request], ScheduledBatch]


@dataclass(slots=True)
class _Plan:
    """A step under construction."""

    decodes: list[Request] = field(default_factory=list)  # requests that compute one token each
    longer: list[Request] = field(default_factory=list)  # requests that compute more
    lengths: list[int] = field(default_factory=list)  # tokens of each request of `longer`
    partial: list[Request] = field(default_factory=list)  # requests whose chunk was cut by the token budget
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.longer)

    def batch(self, last: _Batched) -> _Batched:
        """Return the requests in batch order, and the batch: `last`, the previous step's, if nothing changed."""
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
    """Chooses the requests of each step within a budget of tokens and sequences.

    Requests belong to owners: the API key, user or client address that sent them. Requests of one owner and priority
    run first come, first served; between owners, scheduling is fair (see `RequestQueues`).

    **Preemption.** When blocks run out, the last running request is preempted: it loses its blocks, waits again, and is
    recomputed later, mostly from the prefix cache. The first request in queue order therefore always makes progress,
    and every request finishes. A waiting request takes the row or the blocks of the last running one only if its own
    owner has far fewer running requests (`should_give_way`). A better priority alone is no reason to preempt.

    **Step length.** A new request waits for the steps in flight. So while several owners have requests, a step computes
    at most as many tokens as take the time of a few short steps (`StepPace`). While an idle owner is expected to send a
    request (`Visits`), that time is halved. While an owner is favoured, all other owners pause, except for one step in
    every `PAUSED_STEPS + 1`. With a single owner, and no other expected, a step may use the whole token budget.

    **Fast path.** In most steps, a request computes its newest token and nothing else about it changes. Up to
    `Request.steady_until` tokens this is known in advance, and `schedule` and `update` skip everything else.

    n > 1 needs no special case: each completion finds the prompt's blocks in the prefix cache, published by the
    previous completion in the same step.
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
        """`num_batches`: number of overlapping steps, one for each pipeline stage. With more than one, a request whose
        newest token is in flight is in no other step, so each step takes a fraction of the running requests.
        """
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching, groups, max_num_batched_tokens)
        super().__init__(blocks, max_num_seqs, max_num_batched_tokens, max_model_len, clock)
        self._num_batches = num_batches
        self._num_paused = 0  # successive steps for favoured owners only
        # A request for which there were too few blocks, and the number of block releases by then.
        self._refused: tuple[Request, int] | None = None
        self._last: _Batched = [], ScheduledBatch([], [], 0, 0, [])  # the previous step's
        self._step = self._prefix_queries = self._prefix_hits = self._prompt_tokens = 0

    def drain(self) -> tuple[list[Request], list[Request]]:
        self._refused = None
        self._last = [], ScheduledBatch([], [], 0, 0, [])
        return super().drain()

    def has_work(self) -> bool:
        """Whether a request is unfinished, an output is pending or a launched step has not been read."""
        return bool(self.queues or self._in_flight or self._late)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The caller launches it at once, before any other call.

        An empty output must not be launched: a later output carries what the worker has to be told.
        """
        assert len(self._in_flight) < max(self._num_batches, 2), "too many steps are in flight"
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
        """Return the maximum number of tokens of the next step."""
        most, short = self.max_num_batched_tokens, self._pace.short
        num_waited = 1 + len(self._in_flight)  # steps that a new request waits for
        seconds = self._visits.seconds_to_next(now) + max(EXPECTED_STEPS * short, EXPECTED_SECONDS)
        if self.queues.is_shared:
            seconds = min(seconds, max(SHARED_STEPS * short, SHARED_SECONDS))
        if seconds == inf:
            return most
        return min(self._pace.num_tokens(seconds / num_waited) or most, most)

    def _fill(self, plan: _Plan, num_first: int, budget: int) -> None:
        """Schedule the running requests, then admit waiting ones. The first `num_first` belong to favoured owners."""
        queues, num_preemptions = self.queues, self._num_preemptions
        running = iter(queues.running)  # preemption pops the tail, never an earlier request than the current one
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
        if num_preemptions == self._num_preemptions:  # otherwise there are too few blocks to admit a request
            self._admit_waiting(budget, plan)

    def _part(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Return the running requests for the next step: where steps overlap, a fraction without tokens in flight."""
        if self._num_batches == 1:
            return requests
        known = (each for each in requests if each.num_tokens == len(each.token_ids))
        return islice(known, -(-len(self.queues.running) // self._num_batches))

    def _continue(self, running: Iterable[Request], budget: int, plan: _Plan) -> int:
        """Schedule running requests. Returns the remaining budget."""
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
            elif num_tokens < request.max_num_tokens:  # otherwise its last token is in flight
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
        """Preempt the last running request if the first waiting one needs its row or blocks and deserves them more."""
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
        """Whether there are too few blocks for the request."""
        if not self._is_refused(request):
            cached = self._cached(request)
            if self.blocks.fits(request, request.num_tokens, cached, self._num_spare(request)):
                return False
            self._refused = request, self.blocks.pool.num_releases
        return True

    def _is_refused(self, request: Request) -> bool:
        """Whether there were too few blocks at the last attempt, and none has been released since."""
        return self._refused == (request, self.blocks.pool.num_releases)

    def _cached(self, request: Request) -> Sequence[Sequence[int]]:
        return self.blocks.match_prefix(request) if request.reads_cache else ()

    def _num_spare(self, request: Request) -> int:
        """Return how many blocks a request must leave free: one per cache group for each request ahead of it."""
        return self.queues.num_ahead(request) * len(self.blocks.groups)

    def stats(self, num_deferred: int = 0) -> SchedulerStats:
        """`num_deferred`: requests that the scheduler has not received yet."""
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
        """Move the first waiting request to `running`. Returns None if it must wait, usually for blocks.

        The request gets blocks for all its tokens at once (in a window group: for its window and one chunk), so that a
        long prompt does not preempt others chunk by chunk. It leaves one block per cache group for each request ahead
        of it, so that these do not preempt it when they need their next block.
        """
        if self._is_refused(request):
            return None
        if len(request.token_ids) < request.num_tokens:  # just preempted: a token of it is in flight
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

        Missing blocks are taken from the last running requests by preemption. Returns 0 if this request was one of
        them.
        """
        # A deferred request has computed all its tokens: it computes the last one again.
        start = min(request.num_computed_tokens, request.num_tokens - 1)
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
        """Assert all invariants of the queues and the blocks."""
        self.queues.check()
        running = self.queues.running
        self.blocks.check(running)
        assert len(running) <= self.max_num_seqs
        in_flight = [request for *_, requests in self._in_flight for request in requests]
        for request in [*running, *self.queues.waiting]:
            request.check(request in running, in_flight.count(request))
