"""Which requests run next, and with how many tokens: queues, budgets, preemption.

One rule: every request's computed tokens catch up with its tokens. Prefill, decode, chunks, prefix-cache hits and
resumption after preemption are all `granted = min(num_tokens - num_computed_tokens, budget)`.

`schedule()` for step n+1 runs before `update()` of step n. A token that a launched step samples counts in `num_tokens`
at once, so its request is scheduled on before the CPU knows it. When it turns out to be the last one, the request is
finished, and what step n+1 computed for it is dropped when read. Ends by length are known ahead and waste nothing.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from engine.core.batch import (
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
from engine.core.request import Request


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    decodes: list[Request] = field(default_factory=list)  # they compute one token each
    longer: list[Request] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of `longer`
    partial: Request | None = None  # the request whose chunk was cut by the token budget
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)


class Scheduler:
    """First come, first served among requests of one priority, under a budget of tokens and of sequences in each step.

    `running` holds the requests that have a device row and blocks, `waiting` all others; both in queue order: by priority,
    then the oldest first. Of one priority, every running request is older than every waiting one. When blocks run out
    the last running request is preempted: it loses its blocks, returns to `waiting`, and is recomputed later, mostly
    from the prefix cache. The first request in queue order therefore always progresses once it runs, and all requests
    finish. No request is preempted for a waiting one, whatever its priority.

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
        self.running: list[Request] = []
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self._requests: dict[str, Request] = {}  # running and waiting, by id
        self._in_flight: deque[tuple[int, list[Request]]] = deque()  # launched steps: number, the requests of its batch
        self._last: tuple[list[Request], ScheduledBatch] = [], ScheduledBatch([], [], 0, 0, [])  # of the last step
        self._removed: list[str] = []  # requests whose rows the worker is yet to be told to free
        self._step = self._arrivals = 0
        self._num_preemptions = self._prefix_queries = self._prefix_hits = 0
        self._prompt_tokens = self._generation_tokens = 0

    @property
    def num_cache_tokens(self) -> int:
        """How many tokens the KV cache holds, in sequences of `max_model_len`."""
        num_tokens = -(-self.max_model_len // self.blocks.block_size) * self.blocks.block_size
        return self.blocks.num_blocks * num_tokens // self.blocks.most_held(num_tokens)

    def check_new(self, request: Request) -> None:
        """ValueError when its id is in use, or when it can never be run. Sets how long it may get."""
        num_prompt, longest = request.num_prompt_tokens, self.max_model_len - (request.pooling is None)
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        if not 1 <= num_prompt <= longest:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; "
                f"it may have from 1 to {longest} with max_model_len={self.max_model_len}"
            )
        max_num_tokens = min(request.max_num_tokens, longest + 1)
        if self.blocks.most_held(max_num_tokens - 1) > self.blocks.num_blocks:
            num_slots = self.blocks.longest(self.max_model_len)
            room = num_slots - num_prompt + 1
            raise ValueError(
                f"a prompt of {num_prompt} tokens with max_tokens={max_num_tokens - num_prompt} does not fit "
                f"the KV cache of {num_slots} tokens; "
                + (f"max_tokens={room} would fit" if room > 0 else f"a prompt of {num_slots} tokens would fit")
            )
        request.max_num_tokens = max_num_tokens

    def add(self, request: Request) -> None:
        """Queue a new request. ValueError as `check_new`."""
        self.check_new(request)
        request.queued_time = monotonic()
        self._arrivals += 1
        request.order = (request.engine_request.priority, self._arrivals)
        last = next(reversed(self.waiting.values()), request)
        self._requests[request.request_id] = self.waiting[request.request_id] = request
        if request.order < last.order:
            self._sort_waiting()

    def _sort_waiting(self) -> None:
        self.waiting = OrderedDict(sorted(self.waiting.items(), key=lambda item: item[1].order))

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever its state; its tokens in flight are dropped. False when there is none."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.finish_reason = "abort"
        self._forget(request)
        return True

    def has_work(self) -> bool:
        """Whether a request is unfinished or a launched step is not read back."""
        return bool(self._requests or self._in_flight)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, on the assumption that it is launched at once, before any other call.

        An empty output must not be launched: what it would have told the worker comes with a later one.
        """
        assert len(self._in_flight) <= 1, "at most one step may be in flight"
        budget = self.max_num_batched_tokens
        plan = _Plan()
        decodes = plan.decodes
        new_requests: list[NewRequest] = []
        num_preemptions = self._num_preemptions

        for request in self.running:  # preemption pops its tail, at or after the request at hand
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

        if num_preemptions == self._num_preemptions:  # else blocks are short, and no request is admitted
            while self.waiting and budget and len(self.running) < self.max_num_seqs:
                request = next(iter(self.waiting.values()))
                new_request = self._admit(request)
                if new_request is None:
                    break
                new_requests.append(new_request)
                granted = self._grant(request, budget, plan)
                assert granted, "a new request has blocks for its first chunk"
                budget -= granted

        batch = self._batch(plan)
        removed: list[str] = []
        if batch.request_ids:
            self._step += 1
            self._in_flight.append((self._step, self._last[0]))
            removed, self._removed = self._removed, removed
        return SchedulerOutput(self._step, new_requests, batch, plan.new_block_ids, removed)

    def update(self, output: SchedulerOutput, result: StepResult) -> StepOutputs:
        """Learn what the oldest step in flight gave. Returns the outputs of its unfinished requests."""
        step, requests = self._in_flight.popleft()
        assert step == output.step, "steps are read in the order they were launched"
        request_ids, token_ids = output.batch.request_ids, result.token_ids
        outputs: list[EngineOutput] = []
        for index, scores in result.prompt_logprobs.items():
            requests[index].score(scores)
        apart: list[tuple[int, int, int]] = []  # outside the columns: index, position of its tokens, their number
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
        for token_id in token_ids:
            request.append(token_id)
            if request.finish_reason is not None:
                break
        num_tokens = len(request.token_ids)
        if num_tokens >= request.next_commit:
            self.blocks.commit(request)
        is_first = num_known == request.num_prompt_tokens
        if request.finish_reason is not None:
            self._forget(request)
        elif not request.needs_full_output:
            request.steady_until = min(request.num_slots, request.max_num_tokens - 1, request.next_commit - 1)
            if not is_first and num_tokens == num_known + 1:
                return None
        return EngineOutput(
            request.request_id,
            request.token_ids[num_known:],
            request.finish_reason,
            request.stop_reason,
            None if logprobs is None else logprobs[: num_tokens - num_known],
            request.num_cached_tokens,
            request.num_preemptions,
            request.queued_time,
            request.scheduled_time,
            request.prompt_logprobs if is_first else None,
        )

    def _finish_pooled(self, requests: list[Request], embeddings: dict[int, bytes]) -> list[EngineOutput]:
        outputs = []
        for index, embedding in embeddings.items():
            request = requests[index]
            if request.finish_reason is None:
                request.finish_reason = "stop"
                self._forget(request)
                outputs.append(
                    EngineOutput(
                        request.request_id,
                        [],
                        request.finish_reason,
                        num_cached_tokens=request.num_cached_tokens,
                        num_preemptions=request.num_preemptions,
                        queued_time=request.queued_time,
                        scheduled_time=request.scheduled_time,
                        embedding=embedding,
                    )
                )
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, as after a change of weights. False, and no change, while a request is running."""
        return self.blocks.reset()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=self.blocks.num_blocks,
            num_free_blocks=self.blocks.num_free_blocks,
            num_preemptions=self._num_preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    def _admit(self, request: Request) -> NewRequest | None:
        """Move the head of `waiting` to `running`, or None when the blocks do not suffice.

        It gets blocks for all its tokens at once (in a window group, for what its window and a chunk take), so that a
        long prompt does not preempt others chunk by chunk. It leaves a block of each group for each running request, so
        that these do not preempt it when they need their next one.
        """
        assert len(request.token_ids) == request.num_tokens, "a waiting request has no token in flight"
        cached = self.blocks.match_prefix(request) if request.reads_cache else ()
        num_spare = len(self.running) * len(self.blocks.groups)
        if self.blocks.grow(request, request.num_tokens, cached, num_spare) is None:
            return None
        del self.waiting[request.request_id]
        last = self.running[-1] if self.running else request
        self.running.append(request)
        if request.order < last.order:
            self.running.sort(key=lambda each: each.order)
        request.num_computed_tokens = len(cached[0]) * self.blocks.block_size if cached else 0
        if not request.scheduled_time:
            request.scheduled_time = monotonic()
            request.num_cached_tokens = request.num_computed_tokens
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
        request = self.running.pop()
        self.blocks.release(request)
        request.num_computed_tokens = request.steady_until = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._removed.append(request.request_id)
        first = next(iter(self.waiting.values()), request)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        if first.order < request.order:
            self._sort_waiting()
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
        if start < request.num_prompt_tokens:
            self._prompt_tokens += min(end, request.num_prompt_tokens) - start
        if request.next_commit <= min(end, len(request.token_ids)):
            self.blocks.commit(request)
        if granted < wanted:
            plan.partial = request
        else:
            request.num_tokens += 1
        if granted == 1:
            plan.decodes.append(request)
        else:
            plan.longer.append(request)
            plan.lengths.append(granted)
        return granted

    def _batch(self, plan: _Plan) -> ScheduledBatch:
        """The plan as a batch: the last step's object when nothing changed."""
        num_decodes = len(plan.decodes)
        requests = plan.decodes + plan.longer
        num_tokens = [1] * num_decodes + plan.lengths
        partial = [] if plan.partial is None else [requests.index(plan.partial)]
        last_requests, last = self._last
        if requests != last_requests or num_tokens != last.num_tokens or partial != last.partial:
            request_ids = [request.request_id for request in requests]
            self._last = requests, ScheduledBatch(request_ids, num_tokens, sum(num_tokens), num_decodes, partial)
        return self._last[1]

    def _forget(self, request: Request) -> None:
        """Drop a finished request. Steps in flight may still compute it; `update` ignores what they give."""
        del self._requests[request.request_id]
        request.steady_until = 0
        if request.block_tables:
            self.running.remove(request)
            self._removed.append(request.request_id)
            self.blocks.release(request)
        else:
            del self.waiting[request.request_id]

    def check(self) -> None:
        """Assert every invariant of the queues and the blocks."""
        self.blocks.check(self.running)
        queue = [*self.running, *self.waiting.values()]
        assert {request.request_id: request for request in queue} == self._requests
        assert len(queue) == len(self._requests), "a request is both running and waiting"
        assert len(self.running) <= self.max_num_seqs
        for line in (self.running, self.waiting.values()):
            assert [r.order for r in line] == sorted(r.order for r in line), "a queue is out of order"
        for priority in {r.engine_request.priority for r in queue}:
            turns = [r.order for r in queue if r.engine_request.priority == priority]
            assert turns == sorted(turns), "a request overtook an older one"
        in_flight = [request for _, requests in self._in_flight for request in requests]
        for request in queue:
            num_known = len(request.token_ids)
            assert request.finish_reason is None
            if request in self.running:
                assert request.block_tables
            else:
                assert not request.block_tables
                assert request.num_computed_tokens == request.num_slots == 0, "a waiting request has no KV"
                assert request.next_commit == sys.maxsize
            assert num_known < request.max_num_tokens >= request.num_tokens
            assert 0 <= request.num_tokens - num_known <= in_flight.count(request)
            assert request.num_computed_tokens <= request.num_tokens
            if request.num_computed_tokens == request.num_tokens:
                assert request in self.running, "only a request that was deferred has nothing left to compute"
                assert num_known == request.num_tokens
            if request.steady_until:
                assert request.block_tables
                assert request.num_computed_tokens == request.num_tokens - 1, "a steady request lacks more than a token"
                assert request.steady_until <= request.num_slots
                assert request.steady_until < min(request.max_num_tokens, request.next_commit)
