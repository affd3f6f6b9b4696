"""Refusals of sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.params.sampling import SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be in"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be in \[0.01, 100\], got 0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be in"),  # float32 logits by it would be infinite
        ({"logit_bias": {3: 101}}, r"logit_bias must be token ids with numbers in \[-100, 100\], got {3: 101}"),
        ({"logit_bias": {"3": 1}}, "logit_bias must be token ids"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must be at least one token id, got \[\]"),
        ({"bad_words": ["a", ""]}, "bad_words must be texts or lists of token ids, of 1 to 100, got ''"),
        ({"logit_bias": dict.fromkeys(range(5000), 1)}, "logit_bias must be at most 1024 entries, got '5000'"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids must be at most 1024 entries, got '1025'"),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids must be at most 16384 entries"),
        ({"dry_sequence_breakers": ["a" * 101]}, "the texts of at most 100 characters, got 'aaa"),
        ({"typical_p": 0}, r"typical_p must be in \(0, 1\], got 0"),
        ({"top_n_sigma": -2}, r"top_n_sigma must be in \[-1, 100\]"),
        ({"dry_base": 0.5}, r"dry_base must be in \[1, 100\]"),
        ({"dry_allowed_length": 0}, "dry_allowed_length must be an integer from 1 to 1000"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers must be non-empty texts or token ids"),
        ({"xtc_threshold": 2}, r"xtc_threshold must be in \[0, 1\]"),
        ({"xtc_probability": True}, r"xtc_probability must be in \[0, 1\]"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4, got 5"),
        ({"stop": ["a", ""]}, "stop must be a non-empty string or a list of them"),
        ({"stop": "a", "detokenize": False}, "stop must be unset when detokenize=False"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs must be StructuredOutputs"),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_what_is_checked_stays_checked_until_its_token_ids_change() -> None:
    # Words have several spellings.
    checked = SamplingParams(n=3, stop_token_ids=[5], bad_words=[[1]] * 1000, checked=True)
    assert checked.clone(n=1, seed=7, max_tokens=3).checked
    assert not checked.clone(bad_words=["a"]).checked
    with pytest.raises(ValueError, match="stop_token_ids must be token ids"):
        checked.clone(stop_token_ids=[-1], bad_words=None)
    with pytest.raises(ValueError, match="n must be"):
        checked.clone(n=0)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ValueError, match="got ") as found:
        SamplingParams(stop_token_ids=[-1] * 1024)
    assert len(str(found.value)) < 300
