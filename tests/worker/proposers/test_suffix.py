"""Proposals by earlier answers to the same caller."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.core.drafts.proposer import NO_PROPOSAL, Proposal
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.worker.proposers.ngram import NgramProposer
from engine.worker.proposers.suffix import AT_ONCE, EarlierAnswers, SuffixLimits, SuffixProposer

LIMITS = SuffixLimits()


def request(tenant: str = "a", salt: str = "", adapter: Adapter | None = None) -> EngineRequest:
    return EngineRequest("x", [1, 2], SamplingParams(), tenant=tenant, cache_salt=salt, adapter=adapter)


def proposer(limits: SuffixLimits = LIMITS, max_size: int = 10_000) -> SuffixProposer:
    return SuffixProposer(limits, NgramProposer(3, 6), max_size)


def proposed(given: SuffixProposer, sent: EngineRequest, text: Sequence[int], most: int = 6) -> Proposal:
    return given.start(sent).propose(list(text), most)


def test_what_followed_in_an_earlier_answer_is_proposed() -> None:
    given = proposer()
    given.finish(request(), list(range(100, 140)))
    assert proposed(given, request(), [7, 8, 9, *range(110, 120)]) == ([120, 121, 122, 123, 124, 125], 10, False)
    assert proposed(given, request(), [*range(105, 109)]) == ([109, 110, 111, 112], 4, False), "as many as agree"
    assert proposed(given, request(), [7, 110, 111]) == NO_PROPOSAL, "too few agree"
    assert proposed(given, request(), [*range(136, 140)]) == NO_PROPOSAL, "nothing followed"
    assert proposed(given, request(), [*range(134, 138)]) == ([138, 139], 4, False), "no further than the answer"


@pytest.mark.parametrize(
    "other",
    [request("b"), request(salt="s"), request(adapter=Adapter("n", "p", "v"))],
    ids=["tenant", "salt", "adapter"],
)
def test_nobody_is_shown_what_another_caller_was_told(other: EngineRequest) -> None:
    given = proposer()
    given.finish(request(), list(range(100, 140)))
    assert proposed(given, other, range(110, 120)) == NO_PROPOSAL
    given.finish(other, list(range(200, 240)))
    assert proposed(given, request(), range(210, 220)) == NO_PROPOSAL
    assert proposed(given, other, range(210, 220)).token_ids[0] == 220


def test_most_occurrences_decide_and_a_proposal_ends_where_they_differ() -> None:
    given = proposer(SuffixLimits(least_probability=0.5))
    for last in ([50, 60], [51, 61], [51, 62], [51, 63], [51, 64]):
        given.finish(request(), [1, 2, 3, 4, 5, *last, 9])
        proposed(given, request(), [0])
    assert proposed(given, request(), [1, 2, 3, 4, 5]).token_ids == [51]
    given = proposer(SuffixLimits(least_probability=0.0))
    for last in ([50, 60], [51, 61]):
        given.finish(request(), [1, 2, 3, 4, 5, *last, 9])
        proposed(given, request(), [0])
    assert proposed(given, request(), [1, 2, 3, 4, 5]).token_ids == [51, 61, 9], "of equally many, the newest"


def test_the_requests_own_text_goes_first_if_more_of_it_agrees() -> None:
    given = proposer()
    given.finish(request(), [3, 4, 5, 77, 78])
    assert proposed(given, request(), [9, 3, 4, 5, 66, 67, 9, 3, 4, 5]).token_ids[0] == 66
    assert proposed(given, request(), [3, 4, 5]).token_ids[0] == 77


def test_memory_is_bounded_and_what_was_not_used_for_longest_goes_first() -> None:
    rng = random.Random(3)
    given = proposer(max_size=2500)
    for i in range(100):
        given.finish(request(f"{i % 7}"), [rng.randrange(50_000) for _ in range(rng.randint(5, 90))])
        proposed(given, request(f"{i % 7}"), [0])
        assert given.size == sum(each.size for each in given._callers.values()) <= 2500
    newest = [rng.randrange(50_000) for _ in range(30)]
    given.finish(request("new"), newest)
    proposed(given, request("new"), [0])
    assert proposed(given, request("new"), newest[:10]).token_ids == newest[10:16]
    few = proposer(SuffixLimits(max_answers=4))
    for i in range(20):
        few.finish(request(), [1000 * i + n for n in range(20)])
        proposed(few, request(), [0])
        assert len(few._callers["a", ""].starts) <= 4
    assert proposed(few, request(), range(19_003, 19_009)).token_ids[0] == 19_009


def test_a_long_answer_is_added_in_parts() -> None:
    given, answer = proposer(max_size=10 * AT_ONCE), [n * 7 % 50_021 for n in range(3 * AT_ONCE)]
    given.finish(request(), answer)
    for _ in range(5):
        proposed(given, request(), [0])
    assert not given._waiting
    for at in (20, AT_ONCE, 2 * AT_ONCE + 5, 3 * AT_ONCE - 9):
        assert proposed(given, request(), answer[at - 8 : at]).token_ids == answer[at : at + 6]


def test_the_longest_suffix_that_occurs_is_followed() -> None:
    rng, answers = random.Random(5), EarlierAnswers(3)
    text = list[int]()
    for _ in range(30):
        answer = [rng.randrange(4) for _ in range(rng.randint(4, 40))]
        answers.add(answer)
        text += [*answer, -1]
    limits = SuffixLimits(max_depth=6, least_probability=0.0)
    num_found = 0
    for _ in range(300):
        last = [rng.randrange(4) for _ in range(6)]
        proposal = answers.propose(last, 1, limits)
        if proposal.token_ids:
            num_found += 1
            followed = [*last[-proposal.basis :], *proposal.token_ids]
            assert any(text[i : i + len(followed)] == followed for i in range(len(text)))
    assert num_found > 100
