"""The drafts that a step gets: learned acceptance against measured step times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from engine.core.batch import ScheduledBatch
from engine.core.drafts.acceptance import PRIOR, Acceptance, kind_of
from engine.core.drafts.ledger import Ledger
from engine.core.drafts.policy import LEAST_GAIN, MOST_SKIPPED, DraftLimits, DraftPolicy
from engine.core.drafts.proposer import CERTAIN, Proposal
from engine.core.drafts.step_costs import STALE, StepCosts, size_class
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request


class Fixed:
    """Proposes the same tokens always."""

    def __init__(self, tokens: list[int], basis: int = 3, predicted: bool = False) -> None:
        self.tokens, self.basis, self.predicted = tokens, basis, predicted

    def start(self, request: EngineRequest) -> Fixed:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        return Proposal(self.tokens[:most], self.basis, self.predicted)


def decoding(name: str = "a", max_tokens: int = 100) -> Request:
    """A request with one token of output. All its tokens but the newest are computed."""
    request = Request(EngineRequest(name, [1, 2], SamplingParams(max_tokens=max_tokens)), frozenset(), 0)
    request.token_ids.append(3)
    request.num_tokens, request.num_computed_tokens = 3, 2
    return request


def read(policy: DraftPolicy, seconds: float, num_seqs: int, num_drafts: int = 0, times: int = 3) -> None:
    """Let the policy see steps of so many requests, the first with drafts, that took `seconds` each."""
    sizes = [1] * num_seqs
    drafts: tuple[int, ...] = ()
    if num_drafts:
        sizes[0], drafts = 1 + num_drafts, (num_drafts, *[0] * (num_seqs - 1))
    batch = ScheduledBatch(["x"] * num_seqs, sizes, sum(sizes), sizes.count(1), [], drafts)
    for _ in range(times):
        policy.record(batch, policy._last_read + seconds)


def test_tokens_that_rest_on_more_are_of_another_kind() -> None:
    assert [kind_of(basis) for basis in (0, 3, 5, 6, 15, 16, 9999, CERTAIN)] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_acceptance_is_learned_by_request_and_passed_on_to_the_next_one() -> None:
    everyone = Acceptance()
    own, other = Acceptance(everyone), Acceptance(everyone)
    assert own.survival(3, 2) == pytest.approx([PRIOR[1], PRIOR[1] ** 2])
    for _ in range(50):
        own.record(3, num_right=0, num_tried=4)
    assert own.of_kind(1) < 0.05
    assert own.of_kind(1) < other.of_kind(1) < PRIOR[1]
    for _ in range(50):
        own.record(3, num_right=2, num_tried=2)
    assert own.of_kind(1) > 0.9


def test_only_tokens_up_to_the_first_wrong_one_are_trials() -> None:
    acceptance = Acceptance()
    acceptance.record(5, num_right=1, num_tried=8)  # one of kind 1 was right, one of kind 2 wrong
    assert acceptance.of_kind(1) > PRIOR[1]
    assert acceptance.of_kind(2) < PRIOR[2]
    assert acceptance.of_kind(3) == pytest.approx(PRIOR[3])


def test_the_second_measurement_of_a_size_counts() -> None:
    costs = StepCosts()
    costs.record(1, False, 9.0)
    assert not costs.plain(1)
    costs.record(1, False, 1.0)
    assert costs.plain(1) == 1.0
    for seconds in (1.1, 1.2, 50.0):
        costs.record(1, False, seconds)
    assert costs.plain(1) == 1.2


def test_unmeasured_sizes_are_between_the_measured_ones() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.record(2, False, 1.0)
    assert 1.0 < costs.drafted(2, 3) < 1.1
    for _ in range(3):
        costs.record(6, True, 2.0)
    assert costs.drafted(2, 6) == 2.0
    assert costs.drafted(2, 4) == pytest.approx(1.5)
    assert costs.drafted(2, 8) == pytest.approx(2.5)
    costs.num_steps += STALE + 1
    costs.record(2, False, 1.0)
    assert costs.drafted(2, 6) < 1.5, "it is to be measured again"
    costs.record(6, True, 3.0)
    assert costs.drafted(2, 6) < 1.5
    costs.record(6, True, 3.0)
    assert costs.drafted(2, 6) == 3.0


def test_sizes_of_more_tokens_are_measured_together() -> None:
    assert [size_class(n) for n in (1, 16, 17, 18, 19, 33, 100)] == [1, 16, 18, 18, 20, 36, 104]


def test_no_drafts_before_the_time_of_a_plain_step_is_known() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7], CERTAIN), DraftLimits(4, 100, 64))
    assert policy.choose([decoding()], 1, 100) == {}
    read(policy, 1.0, 1)
    assert policy.choose([decoding()], 1, 100) == {"a": [5, 6]}, "4, 8 and so on are further numbers"


def test_the_number_of_drafts_is_the_one_that_pays_most() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7], CERTAIN), DraftLimits(4, 100, 64))
    read(policy, 1.0, 1)
    read(policy, 1.2, 1, num_drafts=1)
    read(policy, 9.0, 1, num_drafts=2)
    assert policy.choose([decoding()], 1, 100) == {"a": [5]}
    read(policy, 2.0, 1, num_drafts=1, times=9)
    assert policy.choose([decoding()], 1, 100) == {}, f"less than {LEAST_GAIN} times as fast"


def test_the_drafts_that_save_most_steps_come_first() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7, 8]), DraftLimits(4, 5, 64))
    read(policy, 1.0, 2)
    good, bad = decoding("good"), decoding("bad")
    policy.choose([good, bad], 2, 100)
    for _ in range(30):
        policy.verified(good, 3, 3)
        policy.verified(bad, 3, 0)
    assert policy.choose([good, bad], 2, 100) == {"good": [5, 6, 7], "bad": [5]}, "a fourth one would save less"
    assert policy.choose([good, bad], 2, 3) == {"good": [5, 6]}


def test_a_few_requests_do_not_slow_the_others_down() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7, 8], CERTAIN), DraftLimits(4, 100, 64))
    read(policy, 1.0, 4)
    read(policy, 2.0, 4, num_drafts=4)
    read(policy, 2.0, 4, num_drafts=8)
    requests = [decoding(name) for name in "abcd"]
    assert len(policy.choose(requests, 4, 100) or {}) == 4
    assert policy.choose(requests[:2], 4, 100) == {}, "more tokens a second, but two requests at half speed"


def test_a_proposal_that_is_not_verified_is_compared_with_what_comes() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7]), DraftLimits(4, 100, 64))
    read(policy, 1.0, 1)
    read(policy, 3.0, 1, num_drafts=1)
    request = decoding()
    for _ in range(40):  # the tokens 5, 6, 7 never come: each costs nothing but the time to propose them
        assert policy.choose([request], 1, 100) == {}
        request.token_ids.append(4)
        request.num_tokens = len(request.token_ids)
    assert policy._acceptance.of_kind(kind_of(3)) < 0.25


def test_a_request_waits_for_its_token_in_flight_if_the_drafts_after_it_pay() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7], CERTAIN), DraftLimits(4, 100, 64))
    read(policy, 1.0, 1)
    request = decoding()
    request.num_tokens, request.num_computed_tokens = 4, 3
    assert policy.choose([request], 1, 100) is None
    read(policy, 4.0, 1, num_drafts=2)
    assert policy.choose([request], 1, 100) == {}


def test_drafts_end_before_the_last_token() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7]), DraftLimits(4, 100, 64), adaptive=False)
    assert policy.choose([decoding(max_tokens=4)], 1, 100) == {"a": [5, 6]}
    assert policy.choose([decoding()], 1, 0) == {}


def test_without_adaptation_all_drafts_are_verified() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7]), DraftLimits(2, 3, 64), adaptive=False)
    requests = [decoding("a"), decoding("b")]
    assert policy.choose(requests, 2, 100, beside_chunks=True) == {"a": [5, 6], "b": [5]}
    policy.verified(requests[0], 2, 1)
    counts = policy.counts
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (1, 2, 1)
    assert counts.accepted_at == [1, 0]


def test_tokens_of_a_prediction_are_counted_by_request() -> None:
    policy = DraftPolicy(Fixed([5, 6, 7], predicted=True), DraftLimits(3, 3, 64), adaptive=False)
    request = decoding()
    policy.choose([request], 1, 100)
    policy.verified(request, 3, 2)
    policy.verified(request, 3, 0)
    assert request.num_predicted == [2, 4]


def test_what_gives_no_drafts_is_asked_for_less_and_less_often() -> None:
    policy, request = DraftPolicy(Fixed([]), DraftLimits(4, 100, 64)), decoding(max_tokens=1000)
    read(policy, 1.0, 1)
    asked = []
    for step in range(200):
        if policy.rest:
            policy.rest -= 1
        elif policy.may_draft(1):
            asked.append(step)
            assert policy.choose([request], 1, 100) == {}
        request.token_ids.append(4)
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (1, 8)
    policy.offer(request, [5])
    assert not policy.rest, "a drafter's guess is looked at before it is stale"


def test_only_the_requests_whose_drafts_lost_time_pause() -> None:
    ledger, good, bad = Ledger(), decoding("good"), decoding("bad")
    paused: list[Request] = []
    while not paused:
        paused += ledger.record(1.4, 1.0, [(good, 2, 0.35), (bad, 8, 0.0)])
    assert paused == [bad]
    assert not ledger.pause
    while not ledger.pause:  # each of them has lost some
        assert ledger.record(1.4, 1.0, [(good, 2, 0.05), (bad, 2, 0.0)]) == ()


def test_padded_sizes_are_estimated_by_the_devices_own_time() -> None:
    costs = StepCosts({1: 4.0, 2: 4.1, 4: 4.2, 8: 5.0})
    for _ in range(3):
        costs.record(1, False, 4.4)
    estimated = 5.0 + 0.4 + 0.44  # the device's time, what else a plain step takes, and waiting for the step
    assert costs.drafted(1, 7) == costs.drafted(1, 8) == pytest.approx(estimated)
    for _ in range(3):
        costs.record(3, True, 4.9)
    assert costs.drafted(1, 3) == costs.drafted(1, 4) == 4.9
    assert costs.drafted(1, 8) == pytest.approx(5.7), "waiting is measured"
    assert list(costs.numbers(1, 20)) == [1, 3, 7]
    assert list(costs.numbers(1, 5)) == [1, 3, 5]
    assert list(costs.numbers(5, 2)) == [2]
    assert list(costs.numbers(8, 2)) == []
    assert list(StepCosts().numbers(1, 20)) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("basis", "pauses"), [(0, False), (3, True)])
def test_a_wrong_guess_that_rests_on_nothing_delays_no_lookup(basis: int, pauses: bool) -> None:
    policy = DraftPolicy(Fixed([5, 6, 7], basis), DraftLimits(4, 100, 64))
    read(policy, 1.0, 1)
    read(policy, 3.0, 1, num_drafts=1)
    request, longest = decoding(), 0
    for _ in range(40):
        assert policy.choose([request], 1, 100) == {}
        request.token_ids.append(4)
        request.num_tokens = len(request.token_ids)
        longest = max(longest, request.drafts_from - request.num_tokens)
    assert (longest > MOST_SKIPPED) == pauses
