"""Simulated decoding by a clock of its own: drafts make it faster where they are right, and cost nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest

from engine.core.batch import ScheduledBatch
from engine.core.drafts.policy import DraftLimits, DraftPolicy
from engine.core.drafts.proposer import NoProposer, Proposal
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request

NUM_TOKENS = 600  # of each request
MAX_LAG = 96  # a drafter that has missed more tokens proposes nothing
SIZES = (1, 2, 4, *range(8, 64, 8), 64, 80, 96, 112, 128)


class Guesser:
    """Proposes tokens that are right with a probability, which changes after some tokens. All right tokens are 1."""

    def __init__(self, truth: Sequence[float], basis: int = 4) -> None:
        self._truth, self._basis, self._rng = truth, basis, Random(2)
        self.num_proposals = 0

    def start(self, request: EngineRequest) -> Guesser:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        self.num_proposals += 1
        truth = self._truth[min(len(token_ids) * len(self._truth) // NUM_TOKENS, len(self._truth) - 1)]
        return Proposal([int(self._rng.random() < truth) for _ in range(most)], self._basis)


def simulated(
    policy: DraftPolicy | None,
    num_seqs: int,
    seconds: Callable[[int, bool], float],
    after: float = 0.0,
    lookup: float = 0.0,
) -> float:
    """Return the seconds in which so many requests get their tokens. `seconds`: of a step, by its number of tokens and
    whether it has drafts. `after`: of a step after one with drafts, beside. `lookup`: of a proposal.
    """
    requests = [
        Request(EngineRequest(f"{i}", [1], SamplingParams(max_tokens=NUM_TOKENS + 99)), frozenset(), 0)
        for i in range(num_seqs)
    ]
    for request in requests:
        request.token_ids.append(1)
    now, running, was_drafted = 0.0, requests, False
    while running:
        for request in running:
            request.num_tokens = len(request.token_ids)
            request.num_computed_tokens = request.num_tokens - 1
        chosen: dict[str, list[int]] | None = {}
        if policy is not None and policy.rest:
            policy.rest -= 1
        elif policy is not None and policy.may_draft(len(running)):
            may_draft = [request for request in running if len(request.token_ids) >= request.drafts_from]
            before = policy._proposer.num_proposals  # type: ignore[attr-defined]
            chosen = policy.choose(may_draft, len(running), 64) if may_draft else {}
            now += lookup * (policy._proposer.num_proposals - before)  # type: ignore[attr-defined]
        assert chosen is not None
        numbers = tuple(len(chosen.get(request.request_id, ())) for request in running)
        drafted = any(numbers)
        now += seconds(len(running) + sum(numbers), drafted) + after * was_drafted
        was_drafted = drafted
        for request, number in zip(running, numbers, strict=True):
            right = 0
            if number:
                drafts = chosen[request.request_id]
                right = next((i for i, token in enumerate(drafts) if token != 1), number)
                assert policy is not None
                policy.verify(request)
                policy.verified(request, number, right)
            request.token_ids += [1] * (1 + right)
        lens = [1 + number for number in numbers]
        batch = ScheduledBatch([""] * len(lens), lens, sum(lens), lens.count(1), [], numbers if drafted else ())
        if policy is not None:
            policy.record(batch, now)
        running = [request for request in running if len(request.token_ids) < NUM_TOKENS]
    return now


def ratio(truth: Sequence[float], num_seqs: int, seconds: Callable[[int, bool], float], profile: bool) -> float:
    device: Mapping[int, float] | None = {size: seconds(size, False) for size in SIZES} if profile else None
    policy = DraftPolicy(Guesser(truth), DraftLimits(8, 64, 64), device_seconds=device)
    return simulated(None, num_seqs, seconds) / simulated(policy, num_seqs, seconds)


def bound_by_weights(num_tokens: int, drafted: bool) -> float:
    """A GPU: padded steps whose tokens cost little each; waiting for a step costs some time."""
    size = next(size for size in SIZES if size >= num_tokens)
    return 4.6 + 0.01 * size + (0.6 if drafted else 0.0)


def bound_by_arithmetic(num_tokens: int, drafted: bool) -> float:
    """A CPU: a token costs two thirds of what the first one does."""
    return 1 + 0.66 * (num_tokens - 1) + (0.05 if drafted else 0.0)


def with_a_cliff(num_tokens: int, drafted: bool) -> float:
    """Steps with drafts are five times as long, which nothing tells before they run."""
    return (4.6 + 0.01 * num_tokens) * (5 if drafted else 1)


@pytest.mark.parametrize("profile", [False, True])
@pytest.mark.parametrize("seconds", [bound_by_weights, bound_by_arithmetic, with_a_cliff])
@pytest.mark.parametrize("num_seqs", [1, 2, 8, 64])
def test_wrong_drafts_cost_nothing(num_seqs: int, seconds: Callable[[int, bool], float], profile: bool) -> None:
    assert ratio([0.0], num_seqs, seconds, profile) >= 0.98


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def test_wrong_drafts_that_rest_on_nothing_cost_little(num_seqs: int) -> None:
    """These delay no lookup, so they are proposed more often than others."""
    policy = DraftPolicy(Guesser([0.0], basis=0), DraftLimits(8, 64, 64))
    drafted = simulated(policy, num_seqs, bound_by_weights, after=0.3, lookup=0.02)
    assert simulated(None, num_seqs, bound_by_weights) / drafted >= 0.98


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def test_drafts_that_turn_wrong_cost_little(num_seqs: int) -> None:
    assert ratio([0.0, 0.9, 0.0, 0.9, 0.0], num_seqs, bound_by_weights, True) >= 1.05
    assert ratio([0.0, 0.4, 0.0, 0.4, 0.0], num_seqs, bound_by_arithmetic, False) >= 0.97


@pytest.mark.parametrize("profile", [False, True])
def test_right_drafts_gain_what_there_is_to_gain(profile: bool) -> None:
    assert ratio([1.0], 1, bound_by_weights, profile) > 6.5
    assert ratio([1.0], 8, bound_by_weights, profile) > 5
    assert ratio([0.8], 1, bound_by_weights, profile) > 2.5
    assert ratio([1.0], 64, bound_by_weights, True) > 1.5
    assert ratio([1.0], 1, bound_by_arithmetic, profile) > 1.2


@pytest.mark.parametrize("profile", [False, True])
def test_a_cliff_is_noticed_although_drafts_are_right(profile: bool) -> None:
    assert ratio([0.7], 1, with_a_cliff, profile) >= 0.95


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize("truth", [0.2, 0.4, 0.6])
def test_what_drafts_cost_beside_their_steps_counts(num_seqs: int, truth: float) -> None:
    """A tiny model: lookups, and steps after those with drafts, take a good part of a step's time."""

    def seconds(num_tokens: int, drafted: bool) -> float:
        return 1 + 0.06 * (num_tokens - num_seqs) + (0.2 if drafted else 0.0)

    policy = DraftPolicy(Guesser([truth, 0.0, truth, 0.0]), DraftLimits(8, 64, 64))
    drafted = simulated(policy, num_seqs, seconds, after=0.5, lookup=0.1 / num_seqs)
    assert simulated(None, num_seqs, seconds) / drafted >= 0.97


@pytest.mark.parametrize("each", [0.02, 0.2])
@pytest.mark.parametrize("catching_up", [0.0, 0.05, 0.2])
def test_a_drafter_that_is_wrong_costs_little_although_it_catches_up(each: float, catching_up: float) -> None:
    """`each`: time of a guess, `catching_up`: of a token that the drafter has missed, of a plain step's time."""
    policy, num_steps = DraftPolicy(NoProposer(), DraftLimits(3, 64, 64), num_by_model=3), 6000
    request = Request(EngineRequest("a", [1], SamplingParams(max_tokens=num_steps + 9)), frozenset(), 0)
    request.token_ids.append(1)
    now, missed = 0.0, 0
    for _ in range(num_steps):
        request.num_tokens = len(request.token_ids)
        request.num_computed_tokens = request.num_tokens - 1
        chosen = policy.choose([request], 1, 64) if policy.may_draft(1) else {}
        num_drafts = len((chosen or {}).get("a", ()))
        if num_drafts:
            policy.verify(request)
            policy.verified(request, num_drafts, 0)
        num_proposals = policy.num_proposals(1)
        missed += 1
        now += 1 + 0.1 * num_drafts
        is_behind = missed > MAX_LAG
        if num_proposals and not is_behind:
            now, missed = now + each * num_proposals + catching_up * missed, 0
        request.token_ids.append(1)
        drafts = (num_drafts,) if num_drafts else ()
        batch = ScheduledBatch([""], [1 + num_drafts], 1 + num_drafts, int(not num_drafts), [], drafts)
        policy.record(batch, now, num_proposals > 0)
        if num_proposals and not is_behind:
            policy.offer(request, [0] * num_proposals)
    assert num_steps / now >= 0.99
