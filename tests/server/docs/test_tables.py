"""docs/api.md holds what the requests' fields declare."""

import dataclasses

from engine.core.parameters import parameter, parameters_of
from engine.core.sampling_params import SamplingParams
from server.docs.tables import API, tables, updated
from server.generation.parameters import PARAMETERS


def test_the_document_is_as_generated() -> None:
    text = API.read_text(encoding="utf-8")
    assert updated(text) == text, "python -m server.docs.tables rewrites it"


def test_a_stale_table_is_rewritten() -> None:
    text = API.read_text(encoding="utf-8")
    stale = text.replace("| `temperature` |", "| `heat` |")
    assert stale != text
    assert updated(stale) == text


def test_every_table_is_in_the_document() -> None:
    text = API.read_text(encoding="utf-8")
    assert [name for name in tables() if f"<!-- parameters: {name} -->" not in text] == []


def test_every_declared_parameter_has_its_row() -> None:
    rows = "".join(tables().values())
    assert [name for name in PARAMETERS if f"| `{name}` |" not in rows] == []


def test_a_declared_parameter_needs_no_other_place() -> None:
    """What has a declaration beside it has range, kind and default from there."""

    @dataclasses.dataclass
    class Params:
        heat: float | None = parameter(0.5, "how hot", above=0, at_most=2)
        inner: int = 3

    found = parameters_of(Params)
    assert found.keys() == {"heat"}
    assert (found["heat"].kind, found["heat"].is_optional, found["heat"].default) == (float, True, 0.5)
    assert found["heat"].wanted == "in (0, 2]"
    assert {"detokenize", "structured_outputs"}.isdisjoint(parameters_of(SamplingParams))
