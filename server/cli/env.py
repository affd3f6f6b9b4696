"""`quire env`: shows versions and machine, for bug reports."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "env",
        help="show versions and machine, for bug reports",
        description="Show versions, machine and environment settings, for bug reports. API keys are not shown.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from engine.setup.machine import report

    rows = report()
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:{width}}{value}")
    return 0
