"""Recovery from a failed step: finds the requests that caused it by running fewer requests at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from time import monotonic

import torch

from engine.core.batch import EngineOutput, StepOutputs
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import EngineError

_log = logging.getLogger(__name__)

MAX_UNEXPLAINED = 3  # most successive failed steps that no single request causes
QUIET_STEPS = 1000  # after as many steps without a failure, earlier failures no longer count
MIN_STEP_TOKENS = 256  # least token budget of a step when memory is short
_Group = dict[str, Request]


class Isolation:
    """The requests of a failed step, in groups that run one at a time, and the requests that wait meanwhile.

    A group passes when each of its requests has got a token or has finished; its requests then wait. A group that fails
    is halved. A request that fails alone is the cause, unless it was alone in the first failed step, too: it runs once
    more. When no group is left, all waiting requests continue together.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        """`requests`: all requests unfinished when the step failed, in queue order. They wait."""
        self.waiting: _Group = {request.request_id: request for request in requests}
        self._order = {request_id: index for index, request_id in enumerate(self.waiting)}
        self._groups: list[_Group] = []  # the last group runs next
        self._not_passed: set[str] = set()  # requests of the running group

    def __len__(self) -> int:
        """Return the number of requests that are not running."""
        return len(self.waiting) + sum(map(len, self._groups))

    def holds(self, request_id: str) -> bool:
        return request_id in self.waiting or any(request_id in group for group in self._groups)

    def hold(self, request: Request) -> None:
        """Let a new request wait."""
        self.waiting[request.request_id] = request

    def remove(self, request_id: str) -> bool:
        """Forget a request. Returns whether it was not running."""
        self._not_passed.discard(request_id)
        groups = [self.waiting, *self._groups]
        return any(group.pop(request_id, None) is not None for group in groups)

    def suspect(self, failed: Iterable[Request], others: Iterable[Request] = ()) -> Request | None:
        """Split the requests of a failed step into groups. `others`, the rest of the running group, are tried after
        them.

        Returns the request if it failed alone; it then neither waits nor is in any group.
        """
        suspects = list(failed)
        for request in suspects:
            self.waiting.pop(request.request_id, None)
        self._add_group(others)
        if len(suspects) == 1:
            return suspects[0]
        half = (len(suspects) + 1) // 2
        self._add_group(suspects[half:])
        self._add_group(suspects[:half])
        return None

    def try_again(self, request: Request) -> None:
        self._add_group([request])

    def _add_group(self, requests: Iterable[Request]) -> None:
        if group := {request.request_id: request for request in requests}:
            self._groups.append(group)

    def next_group(self) -> list[Request]:
        """Return the requests to run next, alone. Returns none if `all_waiting` may continue."""
        while self._groups:
            if group := self._groups.pop():
                self._not_passed = set(group)
                return list(group.values())
        return []

    def observe(self, request_ids: Iterable[str]) -> bool:
        """Record that these requests got a token or finished. Returns whether the whole running group did."""
        self._not_passed.difference_update(request_ids)
        return not self._not_passed

    def all_waiting(self) -> list[Request]:
        """Return the waiting requests in their original order, then the new ones."""
        return sorted(self.waiting.values(), key=lambda each: self._order.get(each.request_id, len(self._order)))


class Recovery:
    """Handles failed steps for one scheduler and its worker."""

    def __init__(self, scheduler: Scheduler, reset: Callable[[], None]) -> None:
        """`reset`: makes the worker forget all rows and steps. Raises if the device is unusable."""
        self._scheduler, self._reset = scheduler, reset
        self._isolation: Isolation | None = None
        self._step_tokens = scheduler.max_num_batched_tokens  # the token budget before the failure
        self._out_of_memory = False
        self._num_blamed = 0  # requests found to be the cause since the failure
        self._num_unexplained = 0
        self._num_quiet_steps = 0  # since the last failure

    def __len__(self) -> int:
        """Return the number of unfinished requests that the scheduler does not hold."""
        return len(self._isolation) if self._isolation is not None else 0

    @property
    def is_active(self) -> bool:
        return self._isolation is not None

    def holds(self, request_id: str) -> bool:
        return self._isolation is not None and self._isolation.holds(request_id)

    def queue(self, request: Request) -> None:
        """Queue a new request. Raises `ValueError` as `Scheduler.check_new` does."""
        if self._isolation is None:
            self._scheduler.add(request)
        else:
            self._scheduler.check_new(request)
            request.queued_time = monotonic()
            self._isolation.hold(request)

    def remove(self, request_id: str) -> bool:
        """Forget a request. Returns whether the scheduler did not hold it."""
        return self._isolation is not None and self._isolation.remove(request_id)

    def step_failed(self, error: Exception) -> list[EngineOutput]:
        """Run the requests of the lost steps again, fewer at a time. Returns the output of a request that failed alone.

        Raises if the device is unusable, or if steps fail repeatedly without a request that causes it.
        """
        _log.error("a step failed", exc_info=error)
        error = error.with_traceback(None)  # its frames hold the step's tensors
        suspects, others = self._drain()
        isolation, is_first = self._isolation, self._isolation is None
        self._num_quiet_steps = 0
        if isolation is None:
            _log.warning("running %d requests again, fewer at a time", len(suspects))
            isolation = self._isolation = Isolation(sorted(suspects + others, key=lambda each: each.order))
            self._step_tokens, self._num_blamed = self._scheduler.max_num_batched_tokens, 0
            self._out_of_memory, others = _is_out_of_memory(error), []
        outputs = []
        if (request := isolation.suspect(suspects, others)) is not None:
            if (_is_out_of_memory(error) and self._shrink()) or is_first:
                isolation.try_again(request)
            else:
                self._num_blamed += 1
                self._scheduler.max_num_batched_tokens = self._step_tokens
                outputs.append(failed_output(request.request_id, client_reason(error)))
        self._run_group(isolation)
        return outputs

    def observe(self, outputs: StepOutputs) -> bool:
        """Process the outputs of each step. Returns whether the step in flight was dropped to run other requests."""
        if self._num_unexplained:
            self._num_quiet_steps += 1
            if self._num_quiet_steps >= QUIET_STEPS:
                self._num_unexplained = 0
        if self._isolation is None:
            return False
        if not self._isolation.observe(each.request_id for each in outputs):
            return False
        for request in chain(*self._drain()):
            self._isolation.hold(request)
        self._run_group(self._isolation)
        return True

    def _drain(self) -> tuple[list[Request], list[Request]]:
        self._reset()
        return self._scheduler.drain()

    def _run_group(self, isolation: Isolation) -> None:
        """Run the next group, or all requests if no group is left."""
        group = isolation.next_group()
        if not group:
            group, self._isolation = isolation.all_waiting(), None
            self._explain()
        for request in group:
            self._scheduler.put_back(request)

    def _explain(self) -> None:
        """Raise an error if steps keep failing although each of their requests succeeds alone."""
        if self._num_blamed or (self._out_of_memory and self._shrink()):
            self._num_unexplained = 0
        else:
            self._num_unexplained += 1
        if self._num_unexplained > MAX_UNEXPLAINED:
            raise EngineError("steps keep failing, although none of their requests fails alone")

    def _shrink(self) -> bool:
        """Halve the token budget of all later steps. Returns False if it is small already."""
        scheduler = self._scheduler
        if scheduler.max_num_batched_tokens < 2 * max(MIN_STEP_TOKENS, scheduler.max_num_seqs):
            return False
        scheduler.max_num_batched_tokens //= 2
        _log.warning("out of memory: from now on a step has at most %d tokens", scheduler.max_num_batched_tokens)
        return True


def failed_output(request_id: str, reason: str, *, exc_info: bool = False) -> EngineOutput:
    """Return the final output of a failed request, and log the failure."""
    _log.error("request %s: %s", request_id, reason, exc_info=exc_info)
    return EngineOutput(request_id, [], "error", error=reason)


def refused_output(request_id: str, reason: str, details: str = "") -> EngineOutput:
    """Return the final output of a request that cannot be served.

    `details` may quote the request: the client gets them, but the log only at debug level.
    """
    _log.warning("request %s: %s", request_id, reason)
    if details:
        _log.debug("request %s: %s", request_id, details)
    return EngineOutput(request_id, [], "error", error=f"{reason}: {details}" if details else reason, is_refused=True)


def client_reason(error: Exception) -> str:
    """Return the message for the client. The log has the details."""
    if _is_out_of_memory(error):
        return "the request needs more memory than is available"
    return f"an internal error ({type(error).__name__}); see the server's log"


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
