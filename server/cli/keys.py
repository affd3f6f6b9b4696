"""`quire keys`: creates, lists and removes API keys in the server's key file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EPILOG = """examples:
  quire keys new alice --file keys.yaml                   then: quire serve MODEL --api-key-file keys.yaml
  quire keys new batch --file keys.yaml --requests-per-minute 600 --tokens-per-minute 100000
  KEY=$(quire keys new ci --file keys.yaml)               only the key is written to standard output
  quire keys list --file keys.yaml                        names, limits and rights
  quire keys remove alice --file keys.yaml                revokes the key within a second

The file contains hashes, never keys. A running server reloads it when it changes.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        help="create, list and remove API keys",
        description="Manage the API keys of a server.",
        epilog=EPILOG,
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    new = actions.add_parser(
        "new", help="create a key", description="Create an API key and show it once.", epilog=EPILOG
    )
    new.add_argument("name", metavar="NAME", help="name of the key's owner, shown in logs and metrics")
    new.add_argument("--file", metavar="FILE", type=Path, help="key file to add the key to, created if missing")
    new.add_argument("--priority", action="store_true", help="allow requests with this key to set a `priority` below 0")
    new.add_argument(
        "--admin",
        action="store_true",
        help="let this key see other keys' requests and usage, and empty the prefix cache",
    )
    help = "let this key use these LoRA adapters alone, none if none is named (default: all)"
    new.add_argument("--adapters", metavar="ADAPTER", nargs="*", help=help)
    for what in ("requests", "tokens"):
        help = f"maximum {what} per minute (default: no limit)"
        new.add_argument(f"--{what}-per-minute", metavar="N", type=int, help=help)
    new.set_defaults(run=run)
    shown = actions.add_parser("list", help="list the keys of a file", description="List the keys of a key file.")
    remove = actions.add_parser("remove", help="remove a key", description="Remove a key from a key file.")
    remove.add_argument("name", metavar="NAME", help="name of the key's owner")
    for action in (shown, remove):
        action.add_argument("--file", metavar="FILE", type=Path, required=True, help="key file of the server")
    shown.set_defaults(run=run_list)
    remove.set_defaults(run=run_remove)


def run_list(args: argparse.Namespace) -> int:
    """Print a line for each owner of keys."""
    from server.http.api_keys import read_entries

    rows: list[tuple[str, ...]] = [("NAME", "KEYS", "REQUESTS/MIN", "TOKENS/MIN", "MAY")]
    for name, entry in read_entries(args.file).items():
        limits = (entry.requests_per_minute, entry.tokens_per_minute)
        rights = ", ".join(right for right, has in (("priority", entry.priority), ("admin", entry.admin)) if has)
        if entry.adapters is not None:
            rights = f"{rights}; adapters: {', '.join(entry.adapters) or 'none'}".removeprefix("; ")
        num_keys = 1 if isinstance(entry.key, str) else len(entry.key)
        rows.append((name, str(num_keys), *("–" if limit is None else f"{limit:,}" for limit in limits), rights))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def run_remove(args: argparse.Namespace) -> int:
    from server.http.api_keys import remove_from_file

    remove_from_file(args.file, args.name)
    print(f"Removed {args.name} from {args.file}. A running server refuses the key within a second.", file=sys.stderr)
    return 0


def run(args: argparse.Namespace) -> int:
    """Print the key to standard output and everything else to standard error."""
    from server.http.api_keys import Entry, add_to_file, entry_line, hashed, new_key

    key = new_key()
    limits = args.requests_per_minute, args.tokens_per_minute
    entry = Entry(hashed(key), args.priority, *limits, args.admin, args.adapters)
    if args.file is not None:
        add_to_file(args.file, args.name, entry)
        after = f"Added to {args.file}; a server with --api-key-file {args.file} loads it within a second."
    else:
        after = f"The line for the server's --api-key-file:\n\n  {entry_line(args.name, entry)}"
    print(f"The key of {args.name}, which is not shown again:\n", file=sys.stderr, flush=True)
    print(key, flush=True)
    print(f"\n{after}", file=sys.stderr)
    return 0
