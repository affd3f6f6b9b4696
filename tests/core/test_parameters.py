"""Declared parameters: what follows from a declaration."""

# ruff: noqa: RUF009 (`parameter` declares a field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from engine.core.params.declare import NumberChecks, parameter, parameters_of
from engine.core.params.sampling import SamplingParams


@dataclass
class Params:
    heat: float | None = parameter(0.5, "how hot", above=0, at_most=2)
    count: int = parameter(1, "how many", at_least=1)
    level: int = parameter(0, "which", at_least=-1, at_most=9, wanted="-1 or a digit")
    words: list[str] | None = parameter(None, "what to say")
    inner: int = 3

    def __post_init__(self) -> None:
        _check(self)


_check = NumberChecks(Params)


def test_declarations() -> None:
    found = parameters_of(Params)
    assert list(found) == ["heat", "count", "level", "words"]
    assert [each.kind for each in found.values()] == [float, int, int, list[str]]
    assert [each.is_optional for each in found.values()] == [True, False, False, True]
    assert [found[name].wanted for name in ("heat", "count", "level")] == ["in (0, 2]", "at least 1", "-1 or a digit"]


@pytest.mark.parametrize(
    "values", [{}, {"heat": None}, {"heat": 1}, {"heat": 2.0}, {"heat": 1e-300}, {"count": 10**30}, {"level": -1}]
)
def test_values_in_range(values: dict[str, Any]) -> None:
    Params(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heat": 0}, "heat must be in (0, 2], got 0"),
        ({"heat": 2.1}, "heat must be in (0, 2], got 2.1"),
        ({"heat": float("nan")}, "heat must be in (0, 2], got nan"),
        ({"heat": True}, "heat must be in (0, 2], got True"),
        ({"heat": "1"}, "heat must be in (0, 2], got '1'"),
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": 1.0}, "count must be at least 1, got 1.0"),
        ({"count": None}, "count must be at least 1, got None"),
        ({"level": 10}, "level must be -1 or a digit, got 10"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Params(**values)
    assert str(caught.value) == message


def test_every_number_of_the_sampling_parameters_has_a_range() -> None:
    numbers = [each for each in parameters_of(SamplingParams).values() if each.kind in (int, float)]
    assert [each.name for each in numbers if each.declaration.at_least is None and each.declaration.above is None] == []
    assert len(numbers) > 15
