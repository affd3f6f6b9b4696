"""What sampling parameters refuse."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be in"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be in \(0, 100\], got 0"),
        ({"logit_bias": {3: 101}}, r"logit_bias must be token ids with numbers in \[-100, 100\], got {3: 101}"),
        ({"logit_bias": {"3": 1}}, "logit_bias must be token ids"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must be at least one token id, got \[\]"),
        ({"bad_words": ["a", ""]}, "bad_words must be texts or lists of token ids, of 1 to 100, got ''"),
        ({"logit_bias": dict.fromkeys(range(5000), 1)}, "logit_bias must be at most 1024 entries, got '5000'"),
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
