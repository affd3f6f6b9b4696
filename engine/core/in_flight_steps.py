"""Steps in flight, and how their results update the scheduler's requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import repeat

from engine.core.batch import (
    FAULTS,
    NOT_FINITE,
    EngineOutput,
    SchedulerOutput,
    StepOutputs,
    StepResult,
    TokenLogprobs,
)
from engine.core.drafts.policy import DraftPolicy
from engine.core.fairness.step_budget import StepBudget
from engine.core.kv.block_manager import BlockManager
from engine.core.request import Request


class InFlightSteps:
    """Applies the results of steps, in the order in which the steps were launched. A result may finish requests."""

    def __init__(
        self,
        blocks: BlockManager,
        budget: StepBudget,
        begun: Callable[[Request], None],
        finish: Callable[[Request], None],
        drafts: DraftPolicy | None = None,
    ) -> None:
        """`budget`, `drafts`: get the times of steps. `begun`: called with each request that gets its first token.
        `finish`: called with each request that has a finish reason.
        """
        self._blocks, self._budget, self._begun, self._finish, self._drafts = blocks, budget, begun, finish, drafts
        # Step number, launch time, the requests of the batch, and their numbers of drafts; (): none has any.
        self._steps: deque[tuple[int, float, list[Request], tuple[int, ...]]] = deque()
        self.generation_tokens = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, launched_time: float, requests: list[Request], num_drafts: tuple[int, ...] = ()) -> None:
        """Append a step that is launched at `launched_time`, in monotonic seconds. `num_drafts`: of each request."""
        self._steps.append((step, launched_time, requests, num_drafts))

    @property
    def have_drafts(self) -> bool:
        """Return whether a step in flight has drafts."""
        return any(num_drafts for *_, num_drafts in self._steps)

    def num_tokens(self) -> Counter[Request]:
        """Return for each request of the steps the most tokens that it may get from them."""
        found: Counter[Request] = Counter()
        for _, _, requests, num_drafts in self._steps:
            for request, number in zip(requests, num_drafts or repeat(0, len(requests)), strict=True):
                found[request] += 1 + number
        return found

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def update(self, output: SchedulerOutput, result: StepResult, now: float) -> StepOutputs:
        """Apply the result of the oldest step, read `now`. Returns the outputs of its unfinished requests."""
        step, launched_time, requests, num_drafts = self._steps.popleft()
        assert step == output.step, "steps are read in the order they were launched"
        num_tokens = output.batch.total_num_tokens
        if output.encoder is not None:
            num_tokens += output.encoder.num_tokens
        self._budget.record(num_tokens, launched_time, now, requests)
        if self._drafts is not None:
            if num_drafts:
                self._settle(requests, num_drafts, result.num_sampled)
            self._drafts.record(output.batch, now, output.num_proposals > 0)
        request_ids, token_ids = output.batch.request_ids, result.token_ids
        outputs: list[EngineOutput] = []
        for index, scores in result.prompt_logprobs.items():
            if scores.logprobs:
                requests[index].score(scores)
            elif requests[index].finish_reason is None:
                outputs.append(self._finish_corrupted(requests[index]))
        # Requests that are not reported in the columns: index, and position and number of their tokens.
        apart: list[tuple[int, int, int]] = []
        position, counts = 0, result.num_sampled
        has_runs = False  # a request in the columns got more than one token
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if count == 1:
                token_id, known = token_ids[position], request.token_ids
                if len(known) < request.steady_until and token_id not in request.stop_ids:
                    known.append(token_id)
                    position += 1
                    continue
            if count and request.finish_reason is None:
                found = self._append(request, token_ids[position : position + count], result.logprobs.get(index))
                if found is None:
                    position += count
                    has_runs |= count > 1
                    continue
                outputs.append(found)
            apart.append((index, position, count))
            position += count
        if apart:
            request_ids, token_ids, counts = request_ids.copy(), token_ids.copy(), counts.copy()
            for index, position, count in reversed(apart):
                del request_ids[index], token_ids[position : position + count], counts[index]
        for index, proposed in result.proposals.items():
            if self._drafts is not None and requests[index].finish_reason is None:
                self._drafts.offer(requests[index], proposed)
        self.generation_tokens += len(token_ids) + sum(len(each.new_token_ids) for each in outputs)
        if result.embeddings:
            outputs += self._finish_pooled(requests, result.embeddings)
        return StepOutputs(request_ids, token_ids, outputs, counts if has_runs else [])

    def defer(self, indices: Iterable[int]) -> None:
        """Withdraw the sampling of these indices of the last launched step: their grammar masks are not ready.

        Their requests compute their newest token again in the next step.
        """
        *_, requests, num_drafts = self._steps[-1]
        for index in indices:
            request, number = requests[index], num_drafts[index] if num_drafts else 0
            if request.finish_reason is None:
                self._retract(request, num_tokens=1 + number, num_computed=number)
                request.is_rewound |= number > 0

    def _settle(self, requests: list[Request], num_drafts: tuple[int, ...], counts: list[int]) -> None:
        """Withdraw rejected drafts. `num_drafts`: of each request, which got `counts` tokens.

        A request without a token was deferred, which has withdrawn its drafts.
        """
        assert self._drafts is not None
        for request, number, count in zip(requests, num_drafts, counts, strict=True):
            if number and count and request.finish_reason is None:
                num_rejected = number + 1 - count
                self._retract(request, num_rejected, num_rejected)
                request.is_rewound = True
                self._drafts.verified(request, number, count - 1)

    def _retract(self, request: Request, num_tokens: int, num_computed: int) -> None:
        """Withdraw the newest `num_tokens` tokens in flight and the newest `num_computed` computed ones: undo what
        `Scheduler._grant` assumed.
        """
        request.num_tokens -= num_tokens
        assert request.num_tokens >= len(request.token_ids), "a known token was retracted"
        remaining = max(request.num_computed_tokens - num_computed, 0)  # a preempted request has none
        request.num_computed_tokens = min(remaining, request.num_tokens)
        request.steady_until = 0

    def _append(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineOutput | None:
        """Append new tokens up to the request's last one, and finish the request if it ends. Returns None if there is
        nothing to report but the tokens.
        """
        num_known, end = len(request.token_ids), len(request.token_ids) + len(token_ids)
        if len(token_ids) > 1 and end <= request.steady_until and request.stop_ids.isdisjoint(token_ids):
            request.token_ids += token_ids
            return None
        if num_known == request.num_prompt_tokens:
            self._begun(request)
        new_token_ids = request.append(token_ids)
        num_tokens = len(request.token_ids)
        if request.finish_reason != "error" and num_tokens >= request.next_commit:
            self._blocks.commit(request)
        if num_tokens >= request.next_return and request.finish_reason is None:
            self._blocks.give_back_passed(request)
        if request.finish_reason is not None:
            self._finish(request)
            if self._drafts is not None:
                self._drafts.finish(request)
        elif not request.needs_full_output:
            if not request.is_rewound:  # the next step must say so
                events = request.next_commit - 1, request.next_return - 1
                request.steady_until = min(request.num_slots, request.max_num_tokens - 1, *events)
            if num_known > request.num_prompt_tokens:
                return None
        return request.output(new_token_ids, logprobs)

    def _finish_pooled(self, requests: list[Request], embeddings: dict[int, bytes]) -> list[EngineOutput]:
        outputs = []
        for index, embedding in embeddings.items():
            request = requests[index]
            if request.finish_reason is None:
                if not embedding:
                    outputs.append(self._finish_corrupted(request))
                    continue
                request.finish_reason = "stop"
                self._finish(request)
                outputs.append(request.output([], embedding=embedding))
        return outputs

    def _finish_corrupted(self, request: Request) -> EngineOutput:
        """Fail a request because the model computed NaN or infinity for its prompt."""
        request.finish_reason, request.error = "error", FAULTS[NOT_FINITE]
        self._finish(request)
        return request.output([])
