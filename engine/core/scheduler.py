"""Which requests run next, and with how many tokens: queues, budgets, preemption.

One rule: every request's computed tokens catch up with its tokens. Prefill, decode, chunks, prefix-cache hits and
resumption after preemption are all `granted = min(num_tokens - num_computed_tokens, budget)`.

`schedule()` for step n+1 runs before `update()` of step n. A token that a launched step samples counts in `num_tokens`
at once, so its request is scheduled on before the CPU knows it. When it turns out to be the last one, the request is
finished, and what step n+1 computed for it is dropped when read. Ends by length are known ahead and waste nothing.
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

PAUSED_STEPS = 16  # in a row, of favoured owners alone; then others get a step too
SHARED_STEPS = 16  # short steps for which the owners that there are wait for each other's, about, at most
SHARED_SECONDS = 0.03  # that they may wait in any case
COMING_STEPS = SHARED_STEPS // 2  # the same for an owner that is expected
COMING_SECONDS = SHARED_SECONDS / 2

_Batched = tuple[list[Request], ScheduledBatch]


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    decodes: list[Request] = field(default_factory=list)  # they compute one token each
    longer: list[Request] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of `longer`
    partial: list[Request] = field(default_factory=list)  # whose chunks were cut by the token budget
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.longer)

    def batch(self, last: _Batched) -> _Batched:
        """The requests in the batch's order, and the batch: `last`, the step before's, when nothing changed."""
        num_decodes = len(self.decodes)
        requests = self.decodes + self.longer
        num_tokens = [1] * num_decodes + self.lengths
        partial = sorted(map(requests.index, self.partial))
        last_requests, last_batch = last
        is_same = requests == last_requests and not self.new_requests  # which have new rows
        if is_same and num_tokens == last_batch.num_tokens and partial == last_batch.partial:
            return last
        request_ids = [request.request_id for request in requests]
        return requests, ScheduledBatch(request_ids, num_tokens, sum(num_tokens), num_decodes, partial)


class Scheduler(LaunchedSteps):
    """Which requests run, under a budget of tokens and of sequences in each step: first come, first served among the
    requests of one owner and priority, fair between owners (see `RequestQueues`).

    When blocks run out the last running request is preempted: it loses its blocks, waits again, and is recomputed later,
    mostly from the prefix cache. The first request in queue order therefore always progresses once it runs, and all
    requests finish. A request that waits for a row or for blocks takes those of the last running one if its owner has
    much less than that one's (`should_give_way`); otherwise no request is preempted for a waiting one, whatever its priority.

    Owners do not wait long for each other's steps. While there is more than one, a step has only as many tokens as it computes
    in the time of a few short steps (`StepPace`), and half as many while one that has left is expected (`Visits`), so that it
    soon meets its first. While an owner is favoured, all others pause, but for a step now and then. With one owner, and none
    that is expected, nothing is bounded.

    Most requests in most steps are steady: they compute their newest token and nothing else happens to them. Up to
    `Request.steady_until` tokens that is known, and `schedule` and `update` take a fast path.

    n > 1 needs no special case: each answer to a prompt finds the blocks of the one before it published, in the very
    step that fills them.
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
        """`num_batches`: steps that overlap, one for each stage of a pipeline. With more than one, a request whose newest token
        is in flight is in no other step, so each step takes its part of the running requests.
        """
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching, groups, max_num_batched_tokens)
        super().__init__(blocks, max_num_seqs, max_num_batched_tokens, max_model_len, clock)
        self._num_batches = num_batches
        self._num_paused = 0  # steps in a row of favoured owners alone
        self._refused: tuple[Request, int] | None = None  # lacked blocks, after so many releases of blocks
        self._last: _Batched = [], ScheduledBatch([], [], 0, 0, [])  # of the last step
        self._step = self._prefix_queries = self._prefix_hits = self._prompt_tokens = 0

    def drain(self) -> tuple[list[Request], list[Request]]:
        self._refused = None
        self._last = [], ScheduledBatch([], [], 0, 0, [])
        return super().drain()

    def has_work(self) -> bool:
        """Whether a request is unfinished, its end is not told or a launched step is not read back."""
        return bool(self.queues or self._in_flight or self._late)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, on the assumption that it is launched at once, before any other call.

        An empty output must not be launched: what it would have told the worker comes with a later one.
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
        """How many tokens the next step may have."""
        most, short = self.max_num_batched_tokens, self._pace.short
        num_waited = 1 + len(self._in_flight)  # steps, for which one that comes waits
        seconds = self._visits.seconds_to_next(now) + max(COMING_STEPS * short, COMING_SECONDS)
        if self.queues.is_shared:
            seconds = min(seconds, max(SHARED_STEPS * short, SHARED_SECONDS))
        if seconds == inf:
            return most
        return min(self._pace.num_tokens(seconds / num_waited) or most, most)

    def _fill(self, plan: _Plan, num_first: int, budget: int) -> None:
        """Schedule those that run, `num_first` favoured ones first, then admit those that wait."""
        queues, num_preemptions = self.queues, self._num_preemptions
        running = iter(queues.running)  # preemption pops the tail, at or after the request at hand
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
        if num_preemptions == self._num_preemptions:  # else blocks are short, and no request is admitted
            self._admit_waiting(budget, plan)

    def _part(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Of requests that run, those of the next one of several batches: their tokens are all known."""
        if self._num_batches == 1:
            return requests
        known = (each for each in requests if each.num_tokens == len(each.token_ids))
        return islice(known, -(-len(self.queues.running) // self._num_batches))

    def _continue(self, running: Iterable[Request], budget: int, plan: _Plan) -> int:
        """Schedule running requests; returns what they leave of the budget."""
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
        """`favoured`: only requests of favoured owners."""
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
        """Preempt the last running request when the first waiting one lacks a row or blocks and should have them."""
        queues = self.queues
        if not queues.should_give_way():
            return False
        if len(queues.running) < self.max_num_seqs and not self._lacks_blocks(queues.first_waiting()):
            return False
        self._preempt_last()
        return True

    def _num_cached(self, request: Request) -> int:
        """Tokens of it that the prefix cache holds."""
        cached = self._cached(request)
        return len(cached[0]) * self.blocks.block_size if cached else 0

    def _lacks_blocks(self, request: Request) -> bool:
        """Whether the blocks do not suffice for it."""
        if not self._is_refused(request):
            cached = self._cached(request)
            if self.blocks.fits(request, request.num_tokens, cached, self._num_spare(request)):
                return False
            self._refused = request, self.blocks.pool.num_releases
        return True

    def _is_refused(self, request: Request) -> bool:
        """Whether the blocks did not suffice for it when it was last tried, and none was released since."""
        return self._refused == (request, self.blocks.pool.num_releases)

    def _cached(self, request: Request) -> Sequence[Sequence[int]]:
        return self.blocks.match_prefix(request) if request.reads_cache else ()

    def _num_spare(self, request: Request) -> int:
        """Blocks that it has to leave when it starts to run: one of each group for each request that runs before it."""
        return self.queues.num_ahead(request) * len(self.blocks.groups)

    def stats(self, num_deferred: int = 0) -> SchedulerStats:
        """`num_deferred`: requests that are not the scheduler's yet."""
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
        """Move the first waiting request to `running`, or None when that has to wait, as a rule for blocks.

        It gets blocks for all its tokens at once (in a window group, for what its window and a chunk take), so that a
        long prompt does not preempt others chunk by chunk. It leaves a block of each group for each running request before
        it, so that these do not preempt it when they need their next one.
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
        """Schedule as many of its tokens as the budget allows, as if the step were launched; returns how many.

        Blocks that it lacks come from preempting the last requests. 0 when it became the last one and was preempted too.
        """
        start = min(request.num_computed_tokens, request.num_tokens - 1)  # the last one again, when it was deferred
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
