"""`quire count MODEL FILE…`: counts the tokens of texts, and saves the most frequent ones for a draft head."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.flags import add_flags, flag, load

EPILOG = """examples:
  quire count zai-org/GLM-4.7-Flash answers/*.txt --size 32768 --output tokens.json
  quire serve zai-org/GLM-4.7-Flash --speculative-config '{"method": "mtp", "speculative_token_map": "tokens.json"}'

A draft head that proposes fewer tokens is faster, and answers stay what they are. Texts should be answers of the model
itself to prompts like those that it will get. Files are texts, or .jsonl with an object in each line: its "text", or
the contents of its "messages" by the assistant.
"""
PART = 1 << 20  # characters that are tokenised at a time, up to the end of a line


@dataclass(frozen=True)
class CountFlags:
    """Counting."""

    size: int = flag(32_768, "tokens that are kept", at_least=1)
    output: str = flag("tokens.json", "where to save them", metavar="FILE")
    download_dir: str | None = flag(None, "folder of downloads (default: Hugging Face's cache)", metavar="FOLDER")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "count",
        help="count tokens of texts, for a smaller draft head",
        description="Count the tokens of texts, and save the most frequent ones for a draft head.",
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id of the model that is served")
    parser.add_argument("files", metavar="FILE", nargs="+", help="texts")
    add_flags(parser, CountFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Count, save the token ids, and print how much of the texts they are."""
    from engine.setup.token_counts import save_most_frequent

    given = vars(args).copy()
    model, files = given.pop("model"), given.pop("files")
    (flags,) = load(given, CountFlags)
    kept, counts = save_most_frequent(model, texts(files), flags.size, Path(flags.output), flags.download_dir)
    total = sum(counts.values())
    share = sum(counts[token_id] for token_id in kept) / max(total, 1)
    print(f"{len(kept):,} of {len(counts):,} tokens are {share:.2%} of {total:,}: {flags.output}")
    return 0


def texts(files: list[str]) -> Iterator[str]:
    """Yield the texts of files, long ones in parts. Raises `ConfigError`."""
    from engine import ConfigError

    for name in files:
        try:
            with Path(name).open(encoding="utf-8") as file:
                if name.endswith(".jsonl"):
                    for line in file:
                        yield from _of_object(json.loads(line)) if line.strip() else ()
                else:
                    while lines := file.readlines(PART):
                        yield "".join(lines)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: cannot be read as text: {error}") from None


def _of_object(found: Any) -> Iterator[str]:
    """Yield the texts of a line's object."""
    if not isinstance(found, dict):
        return
    messages = found.get("messages")
    answers = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    own = [each.get("content") for each in answers if each.get("role") == "assistant"]
    yield from (text for text in (found.get("text"), *own) if isinstance(text, str))
