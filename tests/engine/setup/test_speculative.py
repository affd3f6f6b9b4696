"""The settings of drafts: vLLM's names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine import ConfigError, EngineConfig
from engine.setup.speculative import ON_ACCELERATORS, ON_CPUS, SpeculativeConfig, parse, speculative_config
from engine.worker.proposers.suffix import SuffixLimits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "medusa", "model": "x"},
            "method must be ngram, suffix, draft_model, mtp, eagle3, dflash, got 'medusa'",
        ),
        (
            {"method": "eagle", "model": "x"},
            "method must be ngram, suffix, draft_model, mtp, eagle3, dflash, got 'eagle'",
        ),
        ({"model": "x"}, "method ngram takes no model"),
        ({"method": "mtp", "model": "x"}, "method mtp takes no model"),
        ({"method": "eagle3"}, "method eagle3 needs a model"),
        ({"method": "draft_model", "model": ""}, "model must be a folder or a Hugging Face id, got ''"),
        ({"quantization": "x"}, "'quantization' is not known; it may have method, model, num_speculative_tokens"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens must be a whole number from 0 to 32, got 33"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be a whole number from 0 to 32, got True"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be a whole number from 1 to 16, got 0"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min must be at most prompt_lookup_max, 4"),
        ({"enable_adaptive_verification": 1}, "enable_adaptive_verification must be true or false, got 1"),
        ({"method": "eagle3", "model": "x", "speculative_token_map": "t"}, "map needs method mtp, got eagle3"),
        ({"method": "mtp", "speculative_token_map": 3}, "speculative_token_map must be a file of token ids, got 3"),
        ({"draft_lm_head_quantization": "int8"}, "quantization needs method mtp or eagle3 or dflash, got ngram"),
        ({"method": "mtp", "draft_lm_head_quantization": "x"}, "quantization must be fp8, int8, int4, got 'x'"),
        ([1], "speculative_config must be a JSON object"),
        (
            {"rejection_sample_method": "block"},
            "must be exact, standard, synthetic, got 'block'",
        ),
        ({"rejection_sample_method": "synthetic"}, "synthetic and synthetic_acceptance_length need each other"),
        ({"synthetic_acceptance_length": 2}, "synthetic and synthetic_acceptance_length need each other"),
        ({"synthetic_acceptance_length": 0.5}, "synthetic_acceptance_length must be a number from 1 to 33, got 0.5"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 9.5},
            "synthetic_acceptance_length must be at most 1 \\+ num_speculative_tokens, 9",
        ),
        ({"suffix_decoding_max_tree_depth": 9}, "suffix_decoding_max_tree_depth needs method suffix, got ngram"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": True}, "must be a number from 0 to 1, got True"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, "must be a whole number from 1 to 1000000"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="x", speculative_config=given)


def test_either_length_of_a_lookup_sets_the_other() -> None:
    assert parse({"prompt_lookup_min": 9}) == SpeculativeConfig(prompt_lookup_min=9, prompt_lookup_max=9)
    assert parse({"prompt_lookup_max": 2}) == SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=2)
    assert parse({}) == SpeculativeConfig("ngram", "", 8, 3, 6, enable_adaptive_verification=True)


def test_a_model_proposes_fewer_tokens_unless_it_is_said_how_many() -> None:
    assert parse({"method": "mtp"}).num_speculative_tokens == 3
    assert parse({"method": "mtp", "num_speculative_tokens": 5}).num_speculative_tokens == 5


def test_no_tokens_are_no_drafts() -> None:
    assert speculative_config({"num_speculative_tokens": 0}, on_accelerator=False) is None
    assert speculative_config({"num_speculative_tokens": 2}, on_accelerator=True) == SpeculativeConfig(
        num_speculative_tokens=2
    )


def test_without_a_setting_the_kind_of_device_decides() -> None:
    assert speculative_config(None, on_accelerator=False) == (SpeculativeConfig() if ON_CPUS else None)
    assert speculative_config(None, on_accelerator=True) == (SpeculativeConfig() if ON_ACCELERATORS else None)


def test_settings_of_lookup_in_earlier_answers() -> None:
    config = parse({"method": "suffix", "suffix_decoding_max_spec_factor": 2, "suffix_decoding_max_tree_depth": 12})
    assert config.suffix_limits == SuffixLimits(3, 12, 10_000, 2, 0.1)
    assert parse({}).suffix_limits is None
