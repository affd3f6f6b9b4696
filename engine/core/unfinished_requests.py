"""The scheduler's unfinished requests: their queues, their blocks, and how they finish."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.batch import FAULTS, NOT_FINITE, EngineOutput
from engine.core.fairness.arrivals import Visits
from engine.core.fairness.deadlines import Deadlines
from engine.core.fairness.request_queues import RequestQueues
from engine.core.kv.block_manager import BlockManager
from engine.core.request import Request


class UnfinishedRequests:
    """The requests of a scheduler. `add` queues them; aborts and deadlines finish them here."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: monotonic seconds, like deadlines."""
        assert min(max_num_seqs, max_num_batched_tokens, max_model_len) >= 1
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._visits = Visits(clock)
        self.queues = RequestQueues(max_num_batched_tokens // 2, self._visits)
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._late: list[EngineOutput] = []  # for requests dropped because they would miss their deadlines
        self._removed: list[str] = []  # ids of requests whose rows the worker has not been told to free
        self._num_preemptions = 0
        self.num_corrupted = 0  # requests that ended because the model computed NaN or infinity

    def check_new(self, request: Request) -> None:
        """Limit a request's length to model and cache. `ValueError` if its id is in use or it can never run."""
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
        """Queue a new request. Raises `ValueError` like `check_new`."""
        self.check_new(request)
        request.queued_time = self._clock()
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that `drain` removed."""
        self.queues.add(request)
        self._deadlines.add(request)

    def abort(self, request_id: str) -> bool:
        """Abort a request in any state and drop its tokens in flight. Returns False if there is no such request."""
        request = self.queues.find(request_id)
        if request is None:
            return False
        request.finish_reason = "abort"
        self._forget(request)
        return True

    def expire(self) -> list[EngineOutput]:
        """Finish the requests whose deadlines have passed. Returns their final outputs, and those of requests that
        `schedule` did not start because they would miss their deadlines. Call it after launching that step.
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

    def _fail(self, request: Request) -> None:
        """Handle a request that fails. Its KV may hold NaN, so no other request may find its blocks."""
        if request.error == FAULTS[NOT_FINITE]:
            self.num_corrupted += 1
            self.blocks.unpublish(request)

    def _preempt_last(self) -> Request:
        request = self.queues.stop_last()
        self.blocks.release(request)
        request.num_computed_tokens = request.steady_until = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._removed.append(request.request_id)
        return request

    def _forget(self, request: Request) -> None:
        """Drop a finished request. Steps in flight may still compute it; `update` ignores their results."""
        self.queues.remove(request)
        request.steady_until = 0
        if request.block_tables:
            self._removed.append(request.request_id)
            self.blocks.release(request)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, as after a change of weights. Returns False, unchanged, while a request runs."""
        return self.blocks.reset()
