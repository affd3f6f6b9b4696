"""An attack that is too slow for another client is measured again; the second figures count."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from tests.attack import __main__ as attacks
from tests.attack.attacks import ATTACKS
from tests.attack.bystander import Waits


@pytest.mark.parametrize(
    ("seconds", "blocks", "expected"),
    [
        ([0.2, 0.01], 0.0, (0.01, 20.0, [])),
        ([0.2, 0.1], 0.0, (0.1, 20.0, ["another's request 10.0 times as long"])),
        ([0.01], 0.0, (0.01, None, [])),
        ([0.2], 0.5, (0.2, None, ["another's request 20.0 times as long", "blocks in use"])),
    ],
)
def test_time_alone_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
    seconds: list[float],
    blocks: float,
    expected: tuple[float, float | None, list[str]],
) -> None:
    alone, given = Waits([0.01], [0.01]), iter(seconds)

    class Running:
        @staticmethod
        def poll() -> None: ...

    class Target:
        process = Running

    @contextlib.contextmanager
    def watching(target: Any) -> Iterator[Waits]:
        yield alone

    async def take_alone(target: Any) -> Waits:
        return alone

    async def attack(target: Any, each: Any, alone: Waits) -> attacks.Result:
        request = next(given)
        result = attacks.Result(
            each.name, 1.0, {}, 1, 0.01, request, request, request, 1, alone.slow_request, 1, 1, blocks, 0.0, None, []
        )
        result.failures = list(attacks._failures(result, each, Counter()))
        return result

    async def nothing(*args: Any) -> None: ...

    for name, fake in (("watching", watching), ("_alone", take_alone), ("attack", attack), ("used", nothing)):
        monkeypatch.setattr(attacks, name, fake)
    monkeypatch.setattr(attacks, "ALONE_SECONDS", 0)
    (result,) = asyncio.run(attacks.run_all(Target, [ATTACKS[0]], Console(quiet=True)))  # type: ignore[arg-type]
    assert (result.request, result.first_slower, result.failures) == expected
    assert next(given, None) is None
    attacks.table([result])
