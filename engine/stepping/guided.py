"""Guided requests, whose outputs follow a grammar: their part of the engine's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.batch import EngineOutput, SchedulerOutput
from engine.core.drafts.proposer import CERTAIN, NO_PROPOSAL, Guesses, Proposal, Proposer
from engine.core.engine_request import EngineRequest
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.stepping.recovery import Recovery, client_reason, failed_output, refused_output
from engine.structured.grammar_manager import GrammarManager
from engine.worker.interface import Handle


class GuidedRequests:
    """The guided requests of an engine: held until their grammar is compiled, sampled by its masks, followed by it."""

    def __init__(self, grammars: GrammarManager[Request], scheduler: Scheduler, recovery: Recovery) -> None:
        self.grammars = grammars
        self._scheduler, self._recovery = scheduler, recovery

    @property
    def num_held(self) -> int:
        """Requests whose grammars are not compiled yet."""
        return self.grammars.num_held

    def queue(self, request: Request) -> None:
        """Queue a request, once its grammar, if it has one, is compiled. Raises `ValueError` as `Scheduler.check_new`
        does.
        """
        structured, sender = request.sampling.structured_outputs, request.engine_request.tenant
        if structured is None:
            self._recovery.queue(request)
            return
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

    def sample(self, launched: Handle, output: SchedulerOutput, before: Handle | None) -> list[EngineOutput]:
        """Sample the requests that wait for masks. If the batch has other requests too, masks have a deadline, and
        requests whose masks miss it are deferred, or lose the drafts whose masks do. `before`: the step that was read
        last. Returns the outputs of requests whose grammars failed.
        """
        if before is not None and before.guided:
            self.grammars.learn_deadline(launched.device_waited, before.wait_seconds)
        guided, batch, drafts = launched.guided, output.batch, list[list[int]]()
        owners, others = guided, len(guided) < len(batch)  # indices of requests
        samples = batch.samples()
        if samples:
            owners, others = [samples[i][0] for i in guided], len(guided) < len(samples)
            drafts = [
                output.drafts[batch.request_ids[index]][:before] if before else []
                for index, before in (samples[i] for i in guided)
            ]
        request_ids = [batch.request_ids[index] for index in owners]
        late, errors = self.grammars.fill(request_ids, launched.masks, by_deadline=others, drafts=drafts)
        launched.sample([guided[i] for i in late])
        self._scheduler.defer([owners[i] for i in late if not drafts or not drafts[i]])
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


class GuidedProposer:
    """Proposes what a request's grammar forces, which is always right; else what another proposer guesses."""

    def __init__(self, grammars: GrammarManager[Request], others: Proposer) -> None:
        self._grammars, self._others = grammars, others

    def start(self, request: EngineRequest) -> Guesses:
        """See `Proposer.start`."""
        others = self._others.start(request)
        if request.sampling.structured_outputs is None:
            return others
        return _GuidedGuesses(self._grammars, request.request_id, others)


class _GuidedGuesses:
    def __init__(self, grammars: GrammarManager[Request], request_id: str, others: Guesses) -> None:
        self._grammars, self._request_id, self._others = grammars, request_id, others

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        """See `Guesses.propose`."""
        forced = self._grammars.forced(self._request_id, most)
        if forced is None:
            return NO_PROPOSAL
        return Proposal(forced, CERTAIN) if forced else self._others.propose(token_ids, most)
