"""When a drafter on the device runs, by a clock of the test's own."""

from __future__ import annotations

import pytest

from engine.core.batch import ScheduledBatch
from engine.core.drafts import drafter_calls
from engine.core.drafts.drafter_calls import DrafterCalls
from engine.core.drafts.policy import DraftLimits, DraftPolicy
from engine.core.drafts.proposer import NoProposer
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request

NUM_GUESSES = 3


def test_a_useless_drafter_proposes_less_and_less_and_then_rests() -> None:
    calls, proposals = DrafterCalls(), list[int]()
    for step in range(100_000):
        if calls.proposes():
            proposals.append(step)
        if calls.rests(begins=False):
            break
    first = drafter_calls.USELESS + 1
    assert proposals[:first] == list(range(first))
    assert len(proposals) == drafter_calls.USELESS + drafter_calls.NUM_PROBES
    assert step < 300
    for each in range(drafter_calls.FIRST_REST - 1):
        assert calls.rests(begins=each % 3 == 0), "a request that begins does not wake it before its time"
    assert calls.rests(begins=False), "it begins with a new request"
    assert not calls.rests(begins=True)
    assert sum(calls.proposes() for _ in range(100)) == drafter_calls.USELESS
    assert calls.is_resting


def test_rests_become_longer_until_proposals_give_drafts() -> None:
    calls, lengths = DrafterCalls(), list[int]()

    def useless() -> int:
        """Return the length of the rest after proposals that gave no drafts."""
        while not calls.is_resting:
            calls.proposes()
        length = 1
        while calls.rests(begins=True):
            length += 1
        return length

    for _ in range(7):
        lengths.append(useless())
    assert lengths == [1024, 2048, 4096, 8192, 16384, 16384, 16384]
    assert calls.proposes()
    calls.gave_drafts()
    assert useless() == 1024


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("keeping_up", [0.01, 0.04])
@pytest.mark.parametrize("proposing", [0.25, 0.8])
def test_a_drafter_that_is_never_right_costs_little(num_seqs: int, keeping_up: float, proposing: float) -> None:
    """`keeping_up`: time of a step in which the drafter only keeps up, `proposing`: in which it proposes, of a plain
    step's time.
    """
    seconds, gained = _decoded(num_seqs, 40, keeping_up, proposing, right_after=1 << 60)
    assert gained == 0
    assert 40 * LENGTH / seconds >= 0.98


def test_a_drafter_that_becomes_right_is_used_again() -> None:
    seconds, gained = _decoded(1, 40, 0.04, 0.25, right_after=12 * LENGTH)
    assert gained > 16 * LENGTH
    assert 40 * LENGTH / seconds > 1.5


LENGTH = 250  # tokens of a request


def _decoded(num_seqs: int, num_turns: int, keeping_up: float, proposing: float, right_after: int) -> tuple[float, int]:
    """Return the seconds in which so many requests get their tokens, `num_turns` times, and the drafts accepted.

    A plain step takes one second. The drafter is right from step `right_after` on.
    """
    policy = DraftPolicy(NoProposer(), DraftLimits(NUM_GUESSES, 64, 64), num_by_model=NUM_GUESSES)
    now, step, gained = 0.0, 0, 0
    for _ in range(num_turns):
        params = SamplingParams(max_tokens=LENGTH + 9)
        requests = [Request(EngineRequest(f"{i}", [1], params), frozenset(), 0) for i in range(num_seqs)]
        unknown, begins, length = set[Request](), True, LENGTH
        while length > 0:
            step += 1
            for request in requests:
                request.num_tokens = len(request.token_ids)
                request.num_computed_tokens = request.num_tokens - 1
            chosen = policy.choose(requests, num_seqs, 64) if not begins and policy.may_draft(num_seqs) else {}
            chosen = chosen or {}
            numbers = tuple(len(chosen.get(request.request_id, ())) for request in requests)
            num_proposals = policy.num_proposals(num_seqs)
            rests = policy.drafter_rests(begins)
            assert not (rests and num_proposals)
            right = 0
            for request, number in zip(requests, numbers, strict=True):
                accepted = number if step >= right_after else 0
                if number:
                    policy.verify(request)
                    policy.verified(request, number, accepted)
                request.token_ids += [1] * (1 + accepted)
                right += accepted
            now += 1 + 0.05 * sum(numbers) + (proposing if num_proposals else 0.0 if rests else keeping_up)
            if rests:
                unknown.update(requests)
            lens = [1 + number for number in numbers]
            drafts = numbers if any(numbers) else ()
            policy.record(ScheduledBatch([""] * num_seqs, lens, sum(lens), 0, [], drafts), now, num_proposals > 0)
            for request in requests:
                if num_proposals:
                    policy.offer(request, [] if request in unknown else [1] * num_proposals)
            gained, begins = gained + right, False
            length -= 1 + right // num_seqs
    return now, gained
