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
from time import monotonic

from engine.core.admission_control import AdmissionControl
from engine.core.batch import (
    BlockMoves,
    EngineOutput,
    NewRequest,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerStats,
    StepOutputs,
    StepResult,
)
from engine.core.drafts.policy import DraftCounts, DraftPolicy
from engine.core.fairness.arrivals import Arrivals
from engine.core.fairness.deadlines import Deadlines
from engine.core.fairness.request_queues import RequestQueues
from engine.core.fairness.step_budget import StepBudget
from engine.core.in_flight_steps import InFlightSteps
from engine.core.kv.block_manager import BlockManager
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.tiers import MAX_LOADS

PAUSED_STEPS = 16  # successive steps for favoured tenants only, before all tenants get one

MOST_RECENT = 8  # batches

_Batched = tuple[list[Request], ScheduledBatch]
_NOTHING: _Batched = [], ScheduledBatch([], [], 0, 0, [])


@dataclass(slots=True)
class _Plan:
    """A step under construction."""

    decodes: list[Request] = field(default_factory=list)  # requests that compute one token each
    longer: list[Request] = field(default_factory=list)  # requests that compute more
    lengths: list[int] = field(default_factory=list)  # tokens of each request of `longer`
    num_drafts: list[int] = field(default_factory=list)  # of these tokens
    partial: list[Request] = field(default_factory=list)  # requests whose chunk was cut by the token budget
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)
    chosen: dict[str, list[int]] = field(default_factory=dict)  # drafts of requests that may be in the step
    drafts: dict[str, list[int]] = field(default_factory=dict)  # of its requests
    rewinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_proposals: int = 0  # see `SchedulerOutput`

    def __bool__(self) -> bool:
        return bool(self.decodes or self.longer)

    def add_blocks(self, request: Request, grown: list[list[int]]) -> None:
        """Note blocks that were appended to the request's tables."""
        earlier = self.new_block_ids.get(request.request_id, [[]] * len(grown))
        self.new_block_ids[request.request_id] = [a + b for a, b in zip(earlier, grown, strict=True)]

    def batch(self, recent: list[_Batched]) -> _Batched:
        """Return the requests in batch order, and the batch: that of an earlier step in `recent` if it had the same."""
        num_decodes = len(self.decodes)
        requests = self.decodes + self.longer
        num_tokens = [1] * num_decodes + self.lengths
        partial = sorted(map(requests.index, self.partial))
        num_drafts = (*[0] * num_decodes, *self.num_drafts) if self.drafts else ()
        if self.new_requests:  # they have new rows
            recent.clear()
        lengths = num_tokens, num_drafts, partial
        for found, batch in recent:
            if lengths == (batch.num_tokens, batch.num_drafts, batch.partial) and requests == found:
                return found, batch
        request_ids = [request.request_id for request in requests]
        batch = ScheduledBatch(request_ids, num_tokens, sum(num_tokens), num_decodes, partial, num_drafts)
        if len(recent) == MOST_RECENT:
            recent.pop()
        recent.insert(0, (requests, batch))
        return recent[0]


class Scheduler:
    """Chooses the requests of each step within a budget of tokens and sequences.

    Its parts: `RequestTable` owns the unfinished requests and their blocks, `AdmissionControl` starts waiting ones,
    `StepBudget` limits the tokens of a step, and `InFlightSteps` applies the results. This class decides who runs.

    Requests belong to tenants: the API key, user or client address that sent them. Requests of one tenant and priority
    run first come, first served; between tenants, scheduling is fair (see `RequestQueues`).

    **Preemption.** When blocks run out, the last running request is preempted: it loses its blocks, waits again, and is
    recomputed later, mostly from the prefix cache. The first request in queue order therefore always makes progress,
    and every request finishes. A waiting request takes the row or the blocks of the last running one only if its own
    tenant has far fewer running requests (`should_give_way`). A better priority alone is no reason to preempt.

    **Step length.** A new request waits for the steps in flight. So while several tenants have requests, a step
    computes at most as many tokens as take the time of a few short steps (`StepTimes`). While an idle tenant is
    expected to send a request (`Arrivals`), that time is halved. While a tenant is favoured, all other tenants pause,
    except for one step in every `PAUSED_STEPS + 1`. With a single tenant, and no other expected, a step may use the
    whole token budget.

    **Fast path.** In most steps, a request computes its newest token and nothing else about it changes. Up to
    `Request.steady_until` tokens this is known in advance, and `schedule` and `update` skip everything else.

    **Drafts.** A decoding request whose tokens are all known may compute drafts beside its newest token (`DraftPolicy`
    says which). They count as computed and as in flight until the step is read, which withdraws the rejected ones.
    Until then the request is in no other step; without pipeline stages, none is launched. Drafts take only free blocks.

    n > 1 needs no special case: each completion finds the prompt's blocks in the prefix cache, published by the
    previous completion in the same step.
    """

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (FULL,),
        clock: Callable[[], float] = monotonic,
        num_batches: int = 1,
        drafts: DraftPolicy | None = None,
        has_tiers: bool = False,
        whole_prompts: bool = False,
    ) -> None:
        """`num_blocks`: of the only pool, or of each. `num_batches`: number of overlapping steps, one for each pipeline
        stage. With more than one, a request whose newest token is in flight is in no other step, so each step takes a
        fraction of the running requests. `drafts`: None: there are none. `has_tiers`: see `HostTier`.
        `whole_prompts`: a step computes a prompt whole or not at all.
        """
        assert min(max_num_seqs, max_num_batched_tokens, max_model_len) >= 1
        self.max_num_seqs = max_num_seqs
        self.blocks = BlockManager(
            num_blocks, block_size, enable_prefix_caching, groups, max_num_batched_tokens, has_tiers
        )
        arrivals, deadlines = Arrivals(clock), Deadlines(clock)
        self.queues = RequestQueues(max_num_batched_tokens // 2, arrivals)
        self.requests = RequestTable(self.blocks, self.queues, deadlines, max_model_len, clock)
        self._admission = AdmissionControl(self.requests, clock)
        self._budget = StepBudget(max_num_batched_tokens, arrivals)
        self._steps = InFlightSteps(
            self.blocks, self._budget, deadlines.record_first_token, self.requests.finish, drafts
        )
        self._clock, self._num_batches, self._drafts = clock, num_batches, drafts
        self._whole_prompts = whole_prompts
        self._num_paused = 0  # successive steps for favoured tenants only
        self._recent: list[_Batched] = []  # batches of the last steps, newest first
        self._num_undrafted = 0  # coming steps before which no request wants drafts
        self._step = self._prompt_tokens = 0

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens of a step. May be lowered while steps need too much memory."""
        return self._budget.max_num_tokens

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, value: int) -> None:
        self._budget.max_num_tokens = value

    @property
    def num_corrupted(self) -> int:
        """Number of requests that ended because the model computed NaN or infinity."""
        return self.requests.num_corrupted

    def check_new(self, request: Request) -> None:
        """See `RequestTable.check_new`."""
        self.requests.check_new(request)

    def add(self, request: Request) -> None:
        """Queue a new request. Raises `ValueError` like `check_new`."""
        self.requests.add(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that `drain` removed."""
        self.queues.add(request)

    def abort(self, request_id: str) -> bool:
        """Abort a request in any state and drop its tokens in flight. Returns False if there is no such request."""
        return self.requests.abort(request_id)

    def take_late(self) -> list[EngineOutput]:
        """Return the final outputs of requests that `schedule` did not start because they would miss their deadlines.
        Call it after launching that step.
        """
        return self._admission.take_late()

    def update(self, output: SchedulerOutput, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest step in flight. Returns the outputs of its unfinished requests."""
        return self._steps.update(output, result, self._clock())

    def defer(self, indices: Iterable[int]) -> None:
        """See `InFlightSteps.defer`."""
        self._steps.defer(indices)

    def drain(self) -> tuple[list[Request], list[Request]]:
        """Remove all requests and reset them as if none had run. Forget the steps in flight and all cached KV, since
        those steps may not have written it. The worker must forget its rows.

        Returns the unfinished requests of the steps in flight, and all others, each in queue order.
        """
        in_flight = {request.request_id for request in self._steps.num_tokens()}
        self._steps.clear()
        self._admission.clear()
        self._recent.clear()
        return self.requests.drain(in_flight)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, as after a change of weights. Returns False, unchanged, while a request runs."""
        return self.blocks.reset()

    def has_work(self) -> bool:
        """Return whether a request is unfinished, an output is pending or a launched step has not been read."""
        return bool(self.queues or self._steps or self._admission.late)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The caller launches it at once, before any other call.

        An empty output must not be launched. A later output then carries its list of removed requests.
        """
        assert len(self._steps) < max(self._num_batches, 2), "too many steps are in flight"
        queues, plan = self.queues, _Plan()
        self.blocks.start_step()
        if self._drafts is not None and not self._choose_drafts(self._drafts, plan):
            return SchedulerOutput(self._step, [], _NOTHING[1], {}, [])
        num_first = queues.sort_running()
        while queues.is_shared and queues.num_waiting and self._give_way():
            num_first = queues.sort_running()
        if self._drafts is not None and self._drafts.has_drafter:
            plan.num_proposals = self._drafts.num_proposals(len(queues.running) + queues.num_waiting)
        now = self._clock()
        self._fill(plan, num_first, self._budget.num_tokens(now, len(self._steps), queues.is_shared))
        if plan.new_requests:
            self._num_undrafted = 0
        requests, batch = plan.batch(self._recent)
        removed: list[str] = []
        if batch.request_ids:
            self._step += 1
            self._steps.add(self._step, now, requests, batch.num_drafts)
            removed, self.requests.removed = self.requests.removed, removed
        return SchedulerOutput(
            self._step, plan.new_requests, batch, plan.new_block_ids, removed, plan.drafts, plan.rewinds,
            plan.num_proposals, self._moves(),
        )  # fmt: skip

    def _moves(self) -> BlockMoves | None:
        return None if self.blocks.tier is None else self.blocks.tier.take_moves()

    def arrived(self, loads: Iterable[int]) -> None:
        """Record that these loads have arrived, see `BlockMoves`. Call it before `schedule`."""
        if self.blocks.tier is not None:
            self.blocks.tier.arrived(loads)

    def _choose_drafts(self, drafts: DraftPolicy, plan: _Plan) -> bool:
        """Choose the drafts of the next step. Returns False if the steps in flight must be read before there is one."""
        if self._num_undrafted:  # so no step in flight has drafts
            self._num_undrafted -= 1
            return True
        one_ahead = self._num_batches == 1 and len(self._steps) > 0
        if one_ahead and self._steps.have_drafts:
            return False
        running = self.queues.running
        if not drafts.may_draft(len(running)):
            return True
        may_draft = [request for request in running if request.may_draft(one_ahead)]
        if not may_draft:  # a step gives each of them one token
            self._num_undrafted = max(min(each.drafts_from - len(each.token_ids) for each in running) - 1, 0)
            return True
        num_seqs = -(-len(running) // self._num_batches)
        chunks = any(request.num_computed_tokens + 1 < request.num_tokens for request in running)
        room = self.max_num_batched_tokens - len(running)
        chosen = drafts.choose(may_draft, num_seqs, room, beside_chunks=chunks)
        if chosen is None:
            return False
        plan.chosen = chosen
        for request in may_draft:
            if request.request_id in chosen:
                request.steady_until = 0
        return True

    def _fill(self, plan: _Plan, num_first: int, budget: int) -> None:
        """Schedule the running requests, then admit waiting ones. The first `num_first` belong to favoured tenants."""
        queues, num_preemptions = self.queues, self.requests.num_preemptions
        running = iter(queues.running)  # preemption pops the tail, never an earlier request than the current one
        others_pause = queues.has_favoured and self._num_paused < PAUSED_STEPS
        budget = self._continue(self._part(islice(running, num_first)), budget, plan)
        if others_pause and num_preemptions == self.requests.num_preemptions:
            self._admit_waiting(budget, plan, favoured=True)
        if others_pause and plan:
            self._num_paused += 1
            queues.favoured_step()
            return
        self._num_paused = 0
        budget = self._continue(self._part(running), budget, plan)
        if num_preemptions == self.requests.num_preemptions:  # otherwise there are too few blocks to admit a request
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
        """Admit waiting requests in queue order. `favoured`: only those of favoured tenants."""
        queues = self.queues
        while budget and queues.num_waiting and len(queues.running) < self.max_num_seqs:
            request = queues.first_waiting()
            if favoured and not queues.tenant_of(request).is_favoured:
                break
            if self._admission.drop_if_late(request):
                continue
            if self._whole_prompts and request.num_tokens > budget:
                if plan:
                    break
                budget = request.num_tokens  # the first prompt of a step has room, however short the step is to be
            new_request = self._admission.admit(request, budget)
            if new_request is None:
                self._load_ahead(request)
                break
            plan.new_requests.append(new_request)
            granted = self._grant(request, budget, plan)
            assert granted, "a new request has blocks for its first chunk"
            budget -= granted

    def _load_ahead(self, first: Request) -> None:
        """While the first waiting request waits for its blocks from host memory, load those of the next ones."""
        if first.load is None or first.load.is_done:
            return
        for request in self.queues.next_waiting(MAX_LOADS):
            self._admission.load(request)

    def _give_way(self) -> bool:
        """Preempt the last running request if the first waiting one needs its row or blocks and deserves them more."""
        queues = self.queues
        if not queues.should_give_way():
            return False
        if len(queues.running) < self.max_num_seqs and not self._admission.lacks_blocks(queues.first_waiting()):
            return False
        self.requests.preempt_last()
        return True

    def stats(self, num_deferred: int = 0) -> SchedulerStats:
        """`num_deferred`: requests that the scheduler has not received yet."""
        drafts = self._drafts.counts if self._drafts is not None else DraftCounts()
        return SchedulerStats(
            num_running=len(self.queues.running),
            num_waiting=self.queues.num_waiting,
            num_blocks=self.blocks.num_blocks,
            num_free_blocks=self.blocks.num_free_blocks,
            num_states=self.blocks.num_states,
            num_free_states=self.blocks.num_free_states,
            num_preemptions=self.requests.num_preemptions,
            prefix_queries=self._admission.prefix_queries,
            prefix_hits=self._admission.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._steps.generation_tokens,
            num_deferred=num_deferred,
            num_corrupted=self.requests.num_corrupted,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            accepted_at=tuple(drafts.accepted_at),
            **self._tier_stats(),
        )

    def _tier_stats(self) -> dict[str, int]:
        if (tier := self.blocks.tier) is None:
            return {}
        return {
            "external_queries": tier.queries,
            "external_hits": tier.hits,
            "num_host_blocks": tier.num_slots,
            "num_used_host_blocks": tier.num_used,
            "num_file_blocks": 0 if tier.saved is None else len(tier.saved),
            "num_damaged_blocks": tier.num_damaged,
        }

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
        is_chosen = wanted == 1 and request.request_id in plan.chosen  # it may have given way since, and start again
        num_drafts = self._add_drafts(request, end, budget - 1, plan) if is_chosen else 0
        end += num_drafts
        if plan.num_proposals:
            self._grow_ahead(request, end, plan)
        if end > request.num_slots:
            while (grown := self.blocks.grow(request, end)) is None:
                if self.requests.preempt_last() is request:
                    return 0
            plan.add_blocks(request, grown)
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
            request.num_tokens += 1 + num_drafts
        if request.is_rewound:
            assert start + 1 == len(request.token_ids), "drafts are read before their request goes on"
            plan.rewinds[request.request_id] = start, request.token_ids[-1]
            request.is_rewound = False
        granted += num_drafts
        if granted == 1:
            plan.decodes.append(request)
        else:
            plan.longer.append(request)
            plan.lengths.append(granted)
            plan.num_drafts.append(num_drafts)
        return granted

    def _add_drafts(self, request: Request, end: int, budget: int, plan: _Plan) -> int:
        """Schedule drafts of a request after its newest token, which ends at `end`, and return how many. They get no
        block that another request may need next.
        """
        assert self._drafts is not None
        drafts = plan.chosen[request.request_id]
        number = min(len(drafts), budget, request.max_num_tokens - request.num_tokens - 1)
        if end + number > request.num_slots:
            grown = self.blocks.grow(request, end + number, num_spare=len(self.queues.running))
            if grown is None:
                number = max(min(number, request.num_slots - end), 0)
            else:
                plan.add_blocks(request, grown)
        if number:
            plan.drafts[request.request_id] = drafts[:number]
            self._drafts.verify(request)
        return number

    def _grow_ahead(self, request: Request, end: int, plan: _Plan) -> None:
        """Give a request that computes the tokens before `end` blocks for what the drafter proposes after them, if many
        blocks are free.
        """
        ahead = min(end + 1 + plan.num_proposals, request.max_num_tokens)
        if ahead > request.num_slots and not any(new.request_id == request.request_id for new in plan.new_requests):
            grown = self.blocks.grow(request, ahead, num_spare=len(self.queues.running), step_end=end)
            if grown is not None:
                plan.add_blocks(request, grown)

    def check(self) -> None:
        """Assert all invariants of the queues and the blocks."""
        self.queues.check()
        running = self.queues.running
        self.blocks.check(running)
        assert len(running) <= self.max_num_seqs
        in_flight = self._steps.num_tokens()
        for request in [*running, *self.queues.waiting]:
            request.check(request in running, in_flight[request])
