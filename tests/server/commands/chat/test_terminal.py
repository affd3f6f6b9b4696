"""Input and output of `quire chat` at a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from server.cli.chat.models import Piece
from server.cli.chat.session import NAMES
from server.cli.chat.terminal import MarkdownPrinter, RichTerminal, history_file, printable


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


def test_enter_sends_and_alt_enter_begins_a_line(keys: PipeInput) -> None:
    terminal = RichTerminal(NAMES, markdown=True)
    keys.send_text("one\x1b\rtwo\r")
    assert terminal.read() == "one\ntwo"


def test_pasted_text_keeps_its_lines(keys: PipeInput) -> None:
    terminal = RichTerminal(NAMES, markdown=True)
    keys.send_text("\x1b[200~first\nsecond\n\x1b[201~ and so\r")
    assert terminal.read() == "first\nsecond\n and so"


def test_questions_are_remembered(keys: PipeInput) -> None:
    keys.send_text("what was this\r")
    assert RichTerminal(NAMES, markdown=True).read() == "what was this"
    assert "what was this" in history_file().read_text()
    keys.send_text("\x1b[A\r")
    assert RichTerminal(NAMES, markdown=True).read() == "what was this"


def test_ctrl_d_leaves(keys: PipeInput) -> None:
    terminal = RichTerminal(NAMES, markdown=True)
    keys.send_text("\x04")
    with pytest.raises(EOFError):
        terminal.read()


def test_model_text_cannot_control_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\x9b2Jc\td\n\r") == "a]0;titleb2Jc\td\n"


def shown(*pieces: Piece, width: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=20, force_terminal=True, color_system=None)
    with MarkdownPrinter(console) as printer:
        for piece in pieces:
            printer.show(piece)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_finished_blocks_are_printed_once() -> None:
    text = "# Title\n\nSome **bold** words.\n\n- one\n- two\n\n```python\nx = 1\n```\n\nEnd."
    out = shown(*(Piece(char) for char in text))
    for part in ("Title", "Some bold words.", "• one", "x = 1", "End."):
        assert part in out
    assert "**" not in out
    # Below the last cursor movement there is only what was printed last: finished blocks were printed before, for good.
    assert out.rpartition("\x1b[")[2].count("Title") == 0
    assert [line for line in shown(Piece(text)).splitlines() if line.strip()][-1].strip() == "End."


def test_long_lines_are_wrapped_at_words() -> None:
    lines = shown(Piece("several words that do not fit " * 3), width=30).splitlines()
    assert all(len(line) <= 30 for line in lines if "\x1b" not in line)
    assert any(line.strip() == "several words that do not fit" for line in lines)


def test_thoughts_come_before_the_answer() -> None:
    out = shown(Piece(reasoning="Let me "), Piece(reasoning="see."), Piece("Well."))
    assert out.index("Let me see.") < out.index("Well.")
