"""`quire keys new`: a key for a server that asks for keys, and its line for that server's file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EPILOG = """examples:
  quire keys new alice --file keys.yaml                   then: quire serve MODEL --api-key-file keys.yaml
  quire keys new batch --file keys.yaml --requests-per-minute 600 --tokens-per-minute 100000
  KEY=$(quire keys new ci --file keys.yaml)               only the key goes to standard output

The file holds hashes, never keys. A running server reads it again when it changes: a line that is taken out locks its key
out within a second.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("keys", help="make API keys", description="API keys of a server.")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    new = actions.add_parser("new", help="make a key", description="Make a key and show it, once.", epilog=EPILOG)
    new.add_argument("name", metavar="NAME", help="who or what the key is for: stands in logs and metrics")
    new.add_argument("--file", metavar="FILE", type=Path, help="file of --api-key-file to add it to (made if need be)")
    new.add_argument("--priority", action="store_true", help="the `priority` of its requests counts")
    for what in ("requests", "tokens"):
        help = f"most {what} in a minute (else no limit)"
        new.add_argument(f"--{what}-per-minute", metavar="N", type=int, help=help)
    new.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The key on standard output; all else that is to be said on standard error."""
    from server.keys import Entry, add_to_file, entry_line, hashed, new_key

    key = new_key()
    entry = Entry(hashed(key), args.priority, args.requests_per_minute, args.tokens_per_minute)
    if args.file is not None:
        add_to_file(args.file, args.name, entry)
        after = f"Added to {args.file}; a server with --api-key-file {args.file} knows it within a second."
    else:
        after = f"The line for the server's --api-key-file:\n\n  {entry_line(args.name, entry)}"
    print(f"The key of {args.name}, shown this once:\n", file=sys.stderr, flush=True)
    print(key, flush=True)
    print(f"\n{after}", file=sys.stderr)
    return 0
