"""The commands and snippets that the documents show, as their readers would copy them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
PROGRAMS = ("quire", "python", "make", "curl", "docker", "pip", "uv", "git", "kill")


@dataclass(frozen=True)
class Command:
    """A command line of a document, split into words."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(' '.join(self.words).split())[:90]}"


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(document, text) of each fenced block."""
    for document in DOCUMENTS:
        for text in re.findall(
            rf"^ *```{language}\n(.*?)^ *```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            yield document.name, text


def commands() -> list[Command]:
    """Those of shell blocks, each once."""
    found = (Command(name, words) for name, text in blocks("sh") for words in statements(text))
    return list({command.words: command for command in found}.values())


def mentions() -> list[Command]:
    """Those that stand in a sentence or a table and have words beside the program's name, each once."""
    found = []
    for document in DOCUMENTS:
        prose = re.sub(r"^ *```.*?^ *```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for text in re.findall(r"`([^`]+)`", prose):
            program, _, rest = text.partition(" ")
            if program in PROGRAMS and rest:
                found.append(Command(document.name, tuple(shlex.split(text))))
    shown = {command.words for command in commands()}
    return [each for each in {command.words: command for command in found}.values() if each.words not in shown]


def snippets() -> dict[str, str]:
    """Whole Python programs, which begin with their imports, by where they stand; each once."""
    programs = {text: name for name, text in blocks("python") if text.startswith("from ")}
    return {f"{name}, program {number}": text for number, (text, name) in enumerate(programs.items())}


def excerpts() -> list[str]:
    """Python blocks that show a part of a file."""
    return [text for _, text in blocks("python") if not text.startswith("from ")]


def statements(block: str) -> Iterator[tuple[str, ...]]:
    """Commands of a block; quotes and backslashes may carry one over several lines."""
    pending = ""
    for line in block.splitlines(keepends=True):
        pending += line
        try:
            words = shlex.split(pending.replace("\\\n", " "), comments=True)
        except ValueError:  # inside a quotation
            continue
        if line.endswith("\\\n"):
            continue
        if words:
            yield tuple(words)
        pending = ""
    assert not pending, f"a quotation without an end: {pending}"
