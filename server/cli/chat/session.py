"""A chat session: the conversation, the chat commands and the timings of answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from engine import ConfigError
from engine.flags import nearest, settings_of
from server.cli.chat.models import Message, Model, Piece, RefusedError
from server.cli.chat.terminal import Terminal
from server.cli.common import SAMPLING_FLAGS, SamplingFlags

COMMANDS = {
    "/new": "start a new conversation",
    "/system [TEXT]": "set or remove the system prompt, and start a new conversation",
    "/regen": "answer the last question again",
    "/undo": "remove the last question and its answer",
    "/set [NAME [VALUE]]": "show all sampling parameters, or set one; without a value: reset it to the model's default",
    "/stats": "show the timings of the last answer",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "load a conversation from a file",
    "/help": "show this list",
    "/quit": "quit, like Ctrl-D",
}
SYNONYMS = {"/retry": "/regen", "/clear": "/new", "/reset": "/new", "/?": "/help", "/exit": "/quit", "/bye": "/quit"}
NAMES = [command.split()[0] for command in COMMANDS]
HELP = "\n".join([*(f"{name:<20} {what}" for name, what in COMMANDS.items()), "Ctrl-C stops the answer, not the chat."])


@dataclass
class AnswerStats:
    """Token counts and times (seconds) of one answer."""

    began: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, piece: Piece) -> None:
        if piece.text or piece.reasoning:
            self.last = time.monotonic()
            self.first = self.first or self.last
        self.num_tokens += piece.num_tokens
        self.num_prompt_tokens += piece.num_prompt_tokens
        self.num_cached_tokens += piece.num_cached_tokens

    def __str__(self) -> str:
        seconds = self.last - self.first
        pace = f", {(self.num_tokens - 1) / seconds:.1f} tokens/s" if self.num_tokens > 1 and seconds > 0 else ""
        return (
            f"prompt {self.num_prompt_tokens} tokens ({self.num_cached_tokens} cached), first token after "
            f"{self.first - self.began:.2f} s, answer {self.num_tokens} tokens{pace}"
        )


class Chat:
    """A chat with a model. `answer_in`: runs the coroutine of an answer, so that Ctrl-C stops only the answer."""

    def __init__(
        self,
        model: Model,
        terminal: Terminal,
        sampling: SamplingFlags,
        system: str | None,
        answer_in: asyncio.Runner,
    ) -> None:
        self._model, self._terminal, self._sampling, self._system = model, terminal, sampling, system
        self._runner = answer_in
        self._messages: list[Message] = []  # questions and answers alternately, without the system prompt
        self._stats: AnswerStats | None = None

    def run(self) -> None:
        """Read questions and commands, and answer them, until the user quits."""
        while True:
            try:
                line = self._terminal.read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._terminal.say("\n(/quit or Ctrl-D quits)")
                continue
            if SYNONYMS.get(line, line) == "/quit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.ask(line)

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        name, rest = SYNONYMS.get(name, name), rest.strip()
        match name:
            case "/new":
                self._messages.clear()
                self._terminal.say("A new conversation.")
            case "/system":
                self._system = rest or None
                self._messages.clear()
                told = f"with the system prompt: {rest}" if rest else "without a system prompt."
                self._terminal.say(f"A new conversation, {told}")
            case "/regen" | "/undo":
                self._step_back(again=name == "/regen")
            case "/set":
                self._set(rest)
            case "/stats":
                self._terminal.say(str(self._stats or "There is no answer yet."))
            case "/save" | "/load":
                self._transfer(name, rest)
            case "/help":
                self._terminal.say(HELP)
            case _:
                self._terminal.say(f"There is no command {name}{nearest(name, NAMES)}; /help lists them.")

    def ask(self, question: str) -> None:
        """Answer a question and keep both; drop the question if the model rejects it."""
        head = [{"role": "system", "content": self._system}] if self._system else []
        self._messages.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            self._runner.run(self._answer(head + self._messages, answer))
        except KeyboardInterrupt:
            self._terminal.say(" [stopped]")
        except RefusedError as error:
            self._terminal.say(f"{error}\n(/new starts a new conversation)")
            self._messages.pop()
            return
        self._messages.append({"role": "assistant", "content": "".join(answer)})

    async def _answer(self, messages: list[Message], answer: list[str]) -> None:
        self._stats = AnswerStats(time.monotonic())
        with self._terminal.printing() as show:
            async with contextlib.aclosing(self._model.answer(messages, self._sampling)) as pieces:
                async for piece in pieces:
                    self._stats.add(piece)
                    answer.append(piece.text)
                    show(piece)

    def _step_back(self, *, again: bool) -> None:
        if not self._messages:
            self._terminal.say("There is no question yet.")
            return
        question = self._messages[-2]["content"]
        del self._messages[-2:]
        if again:
            self.ask(question)
        else:
            self._terminal.say(f"Forgotten: {question}")

    def _set(self, words: str) -> None:
        settings = settings_of(SAMPLING_FLAGS)
        name, value = [*re.split("[ =]", words, maxsplit=1), ""][:2]
        name = name.replace("-", "_")
        if not name:
            given = self._sampling.given()
            self._terminal.say(
                "\n".join(f"{key} {value}" for key, value in given.items())
                or "All parameters have the model's defaults."
            )
        elif name not in settings:
            self._terminal.say(f"There is no parameter {name}{nearest(name, settings)}.")
        else:
            try:
                changed = settings[name].convert(value.strip(), name) if value.strip() else None
                self._sampling = dataclasses.replace(self._sampling, **{name: changed})  # type: ignore[type-var]
                self._terminal.say(f"{name} {changed if value.strip() else 'is reset to the default of the model'}")
            except ConfigError as error:
                self._terminal.say(str(error))

    def _transfer(self, command: str, file: str) -> None:
        try:
            if not file:
                self._terminal.say(f"{command} needs the name of a file.")
            elif command == "/save":
                written = {"system": self._system, "messages": self._messages}
                save_conversation(Path(file).expanduser(), json.dumps(written, ensure_ascii=False, indent=1))
                self._terminal.say(f"Saved {num_answers(self._messages)} to {file}.")
            else:
                self._system, self._messages = read_conversation(Path(file).expanduser())
                self._terminal.say(f"Loaded {num_answers(self._messages)} from {file}.")
        except OSError as error:
            self._terminal.say(f"{file}: {error.strerror or error}")
        except ValueError as error:
            self._terminal.say(f"{file} is not a saved conversation: {error}")


def num_answers(messages: list[Message]) -> str:
    count = len(messages) // 2
    return f"{count} answer{'s' * (count != 1)}"


def save_conversation(path: Path, text: str) -> None:
    """Write a new file, or over an empty one or a saved conversation. `ValueError` if it is another file."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    if path.exists() and path.stat().st_size:
        read_conversation(path)
    path.write_text(text, encoding="utf-8")


def read_conversation(path: Path) -> tuple[str | None, list[Message]]:
    """Return the system prompt and the messages of a saved conversation. `ValueError` when the file is not one."""
    read = json.loads(path.read_text(encoding="utf-8"))
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list):
        raise ValueError("it has no messages")
    for message, role in zip(messages, ["user", "assistant"] * len(messages), strict=False):
        if not isinstance(message, dict) or message.get("role") != role or not isinstance(message.get("content"), str):
            raise ValueError("user and assistant must alternate")
    if len(messages) % 2:
        raise ValueError("its last question has no answer")
    return read.get("system"), [{"role": each["role"], "content": each["content"]} for each in messages]
