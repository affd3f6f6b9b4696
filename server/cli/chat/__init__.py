"""`quire chat`: a conversation in the terminal, with a running server or a model loaded in this process."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import Any

from engine import ConfigError, EngineConfig
from engine.flags import add_flags, check, flag, load
from server.cli.chat.models import Model, OwnModel, ServedModel
from server.cli.chat.session import HELP, NAMES, Chat
from server.cli.chat.terminal import RichTerminal, open_terminal
from server.cli.common import SAMPLING_FLAGS, load_with_model, model_argument

EPILOG = f"""examples:
  quire chat                                       with the bundled demo model
  quire chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
  quire chat --url http://127.0.0.1:8000           with a running OpenAI-compatible server

Enter sends the message, Alt-Enter starts a new line, pasted text keeps its lines. Commands in the chat:
{HELP}
"""


@dataclass(frozen=True)
class ChatFlags:
    """Chat."""

    url: str | None = flag(
        None,
        "server to chat with, such as http://127.0.0.1:8000 (default: load a model in this process)",
        metavar="URL",
    )
    api_key: str | None = flag(None, "API key for the server", metavar="KEY", secret=True)
    system: str | None = flag(None, "system prompt")
    markdown: bool = flag(True, "render Markdown")

    def __post_init__(self) -> None:
        check(self)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must begin with http:// or https://, got {self.url!r}")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat in the terminal",
        description="Chat in the terminal, with a running server or with a model loaded in this process.",
        epilog=EPILOG,
    )
    model_argument(parser)
    add_flags(parser, ChatFlags, SAMPLING_FLAGS, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name != "config"}
    with asyncio.Runner() as runner:
        if (url := load(given, ChatFlags)[0].url) is not None:
            chat, sampling = load(args, ChatFlags, SAMPLING_FLAGS)
            name = given.get("model") or given.get("model_argument")
            model: Model = runner.run(ServedModel.connect(url, chat.api_key, name))
        else:
            config, chat, sampling = load_with_model(args, EngineConfig, ChatFlags, SAMPLING_FLAGS)
            model = runner.run(OwnModel.start(config))
        try:
            terminal = open_terminal(NAMES, markdown=chat.markdown)
            if isinstance(terminal, RichTerminal):
                terminal.say(f"Chatting with {model.name}. /help lists commands, Alt-Enter starts a new line.")
            Chat(model, terminal, sampling, chat.system, runner).run()
        finally:
            runner.run(model.close())
    return 0
