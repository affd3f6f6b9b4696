"""Plans a step: which requests run, and how many tokens each computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from engine.core.admission_control import AdmissionControl
from engine.core.batch import NewRequest, ScheduledBatch
from engine.core.drafts.policy import DraftPolicy
from engine.core.encoder_cache import EncoderCache
from engine.core.fairness.step_budget import StepBudget
from engine.core.in_flight_steps import InFlightSteps
from engine.core.kv.common_prefix import CommonPrefixes
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.tiers import MAX_LOADS

PAUSED_STEPS = 16  # successive steps for favoured tenants only, before all tenants get one

MOST_RECENT = 8  # batches

Batched = tuple[list[Request], ScheduledBatch]
NOTHING: Batched = [], ScheduledBatch([], [], 0, 0, [])


@dataclass(slots=True)
class Plan:
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
    drafter_rests: bool = False  # see `SchedulerOutput`
    lacks_states: bool = False  # a running request waits for a state
    time: float = 0.0  # when it was made

    def __bool__(self) -> bool:
        return bool(self.decodes or self.longer)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(self.lengths)

    def add_blocks(self, request: Request, grown: list[list[int]]) -> None:
        """Note blocks that were appended to the request's tables."""
        earlier = self.new_block_ids.get(request.request_id, [[]] * len(grown))
        self.new_block_ids[request.request_id] = [a + b for a, b in zip(earlier, grown, strict=True)]

    def send(self, request: Request, start: int) -> None:
        """Let the worker learn of a request that computes its first tokens, from index `start` on."""
        self.new_block_ids.pop(request.request_id, None)
        self.new_requests.append(request.new_request(start))
        request.is_unsent = False

    def batch(self, recent: list[Batched], prefixes: CommonPrefixes | None) -> Batched:
        """Return the requests in batch order, and the batch: that of an earlier step in `recent` if it had the same.
        `prefixes`: None: it does not matter whether requests have one in common.
        """
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
        has_common_prefix = prefixes is not None and prefixes.among(self.decodes)
        batch = ScheduledBatch(
            request_ids, num_tokens, sum(num_tokens), num_decodes, partial, num_drafts, has_common_prefix
        )
        if len(recent) == MOST_RECENT:
            recent.pop()
        recent.insert(0, (requests, batch))
        return recent[0]


class StepLimits(NamedTuple):
    """Limits of every step."""

    max_num_seqs: int
    num_batches: int  # overlapping steps, one for each pipeline stage
    whole_prompts: bool  # a step computes a prompt whole or not at all


class StepPlanner:
    """Gives each request of a step its tokens and blocks.

    **Preemption.** When blocks run out, the last running request is preempted: it loses its blocks, waits again, and is
    recomputed later, mostly from the prefix cache. The first request in queue order therefore always makes progress,
    and every request finishes. A waiting request takes the row or the blocks of the last running one only if its own
    tenant has far fewer running requests (`should_give_way`). A better priority alone is no reason to preempt.

    **States.** At the start of a block, a request needs a second state for two steps. When none is free, but another
    running request is about to give one back, it is not in the step instead: requests that began together come apart.

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

    **Images.** A request computes tokens up to its first image that the step may not encode (`EncoderCache`).
    """

    def __init__(
        self,
        requests: RequestTable,
        admission: AdmissionControl,
        budget: StepBudget,
        steps: InFlightSteps,
        drafts: DraftPolicy | None,
        limits: StepLimits,
        encoder: EncoderCache,
        clock: Callable[[], float],
    ) -> None:
        self._requests, self._blocks, self._queues = requests, requests.blocks, requests.queues
        self._admission, self._budget, self._steps, self._limits = admission, budget, steps, limits
        self.drafts, self._encoder, self._clock = drafts, encoder, clock
        self.prompt_tokens = 0  # of all steps
        self._num_paused = 0  # successive steps for favoured tenants only

    def plan(self) -> Plan | None:
        """Plan the next step. Returns None if the steps in flight must be read before there is one."""
        queues, plan = self._queues, Plan()
        if self.drafts is not None and not self._choose_drafts(self.drafts, plan):
            return None
        num_first = queues.sort_running()
        while queues.is_shared and queues.num_waiting and self._give_way():
            num_first = queues.sort_running()
        if self.drafts is not None and self.drafts.has_drafter:
            plan.num_proposals = self.drafts.num_proposals(len(queues.running) + queues.num_waiting)
        plan.time = self._clock()
        budget = self._budget.num_tokens(plan.time, len(self._steps), queues.is_shared)
        self._encoder.start_step(budget)
        self._fill(plan, num_first, budget)
        if self.drafts is not None:
            if plan.new_requests:
                self.drafts.rest = 0
            if self.drafts.has_drafter and plan:
                plan.drafter_rests = self.drafts.drafter_rests(bool(plan.new_requests))
        return plan

    def _choose_drafts(self, drafts: DraftPolicy, plan: Plan) -> bool:
        """Choose the drafts of the next step. Returns False if the steps in flight must be read before there is one."""
        if drafts.rest:  # so no step in flight has drafts
            drafts.rest -= 1
            return True
        one_ahead = self._limits.num_batches == 1 and len(self._steps) > 0
        if one_ahead and self._steps.have_drafts:
            return False
        running = self._queues.running
        if not drafts.may_draft(len(running)):
            return True
        may_draft = [request for request in running if request.may_draft(one_ahead)]
        if not may_draft:  # a step gives each of them one token
            drafts.rest = max(min(each.drafts_from - len(each.token_ids) for each in running) - 1, 0)
            return True
        num_seqs = -(-len(running) // self._limits.num_batches)
        chunks = len(may_draft) < len(running) and any(
            request.num_computed_tokens + 1 < request.num_tokens for request in running
        )
        room = self._budget.max_num_tokens - len(running)
        chosen = drafts.choose(may_draft, num_seqs, room, beside_chunks=chunks)
        if chosen is None:
            return False
        plan.chosen = chosen
        for request in may_draft:
            if request.request_id in chosen:
                request.steady_until = 0
        return True

    def _fill(self, plan: Plan, num_first: int, budget: int) -> None:
        """Schedule the running requests, then admit waiting ones. The first `num_first` belong to favoured tenants."""
        queues, num_preemptions = self._queues, self._requests.num_preemptions
        running = iter(queues.running)  # preemption pops the tail, never an earlier request than the current one
        others_pause = queues.has_favoured and self._num_paused < PAUSED_STEPS
        budget = self._continue(self._part(islice(running, num_first)), budget, plan)
        if others_pause and num_preemptions == self._requests.num_preemptions and not plan.lacks_states:
            self._admit_waiting(budget, plan, favoured=True)
        if others_pause and plan:
            self._num_paused += 1
            queues.favoured_step()
            return
        self._num_paused = 0
        budget = self._continue(self._part(running), budget, plan)
        # Otherwise there are too few blocks to admit a request.
        if num_preemptions == self._requests.num_preemptions and not plan.lacks_states:
            self._admit_waiting(budget, plan)

    def _part(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Return the running requests for the next step: where steps overlap, a fraction without tokens in flight."""
        if self._limits.num_batches == 1:
            return requests
        known = (each for each in requests if each.num_tokens == len(each.token_ids))
        return islice(known, -(-len(self._queues.running) // self._limits.num_batches))

    def _continue(self, running: Iterable[Request], budget: int, plan: Plan) -> int:
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
                start = min(request.num_computed_tokens, num_tokens - 1)
                most = self._room(request, budget, plan, start)
                if not most:
                    continue
                granted = self._grant(request, most, plan)
                if not granted:
                    if request.block_tables:  # it waits for a state
                        continue
                    break
                if request.is_unsent:
                    plan.send(request, start)
                budget = max(budget - granted, 0)
        return budget

    def _admit_waiting(self, budget: int, plan: Plan, favoured: bool = False) -> None:
        """Admit waiting requests in queue order. `favoured`: only those of favoured tenants."""
        queues = self._queues
        while budget and queues.num_waiting and len(queues.running) < self._limits.max_num_seqs:
            request = queues.first_waiting()
            if favoured and not queues.tenant_of(request).is_favoured:
                break
            if self._admission.drop_if_late(request):
                continue
            if self._limits.whole_prompts and request.num_tokens > budget:
                if plan:
                    break
                budget = request.num_tokens  # the first prompt of a step has room, however short the step is to be
            new_request = self._admission.admit(request, partial(self._room, request, budget, plan))
            if new_request is None:
                self._load_ahead(request)
                break
            most = self._room(request, budget, plan, request.num_computed_tokens)
            if not most:
                assert plan, "the first image of a step always fits"
                request.is_unsent = True
                continue
            plan.new_requests.append(new_request)
            granted = self._grant(request, most, plan)
            assert granted, "a new request has blocks for its first chunk"
            budget = max(budget - granted, 0)

    def _load_ahead(self, first: Request) -> None:
        """While the first waiting request waits for its blocks from host memory, load those of the next ones."""
        if first.load is None or first.load.is_done:
            return
        for request in self._queues.next_waiting(MAX_LOADS):
            self._admission.load(request)

    def _give_way(self) -> bool:
        """Preempt the last running request if the first waiting one needs its row or blocks and deserves them more."""
        queues = self._queues
        if not queues.should_give_way():
            return False
        if len(queues.running) < self._limits.max_num_seqs and not self._admission.lacks_blocks(queues.first_waiting()):
            return False
        self._requests.preempt_last()
        return True

    def _grant(self, request: Request, budget: int, plan: Plan) -> int:
        """Schedule as many of the request's tokens as the budget allows, and return how many.

        Missing blocks are taken from the last running requests by preemption. Returns 0 if this request was one of
        them, or waits for a state.
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
            while (grown := self._blocks.grow(request, end)) is None:
                if self._awaits_return(request, end, plan):
                    plan.lacks_states = True
                    return 0
                if self._requests.preempt_last() is request:
                    return 0
            plan.add_blocks(request, grown)
        request.num_computed_tokens = end
        if request.engine_request.images:
            self._encoder.use(request, start, end)
        if self._queues.is_shared:
            self._queues.charge(request, end)
        if start < request.num_prompt_tokens:
            self.prompt_tokens += min(end, request.num_prompt_tokens) - start
        if request.next_commit <= min(end, len(request.token_ids)):
            self._blocks.commit(request)
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

    def _awaits_return(self, request: Request, end: int, plan: Plan) -> bool:
        """Return whether a request lacks states for the tokens before `end`, and another will soon give one back: steps
        go on until then.
        """
        if not (plan or self._steps) or not self._blocks.lacks_states(request, end):
            return False
        return any(each.next_return < sys.maxsize for each in self._queues.running)

    def _room(self, request: Request, budget: int, plan: Plan, start: int) -> int:
        """Return how many tokens from index `start` on a request may compute within the budgets of tokens and of the
        encoder: 0 if it must wait. No image is cut whose tokens see each other; the last chunk of a step may have a
        whole image, however short the step is to be.
        """
        budget = self._encoder.limit(request, start, budget)
        if not request.uncut or not budget:
            return budget
        whole = request.whole(start, min(request.num_tokens - start, budget))
        if whole:
            return whole
        count, room = request.end_of_image(start) - start, self._budget.max_num_tokens - plan.num_tokens
        return count if count <= room or not plan else 0

    def _add_drafts(self, request: Request, end: int, budget: int, plan: Plan) -> int:
        """Schedule drafts of a request after its newest token, which ends at `end`, and return how many. They get no
        block that another request may need next.
        """
        assert self.drafts is not None
        drafts = plan.chosen[request.request_id]
        number = min(len(drafts), budget, request.max_num_tokens - request.num_tokens - 1)
        if end + number > request.num_slots:
            grown = self._blocks.grow(request, end + number, num_spare=len(self._queues.running))
            if grown is None:
                number = max(min(number, request.num_slots - end), 0)
            else:
                plan.add_blocks(request, grown)
        if number:
            plan.drafts[request.request_id] = drafts[:number]
            self.drafts.verify(request)
        return number

    def _grow_ahead(self, request: Request, end: int, plan: Plan) -> None:
        """Give a request that computes the tokens before `end` blocks for what the drafter proposes after them, if many
        blocks are free.
        """
        ahead = min(end + 1 + plan.num_proposals, request.max_num_tokens)
        if ahead > request.num_slots and not any(new.request_id == request.request_id for new in plan.new_requests):
            grown = self._blocks.grow(request, ahead, num_spare=len(self._queues.running), step_end=end)
            if grown is not None:
                plan.add_blocks(request, grown)
