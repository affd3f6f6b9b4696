"""The scheduler's unfinished requests: their queues, their blocks, and how they finish."""

from __future__ import annotations

from collections.abc import Callable, Container

from engine.core.batch import FAULTS, NOT_FINITE, EngineOutput
from engine.core.fairness.deadlines import Deadlines
from engine.core.fairness.request_queues import RequestQueues
from engine.core.kv.block_manager import BlockManager
from engine.core.request import Request


class RequestTable:
    """Owns the unfinished requests, in `queues`, and the blocks of those that run.

    `removed` lists the ids of requests that lost their device rows. `Scheduler.schedule` passes them on to the worker.
    """

    def __init__(
        self,
        blocks: BlockManager,
        queues: RequestQueues,
        deadlines: Deadlines,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: monotonic seconds, as deadlines are."""
        self.blocks, self.queues, self.deadlines = blocks, queues, deadlines
        self.removed: list[str] = []
        self.num_preemptions = 0
        self.num_corrupted = 0  # requests that ended because the model computed NaN or infinity
        self._max_model_len, self._clock = max_model_len, clock

    def check_new(self, request: Request) -> None:
        """Limit a request's length to model and cache. `ValueError` if its id is in use or it can never run."""
        num_prompt, longest = request.num_prompt_tokens, self._max_model_len - (request.pooling is None)
        if self.queues.find(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        if not 1 <= num_prompt <= longest:
            limits = f"from 1 to {longest} with max_model_len={self._max_model_len}"
            raise ValueError(f"the prompt has {num_prompt} tokens; it may have {limits}")
        max_num_tokens = min(request.max_num_tokens, longest + 1)
        if not self.blocks.can_hold(max_num_tokens - 1):
            num_slots = self.blocks.longest(self._max_model_len)
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
        self.queues.add(request)

    def abort(self, request_id: str) -> bool:
        """Abort a request in any state and drop its tokens in flight. Returns False if there is no such request."""
        request = self.queues.find(request_id)
        if request is None:
            return False
        request.finish_reason = "abort"
        self.finish(request)
        return True

    def time_out(self, request: Request) -> EngineOutput:
        """Finish a request that would miss its deadline. Returns its final output."""
        request.finish_reason = "timeout"
        self.finish(request)
        return request.output([])

    def finish(self, request: Request) -> None:
        """Drop a request that has its `finish_reason`. Steps in flight may still compute it: their results for it are
        ignored.

        If the model computed NaN for it, no other request may find the KV that it computed.
        """
        if request.error == FAULTS[NOT_FINITE]:
            self.num_corrupted += 1
            self.blocks.unpublish(request)
        self.queues.remove(request)
        request.steady_until = 0
        if request.block_tables:
            if not request.is_unsent:
                self.removed.append(request.request_id)
            self.blocks.release(request)

    def preempt_last(self) -> Request:
        """Take row and blocks from the last running request, which waits again. Returns it."""
        request = self.queues.stop_last()
        self.blocks.release(request)
        request.num_computed_tokens = request.steady_until = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        if not request.is_unsent:
            self.removed.append(request.request_id)
        return request

    def drain(self, in_flight: Container[str]) -> tuple[list[Request], list[Request]]:
        """Remove all requests, reset them as if none had run, and empty the prefix cache.

        Returns the requests whose ids are `in_flight`, and all others, each in queue order.
        """
        self.removed.clear()
        taken: tuple[list[Request], list[Request]] = [], []
        for request in sorted(self.queues, key=lambda each: each.order):
            if request.block_tables:
                self.blocks.release(request)
            self.queues.remove(request)
            request.num_tokens, request.num_computed_tokens, request.steady_until = len(request.token_ids), 0, 0
            request.load = None
            taken[request.request_id not in in_flight].append(request)
        if self.blocks.tier is not None:
            self.blocks.tier.clear()
        self.blocks.reset()
        return taken
