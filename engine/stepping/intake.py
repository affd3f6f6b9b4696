"""The way of requests to the scheduler."""

from __future__ import annotations

from engine.core.batch import EngineOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.stepping.adapted import AdaptedRequests
from engine.stepping.guided import GuidedRequests
from engine.stepping.recovery import Recovery


class Intake:
    """Holds the requests that the scheduler does not have yet: a request waits for its adapter, then for its grammar,
    then while a failed step is examined.
    """

    def __init__(
        self, adapted: AdaptedRequests, guided: GuidedRequests, recovery: Recovery, scheduler: Scheduler
    ) -> None:
        self._adapted, self._guided, self._recovery, self._scheduler = adapted, guided, recovery, scheduler

    def add(self, request: Request) -> None:
        """Queue a request. Raises `ValueError` if its id is in use or it can never run."""
        request_id = request.request_id
        if any(part.holds(request_id) for part in (self._adapted, self._guided, self._recovery)):
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        if request.engine_request.adapter is None:
            self._guided.queue(request)
        else:
            self._scheduler.check_new(request)
            self._adapted.add(request)

    def abort(self, request_id: str) -> bool:
        """Abort a request without further output. Returns False if there is none with this id."""
        was_held = self._adapted.remove(request_id)
        return self._guided.abort(request_id) or was_held

    @property
    def num_held(self) -> int:
        """Requests that wait for their adapter or their grammar."""
        return self._adapted.num_held + self._guided.num_held

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that the scheduler does not have."""
        return self.num_held + len(self._recovery)

    def has_work(self) -> bool:
        """Return whether a step has something to do, be it to forget the steps of aborted requests."""
        return self.num_held > 0 or self._scheduler.has_work() or self._recovery.is_active

    def is_empty(self) -> bool:
        """Return whether all requests have ended."""
        return not (self.num_held or self._scheduler.queues or self._recovery.is_active)

    def queue_ready(self) -> list[EngineOutput]:
        """Queue held requests that wait no more. Returns the outputs of those that cannot run."""
        failed = self._adapted.queue_ready(idle=not self._scheduler.has_work() and not self._guided.num_held)
        return failed + self._guided.queue_compiled()
