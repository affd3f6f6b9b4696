"""Decides which requests run in the next step, and how many tokens each computes: queues, budgets, preemption.

There is one rule: a request's computed tokens catch up with its tokens. Prefill, chunked prefill, decode, prefix-cache
hits and resumption after preemption are all `granted = min(num_tokens - num_computed_tokens, budget)`.

`schedule()` for step n+1 runs before `update()` of step n. `num_tokens` includes the token that a launched step will
sample, so the request is scheduled again before the CPU knows that token. If it turns out to be a stop token, the
request finishes, and `update()` discards the result of step n+1 for it. A request that ends by length wastes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from engine.core.admission_control import AdmissionControl
from engine.core.batch import (
    BlockMoves,
    EngineOutput,
    SchedulerOutput,
    SchedulerStats,
    StepOutputs,
    StepResult,
)
from engine.core.drafts.policy import DraftCounts, DraftPolicy
from engine.core.encoder_cache import EncoderCache
from engine.core.fairness.arrivals import Arrivals
from engine.core.fairness.deadlines import Deadlines
from engine.core.fairness.request_queues import RequestQueues
from engine.core.fairness.step_budget import StepBudget
from engine.core.in_flight_steps import InFlightSteps
from engine.core.kv.block_manager import BlockManager
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.kv.common_prefix import CommonPrefixes
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.step_planner import NOTHING, Batched, StepLimits, StepPlanner


class Scheduler:
    """Chooses the requests of each step within a budget of tokens and sequences.

    Its parts: `RequestTable` owns the unfinished requests and their blocks, `AdmissionControl` starts waiting ones,
    `StepBudget` limits the tokens of a step, `EncoderCache` the images that it encodes, `StepPlanner` decides who runs,
    and `InFlightSteps` applies the results.

    Requests belong to tenants: the API key, user or client address that sent them. Requests of one tenant and priority
    run first come, first served; between tenants, scheduling is fair (see `RequestQueues`).

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
        self.encoder = EncoderCache()
        self._admission = AdmissionControl(self.requests, clock)
        self._budget = StepBudget(max_num_batched_tokens, arrivals)
        self._steps = InFlightSteps(
            self.blocks, self._budget, deadlines.record_first_token, self.requests.finish, drafts
        )
        limits = StepLimits(max_num_seqs, num_batches, whole_prompts)
        self._planner = StepPlanner(
            self.requests, self._admission, self._budget, self._steps, drafts, limits, self.encoder, clock
        )
        self._clock, self._num_batches = clock, num_batches
        self._recent: list[Batched] = []  # batches of the last steps, newest first
        self._step = 0
        self.common_prefixes: CommonPrefixes | None = None  # of decodes that the worker would like to know of

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
        self.encoder.seconds += result.encoder_seconds
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
        self.encoder.clear()
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
        self.blocks.start_step()
        plan = self._planner.plan()
        if plan is None:
            return SchedulerOutput(self._step, [], NOTHING[1], {}, [])
        requests, batch = plan.batch(self._recent, self.common_prefixes)
        removed: list[str] = []
        encoder = None
        if batch.request_ids:
            encoder = self.encoder.take_step()
            self._step += 1
            self._steps.add(self._step, plan.time, requests, batch.num_drafts)
            removed, self.requests.removed = self.requests.removed, removed
        return SchedulerOutput(
            self._step, plan.new_requests, batch, plan.new_block_ids, removed, plan.drafts, plan.rewinds,
            plan.num_proposals, plan.drafter_rests, self._moves(), encoder,
        )  # fmt: skip

    def _moves(self) -> BlockMoves | None:
        return None if self.blocks.tier is None else self.blocks.tier.take_moves()

    def arrived(self, loads: Iterable[int]) -> None:
        """Record that these loads have arrived, see `BlockMoves`. Call it before `schedule`."""
        if self.blocks.tier is not None:
            self.blocks.tier.arrived(loads)

    def stats(self, num_deferred: int = 0) -> SchedulerStats:
        """`num_deferred`: requests that the scheduler has not received yet."""
        drafts = self._planner.drafts.counts if self._planner.drafts is not None else DraftCounts()
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
            prompt_tokens=self._planner.prompt_tokens,
            generation_tokens=self._steps.generation_tokens,
            num_deferred=num_deferred,
            num_corrupted=self.requests.num_corrupted,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            accepted_at=tuple(drafts.accepted_at),
            encoder_queries=self.encoder.queries,
            encoder_hits=self.encoder.hits,
            num_encoded=self.encoder.num_encoded,
            encoder_seconds=self.encoder.seconds,
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
            "num_file_blocks": tier.num_saved,
            "num_damaged_blocks": tier.num_damaged,
        }

    def check(self) -> None:
        """Assert all invariants of the queues and the blocks."""
        self.queues.check()
        running = self.queues.running
        self.blocks.check(running)
        self.encoder.check()
        assert len(running) <= self.max_num_seqs
        in_flight = self._steps.num_tokens()
        for request in [*running, *self.queues.waiting]:
            request.check(request in running, in_flight[request])
