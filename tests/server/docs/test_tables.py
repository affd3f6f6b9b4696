"""The tables in docs/ hold what is declared."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.flags import settings_of
from server.apis.parameters import PARAMETERS
from server.docs import chat_formats
from server.docs.tables import DOCUMENTS, tables, updated
from server.settings import ServerConfig


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_document_is_as_generated(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert updated(text) == text, "python -m server.docs.tables rewrites it"


@pytest.mark.parametrize(("document", "name"), [(DOCUMENTS[0], "`temperature`"), (DOCUMENTS[1], "`--max-model-len`")])
def test_a_stale_table_is_rewritten(document: Path, name: str) -> None:
    text = document.read_text(encoding="utf-8")
    stale = text.replace(f"| {name} |", "| `heat` |")
    assert stale != text
    assert updated(stale) == text


def test_every_table_is_in_a_document() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert [name for name in tables() if f": {name} -->" not in text] == []


def test_every_declared_parameter_and_flag_has_its_row() -> None:
    rows = "".join(tables().values())
    assert [name for name in PARAMETERS if f"| `{name}` |" not in rows] == []
    options = [each.option for cls in (EngineConfig, ServerConfig) for each in settings_of(cls).values()]
    assert [option for option in options if f"| `{option}`" not in rows] == []


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("EMPTY", 2)])
def test_the_table_of_templates_stays_without_templates(
    argument: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "models.md"
    document.write_text(DOCUMENTS[2].read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(chat_formats, "DOCUMENT", document)
    with pytest.raises(SystemExit) as ended:
        chat_formats.main([argument.replace("EMPTY", str(tmp_path))])
    assert ended.value.code == status
    assert document.read_text(encoding="utf-8") == DOCUMENTS[2].read_text(encoding="utf-8")
