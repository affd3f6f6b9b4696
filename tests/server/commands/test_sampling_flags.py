"""The sampling options of `quire generate` and `quire chat` follow from `SamplingParams`."""

import pytest

from engine.core.params.declare import parameters_of
from engine.core.params.sampling import SamplingParams
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, load
from server.cli.common import SAMPLING_FLAGS, SamplingFlags


def given(*words: str) -> SamplingFlags:
    parser = Parser()
    add_flags(parser, SAMPLING_FLAGS)
    (flags,) = load(parser.parse_args(words), SAMPLING_FLAGS, environ={})
    assert isinstance(flags, SamplingFlags)
    return flags


def test_options_become_sampling_parameters() -> None:
    flags = given("--top-n-sigma", "1.5", "--max-tokens", "2k", "--ignore-eos", "--stop", "a", "b")
    params = flags.params({"temperature": 0.3, "top_n_sigma": 9})
    assert (params.top_n_sigma, params.max_tokens, params.ignore_eos) == (1.5, 2000, True)
    assert (params.temperature, params.stop_strings) == (0.3, ["a", "b"])


def test_nothing_given_leaves_the_models_defaults() -> None:
    assert given().given() == {}
    assert given().params({"top_k": 5}) == SamplingParams(max_tokens=None, top_k=5)


@pytest.mark.parametrize("name", ["temperature", "top_p", "dry_allowed_length", "xtc_probability"])
def test_ranges_and_help_are_the_declared_ones(name: str) -> None:
    declaration = parameters_of(SamplingParams)[name].declaration
    option = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{option} must be .* at most {declaration.at_most:g}"):
        given(option, str((declaration.at_most or 0) + 1))
    parser = Parser()
    add_flags(parser, SAMPLING_FLAGS)
    assert declaration.help in " ".join(parser.format_help().split())
