"""Proposals by lookup, against a plain search."""

from __future__ import annotations

import random

import pytest

from engine.worker.proposers.ngram import AT_ONCE, MAX_BASIS, NgramLookup, _Occurrences


def occurrence(text: list[int], length: int) -> int:
    """The index after the newest earlier occurrence of the last `length` tokens; -1: none."""
    for end in range(len(text) - 1, length - 1, -1):
        if text[end - length : end] == text[-length:]:
            return end
    return -1


@pytest.mark.parametrize("step", [1, 3, 70])
@pytest.mark.parametrize("vocab_size", [2, 5, 100_000])
def test_a_proposal_follows_the_newest_occurrence_of_the_longest_run(step: int, vocab_size: int) -> None:
    rng = random.Random(step)
    text = [rng.randrange(vocab_size) for _ in range(50)]
    lookup = NgramLookup(2, 4)
    followed, num_missed, num_proposals, agreed = -1, 0, 0, 0
    for _ in range(300 // step):
        for _ in range(step):
            copy = rng.random() < 0.7 and len(text) > 30
            text.append(text[-30] if copy else rng.randrange(vocab_size))
        if followed >= 0 and text[followed : followed + step] == text[-step:]:
            followed += step
        else:
            kept = step - 1
            is_replaced = followed >= 0 and text[followed : followed + kept] == text[-step:-1] and agreed + kept >= 2
            after = followed + step if is_replaced else -1
            followed = next((each for each in (occurrence(text, 4), occurrence(text, 2), after) if each >= 0), -1)
        proposal = lookup.propose(text, 6)
        assert lookup._source < len(text)
        num_proposals += followed >= 0
        if lookup._source != followed:  # one with the same hash may hide an occurrence, which is rare
            num_missed += 1
            followed = lookup._source
        assert proposal.token_ids == ([] if followed < 0 else (text[followed:] * 6)[:6])
        agreed = proposal.basis
        assert followed < 0 or text[followed - agreed : followed] == text[len(text) - agreed :]
    assert num_missed <= num_proposals / 20


def test_proposals_go_on_where_the_text_follows() -> None:
    lookup = NgramLookup(3, 5)
    prompt = list(range(100, 140))
    text = [*prompt, 7, 100, 101, 102]
    assert lookup.propose(text, 4) == ([103, 104, 105, 106], 3, False)
    text += [103, 104]
    assert lookup.propose(text, 4) == ([105, 106, 107, 108], 5, False)
    text.append(9)
    assert lookup.propose(text, 4) == ([106, 107, 108, 109], 0, False), "after a token that stands for another one"
    text.append(9)
    assert lookup.propose(text, 4).token_ids == [], "too few tokens have agreed since"


def test_after_a_replaced_token_a_new_occurrence_comes_first() -> None:
    lookup = NgramLookup(3, 5)
    text = [1, 2, 3, 4, 5, 6, 2, 3, 9, 30, 31, 0, 1, 2, 3]
    assert lookup.propose(text, 2).token_ids == [4, 5]
    text.append(9)
    assert lookup.propose(text, 2) == ([30, 31], 3, False)


def test_the_basis_is_the_number_of_tokens_that_agree() -> None:
    text = [*range(50), 99, *range(10, 45)]
    assert NgramLookup(3, 5).propose(text, 2) == ([45, 46], MAX_BASIS, False)
    text = [*range(50), 99, *range(10, 14)]
    assert NgramLookup(3, 5).propose(text, 2) == ([14, 15], 4, False)


def test_what_followed_is_repeated_to_the_end_of_a_proposal() -> None:
    assert NgramLookup(2, 4).propose([1, 2, 3, 9, 1, 2], 9).token_ids == [3, 9, 1, 2, 3, 9, 1, 2, 3]
    assert NgramLookup(2, 4).propose([5, 7, 7, 7], 4).token_ids == [7, 7, 7, 7]


def test_a_prediction_comes_first() -> None:
    lookup = NgramLookup(3, 5, prediction=[5, 6, 7, 8, 9])
    text = [1, 2, 3, 5]
    assert lookup.propose(text, 3) == ([6, 7, 8], 1, True)
    text += [6, 4, 4]
    assert lookup.propose(text, 3).token_ids == []
    text += [6, 7, 8]
    assert lookup.propose(text, 3) == ([9], 3, True)


def test_a_long_text_is_added_in_parts_and_grows() -> None:
    rng = random.Random(0)
    text = [rng.randrange(40) for _ in range(2 * AT_ONCE + 50)]
    occurrences = _Occurrences(3)
    occurrences.extend(text, len(text) - 1)
    assert occurrences._end == 2 + AT_ONCE
    for _ in range(2):
        occurrences.extend(text, len(text) - 1)
    found = occurrences.find(text)
    assert found in (occurrence(text, 3), -1)
    alone = _Occurrences(3)
    for end in range(len(text)):
        alone.extend(text, end)
        assert len(alone._table) >= 2 * end
    assert sum(after > 0 for after in alone._table) > AT_ONCE / 2
    assert all(
        text[a - 3 : a] == text[b - 3 : b]
        for a, b in zip(alone._table, occurrences._table, strict=True)
        if a and a == b
    )
