"""`quire keys new`: creates an API key and its line in the server's key file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EPILOG = """examples:
  quire keys new alice --file keys.yaml                   then: quire serve MODEL --api-key-file keys.yaml
  quire keys new batch --file keys.yaml --requests-per-minute 600 --tokens-per-minute 100000
  KEY=$(quire keys new ci --file keys.yaml)               only the key is written to standard output

The file contains hashes, never keys. A running server reloads it when it changes: removing a line revokes the key
within a second.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("keys", help="create API keys", description="Manage the API keys of a server.")
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
    for what in ("requests", "tokens"):
        help = f"maximum {what} per minute (default: no limit)"
        new.add_argument(f"--{what}-per-minute", metavar="N", type=int, help=help)
    new.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the key to standard output and everything else to standard error."""
    from server.http.api_keys import Entry, add_to_file, entry_line, hashed, new_key

    key = new_key()
    entry = Entry(hashed(key), args.priority, args.requests_per_minute, args.tokens_per_minute, args.admin)
    if args.file is not None:
        add_to_file(args.file, args.name, entry)
        after = f"Added to {args.file}; a server with --api-key-file {args.file} loads it within a second."
    else:
        after = f"The line for the server's --api-key-file:\n\n  {entry_line(args.name, entry)}"
    print(f"The key of {args.name}, which is not shown again:\n", file=sys.stderr, flush=True)
    print(key, flush=True)
    print(f"\n{after}", file=sys.stderr)
    return 0
