"""`quire env`: versions and machine, to paste into a bug report."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "env",
        help="versions and machine, for bug reports",
        description="Show versions, machine and settings in the environment, to paste into a bug report. Shows no keys.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from engine.machine import report

    rows = report()
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:{width}}{value}")
    return 0
