"""Input and output of a chat: plain for pipes; with editing, history and Markdown for terminals."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from server.cli.chat.models import Piece

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Show = Callable[[Piece], None]
# Control characters except tab and newline: text of a model must not move the cursor or change the window's title.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal(Protocol):
    def read(self) -> str:
        """Return the user's input. `EOFError`: the user quits; `KeyboardInterrupt`: Ctrl-C."""

    def say(self, text: str) -> None:
        """Print a message of the program."""

    def printing(self) -> AbstractContextManager[Show]:
        """Return a context that prints the pieces of one answer and ends its last line."""


class PlainTerminal:
    """Reads lines and prints text as it arrives."""

    def read(self) -> str:
        return input()

    def say(self, text: str) -> None:
        print(text)

    @contextlib.contextmanager
    def printing(self) -> Generator[Show, None, None]:
        yield lambda piece: print(piece.text, end="", flush=True)
        print()


class RichTerminal:
    """A terminal with multi-line input (Alt-Enter or pasted), history, completion and Markdown."""

    def __init__(self, commands: Sequence[str], *, markdown: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from rich.console import Console

        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            key_bindings=keys,
            history=FileHistory(str(history_file())),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            prompt_continuation=lambda width, line, wrapped: "." * (width - 1) + " ",
        )
        self._console = Console(highlight=False)
        self._markdown = markdown

    def read(self) -> str:
        return self._session.prompt("> ")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=False)

    @contextlib.contextmanager
    def printing(self) -> Generator[Show, None, None]:
        if self._markdown:
            with MarkdownPrinter(self._console) as printer:
                yield printer.show
            return
        yield lambda piece: print(printable(piece.reasoning + piece.text), end="", flush=True)
        print()


def history_file() -> Path:
    """Return the path of the file with earlier questions, after creating its folder."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "quire"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / "chat_history"


def printable(text: str) -> str:
    """Return `text` without control characters."""
    return _CONTROLS.sub("", text)


class MarkdownPrinter:
    """Prints Markdown as it arrives: finished blocks once, and the unfinished last block again after each change."""

    def __init__(self, console: Console) -> None:
        from markdown_it import MarkdownIt
        from rich.live import Live

        self._console = console
        self._parse = MarkdownIt("commonmark").enable("table").parse
        self._rest = ""  # Markdown of the unfinished block
        self._thoughts = ""
        self._live = Live(console=console, refresh_per_second=10, transient=True, get_renderable=self._newest)

    def __enter__(self) -> MarkdownPrinter:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        rest, self._rest = self._rest, ""
        self._print_thoughts()
        self._live.stop()
        self._print(rest)
        self._console.print()

    def show(self, piece: Piece) -> None:
        self._thoughts += printable(piece.reasoning)
        if piece.text:
            self._print_thoughts()
        self._rest += printable(piece.text)
        if "\n" in piece.text:
            self._print_finished()

    def _print_thoughts(self) -> None:
        thoughts, self._thoughts = self._thoughts.strip(), ""
        if thoughts:
            self._console.print(thoughts, "", style="dim", markup=False, sep="\n")

    def _print_finished(self) -> None:
        """Print the finished blocks: all blocks except the last."""
        blocks = [token.map[0] for token in self._parse(self._rest) if token.level == 0 and token.map]
        if blocks and blocks[-1] > 0:
            lines = self._rest.splitlines(keepends=True)
            self._rest = "".join(lines[blocks[-1] :])
            self._print("".join(lines[: blocks[-1]]))
            self._console.print()

    def _print(self, markdown: str) -> None:
        from rich.markdown import Markdown

        if markdown.strip():
            self._console.print(Markdown(markdown))

    def _newest(self) -> _Newest:
        return _Newest(self._rest, self._thoughts)


class _Newest:
    """The unfinished block, cut to the last lines that fit the screen: lines that scroll away cannot be redrawn."""

    def __init__(self, markdown: str, thoughts: str) -> None:
        self._markdown, self._thoughts = markdown, thoughts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markdown import Markdown
        from rich.segment import Segment
        from rich.text import Text

        shown = Text(self._thoughts.strip(), style="dim") if self._thoughts else Markdown(self._markdown)
        lines: Iterable[list[Segment]] = console.render_lines(shown, options.update(height=None), pad=False)
        for line in list(lines)[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()


def open_terminal(commands: Sequence[str], *, markdown: bool) -> Terminal:
    """Return a `RichTerminal` if input and output are a terminal, else a `PlainTerminal`."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return RichTerminal(commands, markdown=markdown)
    return PlainTerminal()
