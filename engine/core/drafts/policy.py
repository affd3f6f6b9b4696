"""Decides which requests get drafts in a step, and how many: those that make tokens come faster, if any do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat

from engine.core.batch import ScheduledBatch
from engine.core.drafts.acceptance import LOOKED_UP, Acceptance, kind_of
from engine.core.drafts.drafter_calls import DrafterCalls
from engine.core.drafts.ledger import Ledger
from engine.core.drafts.proposer import BY_MODEL, NO_PROPOSAL, Guesses, Proposal, Proposer
from engine.core.drafts.step_costs import StepCosts
from engine.core.engine_request import EngineRequest
from engine.core.request import Request

LEAST_GAIN = 1.1  # speed with drafts over that without, from which on there are drafts
PLAIN_INTERVAL = 16  # plain steps are measured this often, to spare time
TRIAL_TOKENS = 4  # of a proposal that is not verified, so many are compared with the tokens that came
HOPELESS = 0.25  # of a request whose proposals are right less often, only some tokens are guessed: one of
PATIENCE = 8  # at first, and twice as many each time, up to
MOST_PATIENCE = 32
PAUSED_TOKENS = 128  # of a request whose drafts have cost more than they gave
MANY_WITHOUT = 8  # after so many times in a row without drafts, each second token is looked at, then each third …
MANY_PLAIN = 4  # after so many choices in a row of no drafts at all, there is one for each second step, each third …
MOST_SKIPPED = 7  # tokens, or steps


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The most drafts that a request, and that all requests of a step together, may have."""

    per_request: int
    per_step: int
    max_seqs: int  # with more running requests, no step has drafts


class _Drafting:
    """The proposals of a request, and how often they were right.

    A proposal that is not verified costs nothing but to make it: it is compared with the tokens that come. So whether
    drafts would pay is known before the first one is verified.
    """

    __slots__ = (
        "_by_model",
        "_guesses",
        "_num_without",
        "_patience",
        "_position",
        "_tried",
        "acceptance",
        "pause_until",
        "proposal",
    )

    def __init__(self, guesses: Guesses, earlier: Acceptance) -> None:
        self._guesses, self.acceptance = guesses, Acceptance(earlier)
        self._by_model = NO_PROPOSAL, 0  # a drafter's latest, and the number of tokens that were known then
        self.proposal = NO_PROPOSAL  # the latest, from which drafts are taken
        self._tried = NO_PROPOSAL  # one that is compared with the tokens that come
        self._position = 0  # of its first token
        self.pause_until = 0  # tokens, before which there is no proposal
        self._patience = PATIENCE if earlier.of_kind(LOOKED_UP) >= HOPELESS else MOST_PATIENCE // 2
        self._num_without = 0  # times in a row that there was none, or that it gave no drafts

    def next(self, token_ids: list[int], most: int) -> Proposal:
        """Compare the last proposal with the tokens that came, and return a new one."""
        if self._tried.token_ids:
            self._compare(token_ids)
        num_known = len(token_ids)
        self.proposal = NO_PROPOSAL
        if num_known >= self.pause_until:
            self.proposal = proposal = self._propose(token_ids, most)
            if not proposal.token_ids:
                self.skip(num_known)
            elif not self._tried.token_ids:
                self._tried, self._position = proposal, num_known
        return self.proposal

    def skip(self, num_known: int) -> None:
        """Note that no draft follows the known tokens, and propose again after the next ones."""
        self._num_without += 1
        self.pause_until = num_known + 1 + min(self._num_without // MANY_WITHOUT, MOST_SKIPPED)

    def offer(self, token_ids: list[int], num_known: int) -> None:
        """Take what a drafter on the device guesses to follow the `num_known` tokens."""
        self._by_model = Proposal(token_ids, BY_MODEL), num_known
        self.pause_until = min(self.pause_until, num_known)  # it has been paid for

    def _propose(self, token_ids: list[int], most: int) -> Proposal:
        """Return a guess by lookup or by the drafter: the one with more tokens that are expected to be right."""
        found = self._guesses.propose(token_ids, most)
        by_model, num_known = self._by_model
        if num_known != len(token_ids) or not by_model.token_ids:
            return found
        by_model = by_model._replace(token_ids=by_model.token_ids[:most])
        return max(by_model, found, key=lambda each: sum(self.acceptance.survival(each.basis, len(each.token_ids))))

    def _compare(self, token_ids: list[int]) -> None:
        guessed = self._tried.token_ids[:TRIAL_TOKENS]
        came = token_ids[self._position : self._position + len(guessed)]
        num_right = 0
        while num_right < len(came) and came[num_right] == guessed[num_right]:
            num_right += 1
        if num_right == len(came) < len(guessed):
            return  # the others are yet to come
        basis = self._tried.basis
        self.acceptance.record(basis, num_right, len(guessed))
        if num_right:
            self._patience = PATIENCE
        elif basis and self.acceptance.of_kind(kind_of(basis)) < HOPELESS:  # of 0, a lookup may find more
            self.pause_until = len(token_ids) + self._patience
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._tried = NO_PROPOSAL

    def verify(self) -> None:
        """Note that drafts of the proposal are in the next step: they are compared there."""
        self._tried, self._num_without = NO_PROPOSAL, 0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Record that the first tokens of the proposal were drafts, and how many of these were accepted."""
        self.acceptance.record(self.proposal.basis, num_accepted, num_drafts)


@dataclass(slots=True)
class DraftCounts:
    """Counters of verified drafts, see `SchedulerStats`."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)


class DraftPolicy:
    """Chooses the drafts of each step: the tokens most likely to be right, as many as make tokens come fastest.

    It compares steps with 0, 1, 2 … drafts by the expected time for a token of a request, averaged over the requests.
    So drafts of some requests must not slow the others down by more than they gain: what counts is not the number of
    tokens a second, which would gain for a while, until the slow requests are left alone. Step times are measured with
    all that the CPU does between two steps (`StepCosts`), acceptance is learned (`Acceptance`). A step is plain if
    nothing was looked up before it, and the one before had no drafts. Where drafts, with all that they cost, have made
    tokens slower than plain steps do, there are none for a while (`Ledger`).
    """

    def __init__(
        self,
        proposer: Proposer,
        limits: DraftLimits,
        adaptive: bool = True,
        num_by_model: int = 0,
        device_seconds: Mapping[int, float] | None = None,
        finished: Callable[[EngineRequest, Sequence[int]], None] | None = None,
    ) -> None:
        """`adaptive`: verify only drafts that pay. Otherwise all that the limits allow. `num_by_model`: tokens that a
        drafter on the device proposes at a time; 0: there is none. `device_seconds`: see `StepCosts`.
        `finished`: called with each finished request and its answer.
        """
        self._proposer, self._limits, self._adaptive = proposer, limits, adaptive
        self.has_drafter = num_by_model > 0  # a drafter on the device may propose
        self._num_by_model, self._calls = num_by_model, DrafterCalls()
        self.costs, self._acceptance, self._ledger = StepCosts(device_seconds), Acceptance(), Ledger()
        self._finished = finished
        self._last_read = 0.0  # when the last step was read, in monotonic seconds
        self._num_unmeasured = 0  # plain steps of one batch in a row
        self._measured: ScheduledBatch | None = None  # of the last plain step that was measured
        self._is_plain = True  # the next step to be read, unless it has drafts
        self._verified: list[tuple[Request, int, int]] = []  # in that step: request, its drafts, those accepted
        self.rest = 0  # coming steps that have no drafts: there is no need to ask for them
        self._num_plain = 0  # times in a row that no draft was chosen
        self.counts = DraftCounts(accepted_at=[0] * limits.per_request)

    def may_draft(self, num_running: int) -> bool:
        """Return whether a step of so many running requests may have drafts at all."""
        if self._ledger.pause:
            self.rest = self._ledger.pause
        return 0 < num_running <= self._limits.max_seqs and not self._ledger.pause

    def choose(
        self, requests: Sequence[Request], num_seqs: int, room: int, beside_chunks: bool = False
    ) -> dict[str, list[int]] | None:
        """Return the drafts of the next step by request id.

        `requests`: those of the step's `num_seqs` requests that may have drafts. All decode, and their known tokens are
        all, or all but one that is in flight. In that case they get no drafts; None: they should wait for it, so that
        they get drafts then. `room`: the most drafts of the step. `beside_chunks`: the step also computes chunks of
        prompts, so drafts have no known cost.
        """
        if self._adaptive and self.costs.needs_plain(num_seqs):
            return {}
        offers: list[tuple[Request, Proposal, int]] = []
        self._is_plain = is_ahead = False
        for request in requests:
            state = self._state(request)
            in_flight = request.num_tokens - len(request.token_ids)
            is_ahead |= in_flight > 0
            most = min(self._limits.per_request, request.max_num_tokens - request.num_tokens - 1) + in_flight
            proposal = state.next(request.token_ids, most)
            request.drafts_from = state.pause_until
            if len(proposal.token_ids) > in_flight:
                offers.append((request, proposal, in_flight))
        if offers and beside_chunks and self._adaptive:
            return {}
        room = min(room, self._limits.per_step)
        numbers = self._best(offers, num_seqs, room) if self._adaptive else self._all(offers, room)
        self._note(offers, numbers)
        if is_ahead:
            return None if any(numbers) else {}
        chosen = zip(offers, numbers, strict=True)
        return {request.request_id: proposal.token_ids[:n] for (request, proposal, _), n in chosen if n}

    def _note(self, offers: list[tuple[Request, Proposal, int]], numbers: list[int]) -> None:
        """Note how many drafts of each offer were chosen: what gives none is asked for less often."""
        if not any(numbers):
            self._num_plain += 1
            self.rest = min(self._num_plain // MANY_PLAIN, MOST_SKIPPED) if self._adaptive else 0
        else:
            self._num_plain = 0
        for (request, proposal, _), number in zip(offers, numbers, strict=True):
            if number and proposal.basis == BY_MODEL:
                self._calls.gave_drafts()
            if not number and self._adaptive:
                state = self._state(request)
                state.skip(len(request.token_ids))
                request.drafts_from = state.pause_until

    def _state(self, request: Request) -> _Drafting:
        if request.drafting is None:
            request.drafting = _Drafting(self._proposer.start(request.engine_request), self._acceptance)
        assert isinstance(request.drafting, _Drafting)
        return request.drafting

    def num_proposals(self, num_seqs: int) -> int:
        """Return how many tokens the drafter on the device proposes after the next step, for each of `num_seqs`
        requests: none while its drafts do not pay, but for a step from time to time.
        """
        if not self._num_by_model or not self.may_draft(num_seqs):
            return 0
        if self._adaptive and self.costs.needs_plain(num_seqs):
            return 0
        return 0 if self._adaptive and not self._calls.proposes() else self._num_by_model

    def drafter_rests(self, begins: bool) -> bool:
        """Return whether the drafter on the device does nothing in the step that was planned. It knows the step's
        requests no more then. `begins`: a request begins in the step.
        """
        return self._calls.rests(begins)

    def offer(self, request: Request, token_ids: list[int]) -> None:
        """Take what the drafter on the device guesses to follow the request's known tokens."""
        self._state(request).offer(token_ids, len(request.token_ids))
        self.rest = request.drafts_from = 0

    def verify(self, request: Request) -> None:
        """Note that drafts of the request are in the next step."""
        assert isinstance(request.drafting, _Drafting)
        request.drafting.verify()

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Record how many of a request's drafts in a step were accepted."""
        assert isinstance(request.drafting, _Drafting)
        request.drafting.verified(num_drafts, num_accepted)
        request.num_drafted[0] += num_accepted
        request.num_drafted[1] += num_drafts
        if request.drafting.proposal.from_prediction:
            request.num_predicted[0] += num_accepted
            request.num_predicted[1] += num_drafts - num_accepted
        self._verified.append((request, num_drafts, num_accepted))
        counts = self.counts
        counts.num_drafts += 1
        counts.num_draft_tokens += num_drafts
        counts.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            counts.accepted_at[position] += 1

    def finish(self, request: Request) -> None:
        """Note that a request has finished."""
        if self._finished is not None:
            self._finished(request.engine_request, request.token_ids[request.num_prompt_tokens :])

    def record(self, batch: ScheduledBatch, now: float, has_proposals: bool = False) -> None:
        """Record that a step was read `now`, in monotonic seconds, after its drafts have been `verified`.
        `has_proposals`: the drafter ran after it.
        """
        if batch is self._measured and self._is_plain and not has_proposals:
            self._num_unmeasured += 1
            if self._num_unmeasured < PLAIN_INTERVAL:
                self._last_read = now
                return
        seconds, self._last_read = now - self._last_read, now
        self._record(batch, seconds, has_proposals)

    def _record(self, batch: ScheduledBatch, seconds: float, has_proposals: bool) -> None:
        costs, num_seqs, num_drafts = self.costs, len(batch.request_ids), batch.num_drafts
        num_steps = max(self._num_unmeasured, 1)
        costs.num_steps += num_steps
        self._ledger.pause = max(self._ledger.pause - num_steps, 0)
        verified, is_plain = self._verified, self._is_plain and not num_drafts and not has_proposals
        self._num_unmeasured, self._measured, self._verified = 0, None, []
        self._is_plain = not num_drafts  # the step after one with drafts takes longer
        if batch.total_num_tokens != num_seqs + sum(num_drafts):
            return  # with chunks of prompts
        if is_plain or num_drafts:
            costs.record(batch.total_num_tokens, bool(num_drafts), seconds)
        if is_plain:
            if not costs.is_new(num_seqs):
                self._measured = batch
        elif self._adaptive and (plain := costs.mean_plain(num_seqs)):
            parts = [(request, number, accepted / num_seqs) for request, number, accepted in verified]
            was_paused = self._ledger.pause > 0
            losing = self._ledger.record(seconds, plain, parts, has_proposals)
            if self._ledger.pause and not was_paused and not self._calls.is_resting:
                self._calls.rest(self._ledger.pause)
            for request in losing:
                self._state(request).pause_until = request.drafts_from = len(request.token_ids) + PAUSED_TOKENS

    @staticmethod
    def _all(offers: list[tuple[Request, Proposal, int]], room: int) -> list[int]:
        numbers = []
        for _, proposal, in_flight in offers:
            numbers.append(min(len(proposal.token_ids) - in_flight, room))
            room -= numbers[-1]
        return numbers

    def _best(self, offers: list[tuple[Request, Proposal, int]], num_seqs: int, room: int) -> list[int]:
        """Return the number of drafts of each offer with which a token takes least time; zeros if none is faster."""
        plain = self.costs.plain(num_seqs)
        numbers = [0] * len(offers)
        if not plain or not offers:
            return numbers
        survivals = [
            self._state(request).acceptance.survival(proposal.basis, len(proposal.token_ids))[in_flight:]
            for request, proposal, in_flight in offers
        ]
        least = num_seqs * plain / LEAST_GAIN
        fewest = num_seqs - len(offers) + sum(1 / (1 + sum(survival)) for survival in survivals)
        if fewest * plain >= least:  # even if the drafts took no time
            return numbers
        slots: list[tuple[float, int, int]] = []
        for index, survival in enumerate(survivals):
            each = [1 / tokens for tokens in accumulate(survival, initial=1.0)]  # steps for a token
            changes = [after - before for before, after in pairwise(each)]
            slots += zip(changes, range(len(changes)), repeat(index))
        if len(offers) > 1:  # of one offer they are in this order
            slots.sort()
        # Steps for a token of a request with 0, 1, 2 … drafts, the sum of all requests.
        steps = list(accumulate([slot[0] for slot in slots[:room]], initial=float(num_seqs)))
        best = 0
        for number, seconds in self.costs.table(num_seqs, len(steps) - 1):
            if seconds * steps[number] < least:
                least, best = seconds * steps[number], number
        for *_, index in slots[:best]:
            numbers[index] += 1
        return numbers
