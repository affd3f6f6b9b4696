"""Grammars that were asked for before are neither written nor refused anew, within bounds."""

import math

import pytest

from engine.core.params.structured import StructuredOutputs, Tag, Tags
from engine.errors import ParameterError, TagsError
from engine.processing import grammar_cache
from engine.processing.grammar_cache import GrammarCache, TooSlowError


def tools(*schemas: object) -> StructuredOutputs:
    return StructuredOutputs(
        tags=Tags(trigger="<", tags=[Tag(begin="<", schema={"enum": [s]}, end=">") for s in schemas])
    )


class Maker:
    """Counts its calls."""

    def __init__(self, error: ValueError | None = None) -> None:
        self.num_calls, self.error = 0, error
        self.cache = GrammarCache(self)

    def __call__(self, asked: StructuredOutputs) -> StructuredOutputs:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return StructuredOutputs(compiled=f"{asked}", notes=((None, "a note"),))


def test_the_same_is_made_once() -> None:
    maker = Maker()
    first = maker.cache(tools(1, 2))
    assert maker.cache(tools(1, 2)) == first
    assert maker.num_calls == 1
    for other in (tools(2, 1), tools(1, 2.0), tools(1, "2"), tools(1, None), tools(1, math.nan)):
        assert maker.cache(other) != first
    assert maker.num_calls == 6


@pytest.mark.parametrize(
    "error", [ValueError("no"), ParameterError("structured_outputs.json", "no", ": "), TagsError({1: "no"})]
)
def test_so_are_refusals(error: ValueError) -> None:
    maker = Maker(error)
    for _ in range(2):
        with pytest.raises(type(error)) as found:
            maker.cache(tools(1))
        assert str(found.value) == str(error)
        assert vars(found.value) == vars(error)
    assert maker.num_calls == 1


def test_but_not_those_for_want_of_time() -> None:
    maker = Maker(TooSlowError("structured_outputs.tags", "no"))
    for _ in range(2):
        with pytest.raises(TooSlowError):
            maker.cache(tools(1))
    assert maker.num_calls == 2


def test_values_that_are_not_of_json() -> None:
    maker = Maker()
    for _ in range(2):
        maker.cache(tools(1 << 80))
        maker.cache(tools("\ud800"))
    assert maker.num_calls == 4


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_CHARACTERS", 5000)
    maker = Maker()
    for number in range(50):
        maker.cache(tools(number))
        maker.cache(tools(0))
    assert maker.num_calls == 50
    maker.cache(tools(1))
    assert maker.num_calls == 51
