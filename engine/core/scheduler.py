"""Which requests run next, and with how many tokens: queues, budgets, preemption.

One rule: every request's computed tokens catch up with its tokens. Prefill, decode, chunks, prefix-cache hits and
resumption after preemption are all `granted = min(num_tokens - num_computed_tokens, budget)`.

`schedule()` for step n+1 runs before `update()` of step n. A token that a launched step samples counts in `num_tokens`
at once, so its request is scheduled on before the CPU knows it. When it turns out to be the last one, the request is
finished, and what step n+1 computed for it is dropped when read. Ends by length are known ahead and waste nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic

from engine.core.batch import (
    FAULTS,
    NOT_FINITE,
    EngineOutput,
    NewRequest,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerStats,
    StepOutputs,
    StepResult,
    TokenLogprobs,
)
from engine.core.block_manager import BlockManager
from engine.core.cache_groups import FULL, CacheGroup
from engine.core.deadlines import Deadlines
from engine.core.request import Request
from engine.core.request_queues import RequestQueues

FAVOUR_FRACTION = 2  # an owner that comes is favoured for this fraction of a step's budget, in tokens
OTHERS_FRACTION = 64  # and meanwhile others together get at least this one in each step
MIN_PACED = 64  # computed prompt tokens from which on a prompt tells how fast prompts are computed

_Batched = tuple[list[Request], ScheduledBatch]


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    decodes: list[Request] = field(default_factory=list)  # they compute one token each
    longer: list[Request] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of `longer`
    partial: list[Request] = field(default_factory=list)  # whose chunks were cut by the token budget
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)

    def batch(self, last: _Batched) -> _Batched:
        """The requests in the batch's order, and the batch: `last`, the step before's, when nothing changed."""
        num_decodes = len(self.decodes)
        requests = self.decodes + self.longer
        num_tokens = [1] * num_decodes + self.lengths
        partial = sorted(map(requests.index, self.partial))
        last_requests, last_batch = last
        if requests == last_requests and num_tokens == last_batch.num_tokens and partial == last_batch.partial:
            return last
        request_ids = [request.request_id for request in requests]
        return requests, ScheduledBatch(request_ids, num_tokens, sum(num_tokens), num_decodes, partial)


class Scheduler:
    """Which requests run, under a budget of tokens and of sequences in each step: first come, first served among the
    requests of one owner and priority, fair between owners (see `RequestQueues`).

    When blocks run out the last running request is preempted: it loses its blocks, waits again, and is recomputed later,
    mostly from the prefix cache. The first request in queue order therefore always progresses once it runs, and all
    requests finish. A request that waits for a row or for blocks takes those of the last running one if its owner has
    much less than that one's (`should_give_way`); otherwise no request is preempted for a waiting one, whatever its priority.

    While an owner is favoured, all others together compute as many tokens in a step as the favoured ones, or a small part
    of the budget if that is more: steps are short then. Those first in order go on, the others pause.

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
    ) -> None:
        assert min(max_num_seqs, max_num_batched_tokens, max_model_len) >= 1
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching, groups, max_num_batched_tokens)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.queues = RequestQueues(favour=max_num_batched_tokens // FAVOUR_FRACTION)
        self._deadlines = Deadlines()
        self._prefill_seconds = 0.0  # for each prompt token that is computed, lately; 0: not known
        self._late: list[EngineOutput] = []  # of requests that were not begun, since their deadlines could not be met
        self._refused: tuple[Request, int] | None = None  # lacked blocks, after so many releases of blocks
        self._in_flight: deque[tuple[int, list[Request]]] = deque()  # launched steps: number, the requests of its batch
        self._last: _Batched = [], ScheduledBatch([], [], 0, 0, [])  # of the last step
        self._removed: list[str] = []  # requests whose rows the worker is yet to be told to free
        self._step = self._num_preemptions = self._prefix_queries = self._prefix_hits = 0
        self._prompt_tokens = self._generation_tokens = 0
        self.num_corrupted = 0  # requests that ended because the model computed NaN or infinity

    def check_new(self, request: Request) -> None:
        """ValueError when its id is in use, or when it can never be run. Limits its length to what the model and cache hold."""
        num_prompt, longest = request.num_prompt_tokens, self.max_model_len - (request.pooling is None)
        if self.queues.find(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        if not 1 <= num_prompt <= longest:
            limits = f"from 1 to {longest} with max_model_len={self.max_model_len}"
            raise ValueError(f"the prompt has {num_prompt} tokens; it may have {limits}")
        max_num_tokens = min(request.max_num_tokens, longest + 1)
        if self.blocks.most_held(max_num_tokens - 1) > self.blocks.num_blocks:
            num_slots = self.blocks.longest(self.max_model_len)
            room = num_slots - num_prompt + 1
            fits = f"max_tokens={room}" if room > 0 else f"a prompt of {num_slots} tokens"
            raise ValueError(
                f"a prompt of {num_prompt} tokens with max_tokens={max_num_tokens - num_prompt} does not fit "
                f"the KV cache of {num_slots} tokens; {fits} would fit"
            )
        request.max_num_tokens = max_num_tokens

    def add(self, request: Request) -> None:
        """Queue a new request. ValueError as `check_new`."""
        self.check_new(request)
        request.queued_time = monotonic()
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that `drain` took out."""
        self.queues.add(request)
        self._deadlines.add(request)

    def drain(self) -> tuple[list[Request], list[Request]]:
        """Take out all requests, as if none had ever run: steps in flight are forgotten, and so is all cached KV, which they
        may have been meant to write. The worker must forget its rows.

        Returns the unfinished requests of the steps in flight, and the others, each in queue order.
        """
        in_flight = {request.request_id for _, requests in self._in_flight for request in requests}
        self._in_flight.clear()
        self._removed.clear()
        self._refused = None
        self._last = [], ScheduledBatch([], [], 0, 0, [])
        taken: tuple[list[Request], list[Request]] = [], []
        for request in sorted(self.queues, key=lambda each: each.order):
            if request.block_tables:
                self.blocks.release(request)
            self.queues.remove(request)
            request.num_tokens, request.num_computed_tokens, request.steady_until = len(request.token_ids), 0, 0
            taken[request.request_id not in in_flight].append(request)
        self.blocks.reset()
        return taken

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its tokens in flight are dropped. False when there is none."""
        request = self.queues.find(request_id)
        if request is None:
            return False
        request.finish_reason = "abort"
        self._forget(request)
        return True

    def expire(self) -> list[EngineOutput]:
        """End the requests whose deadlines have passed, whatever their state. Returns their final outputs, and those of the
        requests that `schedule` did not begin since they would have been too late. To be called when that step is launched.
        """
        outputs, self._late = self._late, []
        for request in self._deadlines.passed():
            if self.queues.find(request.request_id) is request:
                outputs.append(self._time_out(request))
        return outputs

    def _time_out(self, request: Request) -> EngineOutput:
        request.finish_reason = "timeout"
        self._forget(request)
        return request.output([])

    def has_work(self) -> bool:
        """Whether a request is unfinished, its end is not told or a launched step is not read back."""
        return bool(self.queues or self._in_flight or self._late)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, on the assumption that it is launched at once, before any other call.

        An empty output must not be launched: what it would have told the worker comes with a later one.
        """
        assert len(self._in_flight) <= 1, "at most one step may be in flight"
        queues, plan = self.queues, _Plan()
        num_first = queues.sort_running()
        if queues.is_shared and queues.num_waiting and self._give_way():
            num_first = queues.sort_running()
        num_preemptions = self._num_preemptions
        running = iter(queues.running)  # preemption pops the tail, at or after the request at hand
        budget = others = self.max_num_batched_tokens  # `others`: the part of it for those that are not favoured
        if queues.has_favoured:
            reserved = self.max_num_batched_tokens // OTHERS_FRACTION
            left = self._continue(islice(running, num_first), budget - reserved, plan) + reserved
            budget, others = left, min(left, max(budget - left, reserved, 1))
        left = self._continue(running, others, plan)
        budget, others = budget - (others - left), left
        new_requests: list[NewRequest] = []
        if num_preemptions == self._num_preemptions:  # else blocks are short, and no request is admitted
            new_requests = self._admit_waiting(budget, others, plan)

        self._last = plan.batch(self._last)
        requests, batch = self._last
        removed: list[str] = []
        if batch.request_ids:
            self._step += 1
            self._in_flight.append((self._step, requests))
            removed, self._removed = self._removed, removed
        return SchedulerOutput(self._step, new_requests, batch, plan.new_block_ids, removed)

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

    def _admit_waiting(self, budget: int, others: int, plan: _Plan) -> list[NewRequest]:
        """`others`: the part of the budget that those may have that are not favoured."""
        queues = self.queues
        new_requests: list[NewRequest] = []
        while queues.num_waiting and len(queues.running) < self.max_num_seqs:
            request = queues.first_waiting()
            if self._is_too_late(request):
                self._late.append(self._time_out(request))
                continue
            is_favoured = queues.owner_of(request).is_favoured
            most = budget if is_favoured else min(budget, others)
            new_request = self._admit(request) if most else None
            if new_request is None:
                break
            new_requests.append(new_request)
            granted = self._grant(request, most, plan)
            assert granted, "a new request has blocks for its first chunk"
            budget -= granted
            others -= 0 if is_favoured else granted
        return new_requests

    def _is_too_late(self, request: Request) -> bool:
        """Whether its first token would come after its deadline, at the pace of the prompts that were computed lately.

        That is a guess, which is trusted less the more often it is used.
        """
        deadline = request.engine_request.deadline
        if not deadline or request.num_preemptions:
            return False
        most = (deadline - monotonic()) / self._prefill_seconds if self._prefill_seconds else request.num_tokens
        if request.num_tokens <= most:
            return False
        num_cached = len(self.blocks.match_prefix(request)[0]) * self.blocks.block_size if request.reads_cache else 0
        if request.num_tokens - num_cached <= most:
            return False
        self._prefill_seconds /= 2
        return True

    def _learn_pace(self, request: Request) -> None:
        """Its first token has come."""
        num_computed = request.num_prompt_tokens - request.num_cached_tokens
        if num_computed >= MIN_PACED:
            seconds = (monotonic() - request.scheduled_time) / num_computed
            known = self._prefill_seconds or seconds
            self._prefill_seconds = known + (seconds - known) / 8

    def _give_way(self) -> bool:
        """Preempt the last running request when the first waiting one lacks a row or blocks and should have them."""
        queues = self.queues
        is_full = len(queues.running) == self.max_num_seqs or self._lacks_blocks(queues.first_waiting())
        if is_full and queues.should_give_way():
            self._preempt_last()
            return True
        return False

    def _lacks_blocks(self, request: Request) -> bool:
        """Whether the blocks did not suffice for it when it was last tried, and none was released since."""
        return self._refused == (request, self.blocks.pool.num_releases)

    def update(self, output: SchedulerOutput, result: StepResult) -> StepOutputs:
        """Learn what the oldest step in flight gave. Returns the outputs of its unfinished requests."""
        step, requests = self._in_flight.popleft()
        assert step == output.step, "steps are read in the order they were launched"
        request_ids, token_ids = output.batch.request_ids, result.token_ids
        outputs: list[EngineOutput] = []
        for index, scores in result.prompt_logprobs.items():
            requests[index].score(scores)
        apart: list[tuple[int, int, int]] = []  # indices outside the columns, the position and number of their tokens
        position = 0
        for index, (request, count) in enumerate(zip(requests, result.num_sampled, strict=True)):
            if count == 1:
                token_id, known = token_ids[position], request.token_ids
                if len(known) < request.steady_until and token_id not in request.stop_ids:
                    known.append(token_id)
                    position += 1
                    continue
            if count and request.finish_reason is None:
                found = self._learn(request, token_ids[position : position + count], result.logprobs.get(index))
                if found is None:
                    position += count
                    continue
                outputs.append(found)
            apart.append((index, position, count))
            position += count
        if apart:
            request_ids, token_ids = request_ids.copy(), token_ids.copy()
            for index, position, count in reversed(apart):
                del request_ids[index], token_ids[position : position + count]
        self._generation_tokens += len(request_ids) + sum(len(each.new_token_ids) for each in outputs)
        if result.embeddings:
            outputs += self._finish_pooled(requests, result.embeddings)
        return StepOutputs(request_ids, token_ids, outputs)

    def defer(self, indices: Iterable[int]) -> None:
        """The last launched step, the only one in flight, samples nothing for these indices: their masks are not ready.

        Their requests compute their newest token again in the next step.
        """
        ((_, requests),) = self._in_flight
        for index in indices:
            if requests[index].finish_reason is None:
                self._retract(requests[index], 1)

    def _retract(self, request: Request, num_tokens: int) -> None:
        """Its newest `num_tokens` tokens in flight will not come: undo what `_grant` assumed."""
        request.num_tokens -= num_tokens
        assert request.num_tokens >= len(request.token_ids), "a known token was retracted"
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        request.steady_until = 0

    def _learn(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineOutput | None:
        """Append its new tokens, up to its last one, with all that follows. None: one token, and nothing else to report."""
        num_known = len(request.token_ids)
        if num_known == request.num_prompt_tokens:
            self._learn_pace(request)
        new_token_ids = request.append(token_ids)
        num_tokens = len(request.token_ids)
        if request.finish_reason == "error":
            self._fail(request)
        elif num_tokens >= request.next_commit:
            self.blocks.commit(request)
        if request.finish_reason is not None:
            self._forget(request)
        elif not request.needs_full_output:
            request.steady_until = min(request.num_slots, request.max_num_tokens - 1, request.next_commit - 1)
            if num_tokens == num_known + 1 and num_known > request.num_prompt_tokens:
                return None
        return request.output(new_token_ids, logprobs)

    def _fail(self, request: Request) -> None:
        """It ends with an error. NaN may stand in its KV, where no other request may find it."""
        if request.error == FAULTS[NOT_FINITE]:
            self.num_corrupted += 1
            self.blocks.unpublish(request)

    def _finish_pooled(self, requests: list[Request], embeddings: dict[int, bytes]) -> list[EngineOutput]:
        outputs = []
        for index, embedding in embeddings.items():
            request = requests[index]
            if request.finish_reason is None:
                request.finish_reason = "stop"
                if not embedding:
                    request.finish_reason, request.error = "error", FAULTS[NOT_FINITE]
                    self._fail(request)
                self._forget(request)
                outputs.append(request.output([], embedding=embedding or None))
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, as after a change of weights. False, and no change, while a request is running."""
        return self.blocks.reset()

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
        long prompt does not preempt others chunk by chunk. It leaves a block of each group for each running request, so
        that these do not preempt it when they need their next one.
        """
        if self._lacks_blocks(request):
            return None
        if len(request.token_ids) < request.num_tokens:  # just preempted: a token of it is in flight
            return None
        cached = self.blocks.match_prefix(request) if request.reads_cache else ()
        num_spare = len(self.queues.running) * len(self.blocks.groups)
        if self.blocks.grow(request, request.num_tokens, cached, num_spare) is None:
            self._refused = request, self.blocks.pool.num_releases
            return None
        self.queues.start(request)
        request.num_computed_tokens = len(cached[0]) * self.blocks.block_size if cached else 0
        request.num_charged = max(request.num_charged, request.num_computed_tokens)
        if not request.scheduled_time:
            request.scheduled_time = monotonic()
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

    def _preempt_last(self) -> Request:
        request = self.queues.stop_last()
        self.blocks.release(request)
        request.num_computed_tokens = request.steady_until = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._removed.append(request.request_id)
        return request

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

    def _forget(self, request: Request) -> None:
        """Drop a finished request. Steps in flight may still compute it; `update` ignores what they give."""
        self.queues.remove(request)
        request.steady_until = 0
        if request.block_tables:
            self._removed.append(request.request_id)
            self.blocks.release(request)

    def check(self) -> None:
        """Assert every invariant of the queues and the blocks."""
        self.queues.check()
        running = self.queues.running
        self.blocks.check(running)
        assert len(running) <= self.max_num_seqs
        in_flight = [request for _, requests in self._in_flight for request in requests]
        for request in [*running, *self.queues.waiting]:
            request.check(request in running, in_flight.count(request))
