"""The command `quire`: the parser of its subcommands, each of which is a module, and the display of errors.

Slow imports happen inside `main`, so that Ctrl-C ends the command without a traceback even during start-up.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.flags import Parser

# Modules of this folder.
COMMANDS = ("serve", "chat", "generate", "plan", "pull", "models", "count", "check", "bench", "top", "keys", "env")
EPILOG = """examples:
  quire serve                             serve the bundled demo model: API and chat page at http://127.0.0.1:8000
  quire serve Qwen/Qwen3-0.6B             serve a model from Hugging Face, downloaded once
  quire chat --model ./my-model           chat in the terminal
  quire generate "Once upon a time"       continue a text
  quire plan Qwen/Qwen3-32B --gpu h100    what a model needs: memory, context, speed
  quire pull Qwen/Qwen3-0.6B              download a model without serving it
  quire models                            list the supported model families and formats
  quire count zai-org/GLM-4.7-Flash *.txt count tokens of texts, for a smaller draft head
  quire check http://127.0.0.1:8000       test which API features a server supports
  quire bench throughput --help           measure performance
  quire top http://127.0.0.1:8000         watch a running server
  quire keys new alice --file keys.yaml   create an API key
  quire env                               versions and machine, for bug reports

`quire completion bash` writes a script for TAB completion. QUIRE_LOG_LEVEL=debug shows tracebacks of errors.
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0: success; 1: error; 2: wrong command line; 130: Ctrl-C."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has exited, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    from server.cli.environment import foreign_package

    if (found := foreign_package()) is not None:
        print(f"quire: error: {found}", file=sys.stderr)
        return 1
    from engine.utils.imports import uncollected
    from engine.utils.log import configure_logging, debugging

    with uncollected():
        parser = command_line(words[0] if words else "")
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(words)
    try:
        configure_logging()
        return int(args.run(args))
    except Exception as error:
        if debugging() or not _is_plain(error):
            raise
        print(f"quire {args.command}: error: {args.parser.with_options(str(error))}", file=sys.stderr)
        return 1


def command_line(only: str = "") -> Parser:
    """Return the parser of all commands, or of the one named `only`, which takes a tenth of a second less."""
    from engine import __version__
    from engine.flags import Parser

    parser = Parser(
        prog="quire",
        description="Quire serves large language models: OpenAI-compatible HTTP API, chat page, offline generation.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    for name in (only,) if only in COMMANDS else COMMANDS:
        importlib.import_module(f"server.cli.{name}").add_parser(commands)
    if only not in COMMANDS:
        importlib.import_module("server.cli.completion").add_parser(commands, parser)
    for each in commands.choices.values():
        each.set_defaults(parser=each)
    return parser


def _is_plain(error: Exception) -> bool:
    """Return whether the message suffices without a traceback."""
    from engine import ConfigError, EngineError, ModelError, TokenizerError
    from engine.text.chat_template import ChatTemplateError

    return isinstance(error, (ConfigError, EngineError, ModelError, TokenizerError, ChatTemplateError))
