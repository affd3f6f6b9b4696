"""`quire completion`: writes a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from engine.flags import Parser

SHELLS = ("bash", "zsh", "fish")
EPILOG = """examples:
  quire completion bash > ~/.local/share/bash-completion/completions/quire
  quire completion zsh > ~/.zfunc/_quire       with fpath+=~/.zfunc before compinit in ~/.zshrc
  quire completion fish > ~/.config/fish/completions/quire.fish
"""


def add_parser(commands: Any, root: Parser) -> None:
    """`root`: the parser of the whole command line."""
    parser = commands.add_parser(
        "completion",
        help="write a completion script for bash, zsh or fish",
        description="Write a script that completes commands and options in a shell.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))

    def run(args: argparse.Namespace) -> int:
        import shtab

        print(shtab.complete(root, shell=args.shell))
        return 0

    parser.set_defaults(run=run)
