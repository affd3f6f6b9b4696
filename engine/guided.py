"""Guided requests, whose outputs follow a grammar: their part of the engine's step."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.batch import EngineOutput, ScheduledBatch
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.recovery import Recovery, client_reason, failed_output, refused_output
from engine.structured.grammar import Compiler
from engine.structured.grammar_manager import GrammarManager
from engine.worker.interface import Handle


class GuidedRequests:
    """The guided requests of an engine: held until their grammar is compiled, sampled by its masks, followed by it."""

    def __init__(self, compiler: Compiler, scheduler: Scheduler, recovery: Recovery) -> None:
        self.grammars = GrammarManager[Request](compiler)
        self._scheduler, self._recovery = scheduler, recovery

    @property
    def num_held(self) -> int:
        """Requests whose grammars are not compiled yet."""
        return self.grammars.num_held

    def add(self, request: Request) -> None:
        """Hold a request until its grammar is compiled. Raises `ValueError` as `Scheduler.check_new` does."""
        structured, sender = request.sampling.structured_outputs, request.engine_request.tenant
        assert structured is not None
        assert structured.compiled is not None, "the input processor checks grammars"
        self._scheduler.check_new(request)
        self.grammars.add(request.request_id, structured.compiled, request, sender)

    def holds(self, request_id: str) -> bool:
        return self.grammars.holds(request_id)

    def abort(self, request_id: str) -> bool:
        """Abort a request of the engine, guided or not, without further output. Returns False if there is none."""
        held = self.grammars.remove(request_id)
        return self._recovery.remove(request_id) or held or self._scheduler.abort(request_id)

    def remove_all(self, outputs: Iterable[EngineOutput]) -> None:
        """Forget the requests of final outputs."""
        for output in outputs:
            self.grammars.remove(output.request_id)

    def queue_compiled(self) -> list[EngineOutput]:
        """Queue the requests with compiled grammars. Returns the outputs of requests with failed compilations."""
        if not self.grammars.num_held:
            return []
        ready, errors = self.grammars.take_compiled(idle=not self._scheduler.has_work())
        outputs = [
            refused_output(request_id, "its grammar cannot be compiled", error) for request_id, error in errors.items()
        ]
        for request in ready:
            try:
                self._recovery.queue(request)
            except Exception as error:
                self.abort(request.request_id)
                outputs.append(failed_output(request.request_id, client_reason(error), exc_info=True))
        return outputs

    def sample(self, launched: Handle, batch: ScheduledBatch, before: Handle | None) -> list[EngineOutput]:
        """Sample the requests that wait for masks. If the batch has other requests too, masks have a deadline, and
        requests whose masks miss it are deferred. `before`: the step that was read last. Returns the outputs of
        requests whose grammars failed.
        """
        if before is not None and before.guided:
            self.grammars.learn_deadline(launched.device_waited, before.wait_seconds)
        guided = launched.guided
        request_ids = [batch.request_ids[index] for index in guided]
        late, errors = self.grammars.fill(request_ids, launched.masks, by_deadline=len(guided) < len(batch))
        deferred = [guided[i] for i in late]
        launched.sample(deferred)
        self._scheduler.defer(deferred)
        return self._failed(errors)

    def advance(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Advance grammars by their requests' new tokens. Returns the outputs of requests whose grammars failed."""
        if not self.grammars.num_followed:
            return []
        errors = {}
        for output in outputs:
            if output.finish_reason is not None:
                self.grammars.remove(output.request_id)
            elif error := self.grammars.advance(output.request_id, output.new_token_ids):
                errors[output.request_id] = error
        return self._failed(errors)

    def _failed(self, errors: dict[str, str]) -> list[EngineOutput]:
        for request_id in errors:
            self.abort(request_id)
        return [
            refused_output(request_id, "its grammar cannot be followed any further", error)
            for request_id, error in errors.items()
        ]
