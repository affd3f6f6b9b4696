"""Writes the table of chat templates in docs/models.md: `python -m server.docs.chat_formats FOLDER`, with *.jinja in
it.

A file's name is the model's. Nothing but the template is looked at, so the table shows what is found for any model.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.text.chat_renderer import ChatRenderer
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.template_traits import TemplateTraits
from server.parsing.formats import TOOL_FORMATS
from server.parsing.probe import PROBED, find_tool_format
from server.parsing.probe_reasoning import probe_reasoning_format

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_TABLE = re.compile(r"(<!-- chat formats -->\n\n).*?(\n<!-- end -->)", re.DOTALL)


def table(folder: Path) -> str:
    """Return the table of a folder's templates, in Markdown."""
    rows = [row for path in sorted(folder.glob("*.jinja"), key=lambda path: path.name.lower()) for row in _rows(path)]
    head = "| chat template of | tool calls | reasoning | system messages |\n|---|---|---|---|\n"
    return head + "".join(rows)


def _rows(path: Path) -> Iterator[str]:
    try:
        template = ChatTemplate(path.read_text(encoding="utf-8"), SPECIAL)
    except (ChatTemplateError, UnicodeDecodeError):
        return
    cells = (path.stem, _tools(template), _reasoning(template), _system(ChatRenderer(template).traits(True)))
    yield f"| {' | '.join(cells)} |\n"


def _tools(template: ChatTemplate) -> str:
    found = find_tool_format("auto", template)
    if found is None:
        return "unknown" if "tools" in template.source else "none"
    name = f"as {_code(found.begin + '…')}" if found.name == PROBED else _code(found.name)
    return f"{name}, one in an answer" if found.single else name


def _reasoning(template: ChatTemplate) -> str:
    found = probe_reasoning_format("auto", template)
    return _code(found.begin) if found is not None else ""


def _system(traits: TemplateTraits) -> str:
    if not traits.system:
        return "in the user's"
    lost = [name for name, kept in (("several", traits.several_systems), ("late", traits.late_system)) if not kept]
    return f"first ({' and '.join(lost)}: moved)" if lost else "anywhere"


def _code(text: str) -> str:
    """Return code for a cell of a table."""
    ticks = "``" if "`" in text else "`"
    return ticks + text.strip().replace("\n", "⏎").replace("|", "\\|") + ticks


def formats_table() -> str:
    """Return the table of the listed formats, in Markdown."""
    rows = []
    for each in TOOL_FORMATS.values():
        names = ", ".join(map(_code, (each.name, *each.aliases)))
        rows.append(f"| {names} | {_code(each.begin)} |\n")
    return "| `--tool-call-parser` | a call begins with |\n|---|---|\n" + "".join(rows)


def updated(text: str, folder: Path) -> str:
    """Return the document with the table of this folder."""
    return _TABLE.sub(lambda match: match[1] + table(folder).rstrip("\n") + "\n" + match[2], text)


def main(argv: list[str]) -> None:
    """Rewrite the document. Raises SystemExit if the folder has no templates: the table would be empty."""
    parser = argparse.ArgumentParser(prog="python -m server.docs.chat_formats", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the chat templates, MODEL.jinja")
    folder = parser.parse_args(argv).folder
    if not list(folder.glob("*.jinja")):
        parser.error(f"{folder} holds no *.jinja")
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), folder), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
