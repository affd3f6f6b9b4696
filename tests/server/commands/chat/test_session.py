"""The commands of `quire chat`, with a model that says what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path

import pytest

from server.cli.chat.models import Message, Piece, RefusedError
from server.cli.chat.session import COMMANDS, Chat
from server.cli.chat.terminal import Show
from server.cli.common import SAMPLING_FLAGS, SamplingFlags


class Echo:
    """Answers with the number of its answer and the question."""

    name = "echo"

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], SamplingFlags]] = []

    async def answer(self, messages: list[Message], sampling: SamplingFlags) -> AsyncGenerator[Piece, None]:
        self.asked.append(([*messages], sampling))
        if messages[-1]["content"] == "refuse":
            raise RefusedError("too long")
        yield Piece(f"{len(self.asked)}: ", num_tokens=1)
        yield Piece(messages[-1]["content"], num_tokens=2)
        yield Piece(num_prompt_tokens=7, num_cached_tokens=4)

    async def close(self) -> None: ...


class Script:
    """A terminal at which these lines are typed."""

    def __init__(self) -> None:
        self.lines: Iterator[str] = iter(())
        self.shown: list[str] = []

    def read(self) -> str:
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        return line

    def say(self, text: str) -> None:
        self.shown.append(text)

    @contextlib.contextmanager
    def printing(self) -> Generator[Show, None, None]:
        parts: list[str] = []
        yield lambda piece: parts.append(piece.text)
        self.shown.append("".join(parts))


class Typed:
    def __init__(self, runner: asyncio.Runner) -> None:
        self.model, self.terminal = Echo(), Script()
        self._chat = Chat(self.model, self.terminal, SAMPLING_FLAGS(), None, runner)

    def __call__(self, *lines: str) -> list[str]:
        """Output when these lines are typed."""
        self.terminal.lines, self.terminal.shown = iter(lines), []
        self._chat.run()
        return self.terminal.shown

    def prompt(self) -> list[str]:
        """The texts that the model was last asked with."""
        return [message["content"] for message in self.model.asked[-1][0]]


@pytest.fixture
def typed() -> Iterator[Typed]:
    with asyncio.Runner() as runner:
        yield Typed(runner)


def test_a_conversation(typed: Typed) -> None:
    assert typed("Hi", "", "two\nlines") == ["1: Hi", "2: two\nlines"]
    assert typed.prompt() == ["Hi", "1: Hi", "two\nlines"]


def test_regen_answers_again_and_undo_forgets(typed: Typed) -> None:
    assert typed("Hi", "/regen", "and?") == ["1: Hi", "2: Hi", "3: and?"]
    assert typed.prompt() == ["Hi", "2: Hi", "and?"]
    assert typed("/undo", "so?") == ["Forgotten: and?", "4: so?"]
    assert typed.prompt() == ["Hi", "2: Hi", "so?"]
    assert typed("/new", "/undo", "/regen")[1:] == ["There is no question yet."] * 2


def test_a_refused_question_is_forgotten(typed: Typed) -> None:
    assert typed("Hi", "refuse", "/regen")[1:] == ["too long\n(/new starts a new conversation)", "3: Hi"]


def test_the_system_prompt(typed: Typed) -> None:
    typed("Hi", "/system Be kind.", "Hi")
    assert typed.prompt() == ["Be kind.", "Hi"]
    typed("/system", "Hi")
    assert typed.prompt() == ["Hi"]


def test_sampling_parameters(typed: Typed) -> None:
    shown = typed("/set", "/set temperature 0.5", "/set max-tokens=2k", "/set", "Hi")
    assert shown[:3] == ["All parameters have the model's defaults.", "temperature 0.5", "max_tokens 2000"]
    assert shown[3].split("\n") == ["temperature 0.5", "max_tokens 2000"]
    assert typed.model.asked[-1][1].given() == {"temperature": 0.5, "max_tokens": 2000}
    assert typed("/set temperature", "/set temperatur 1", "/set top_p 7") == [
        "temperature is reset to the default of the model",
        "There is no parameter temperatur (did you mean temperature?).",
        "top_p must be a number at least 0 and at most 1, got '7'",
    ]


def test_stats(typed: Typed) -> None:
    assert typed("/stats") == ["There is no answer yet."]
    shown = typed("Hi", "/stats")[-1]
    assert shown.startswith("prompt 7 tokens (4 cached), first token after 0.00 s, answer 3 tokens")


def test_save_and_load(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    shown = typed("/system Be kind.", "Hi", f"/save {file}", "/new", "/system", f"/load {file}", "and?")
    assert shown[2] == f"Saved 1 answer to {file}."
    assert typed.prompt() == ["Be kind.", "Hi", "1: Hi", "and?"]


@pytest.mark.parametrize(
    "content", ["not JSON", "[]", '{"messages": 3}', '{"messages": [1, 2]}', '{"messages": [{"role": "user"}]}']
)
def test_a_file_of_something_else_is_refused(typed: Typed, tmp_path: Path, content: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    for said in typed("Hi", f"/load {file}", f"/save {file}")[1:]:
        assert said.startswith(f"{file} is not a saved conversation")
    assert file.read_text() == content
    assert typed("/load /nowhere/file", "/load") == [
        "/nowhere/file: No such file or directory",
        "/load needs the name of a file.",
    ]
    typed("and?")
    assert typed.prompt() == ["Hi", "1: Hi", "and?"]


def test_commands_of_other_programs(typed: Typed) -> None:
    assert typed("Hi", "/retry", "/clear", "and?") == ["1: Hi", "2: Hi", "A new conversation.", "3: and?"]
    assert typed("/bye", "not read") == []


def test_unknown_commands_and_help(typed: Typed) -> None:
    unknown, help = typed("/regenn", "/help", "/quit", "not read")
    assert unknown == "There is no command /regenn (did you mean /regen?); /help lists them."
    assert all(command in help for command in COMMANDS)
