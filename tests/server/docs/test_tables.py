"""docs/api.md holds what the requests' fields declare."""

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
