"""Every pair of features together gives the answers of each request alone, or is refused at start with a reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from engine import LLM, AsyncEngine, ConfigError, EngineConfig, EngineError
from tests.composition import table
from tests.composition.configurations import (
    REQUESTS,
    WEIGHTS,
    Configuration,
    covering,
    pairs_of_drafters,
    possible_pairs,
    quick_pairs,
)
from tests.composition.features import BY_NAME, CHECKPOINTS, NO_PAIR, REFUSED
from tests.composition.run import COMMON, alone, differing, kept_by, make_model, together

pytestmark = pytest.mark.usefixtures("forked_engines")

QUICK = covering(quick_pairs())
REST = covering(possible_pairs() - quick_pairs() - pairs_of_drafters())
OF_DRAFTERS = covering(pairs_of_drafters())
MUCH = {"prefix cache", "chunked prefill", "preemption", "recorded steps", "LoRA adapters", "deferred sampling"}
DRAFTED = [
    Configuration("qwen3", frozenset({name, "offline", *MUCH, *REQUESTS}))
    for name in ("block drafters", "rejection sampling")
]
NUM_FIRST = 8  # configurations by default: each later one adds few pairs
# Of log-probabilities of float32 logits of about 1: sums over ranks and steps of other sizes round differently. Where
# values are rounded to 8 bits (keys and values, the inputs of quantised weights), a last bit can become one of eight.
TOLERANCE, ROUNDED_TOLERANCE = 2e-4, 0.1
ROUNDED = {"fp8 KV cache", *WEIGHTS}
MAX_FLIPPED = 2  # answers that may differ where rounding can also send a token to another expert


@pytest.mark.heavy
@pytest.mark.parametrize(
    "configuration",
    [*(pytest.param(each, id=str(each)) for each in (*QUICK[:NUM_FIRST], *DRAFTED)),
     *(pytest.param(each, id=str(each), marks=pytest.mark.slow)
       for each in (*QUICK[NUM_FIRST:], *REST, *OF_DRAFTERS))],
)  # fmt: skip
@pytest.mark.usefixtures("forked")
def test_answers_are_those_of_each_request_alone(
    configuration: Configuration, tiny_model: Path, tmp_path: Path
) -> None:
    model = make_model(configuration, tmp_path / "model", tiny_model)
    expected = kept_by(configuration, alone(configuration, model))
    is_rounded = bool(ROUNDED & configuration.features)
    for number, got in enumerate(together(configuration, model, tmp_path)):
        wrong = differing(expected, kept_by(configuration, got), ROUNDED_TOLERANCE if is_rounded else TOLERANCE)
        assert len(wrong) <= (MAX_FLIPPED if is_rounded and "experts" in configuration else 0), (number, wrong)


def test_every_possible_pair_is_in_a_configuration() -> None:
    assert possible_pairs() <= set().union(*(each.pairs for each in (*QUICK, *REST, *OF_DRAFTERS)))


def test_most_quick_pairs_are_in_the_first_configurations() -> None:
    first = set().union(*(each.pairs for each in QUICK[:NUM_FIRST]))
    assert len(quick_pairs() & first) >= 0.94 * len(quick_pairs())


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: " and ".join(sorted(pair)))
def test_a_refused_pair_ends_the_start_with_its_reason(pair: frozenset[str], tiny_model: Path, tmp_path: Path) -> None:
    own = {name for name in pair if BY_NAME[name].kind == "model"}
    checkpoint = next(name for name, each in CHECKPOINTS.items() if own <= each.features)
    model = make_model(Configuration(checkpoint, pair), tmp_path, tiny_model)
    settings = COMMON | {key: value for name in pair for key, value in BY_NAME[name].settings.items()}

    async def serve(model: str, **settings: Any) -> None:
        (await AsyncEngine.start(EngineConfig(model=model, **settings))).close()

    start = LLM if "offline" in pair else lambda *args, **settings: asyncio.run(serve(*args, **settings))
    with pytest.raises((ConfigError, EngineError), match=REFUSED[pair]):
        start(str(model), **settings)


def test_pairs_name_features() -> None:
    assert {name for pair in {**REFUSED, **NO_PAIR} for name in pair} <= BY_NAME.keys()


def test_the_table_in_the_documents_is_current() -> None:
    text = table.DOCUMENT.read_text(encoding="utf-8")
    assert table.updated(text) == text, "python -m tests.composition.table rewrites it"
