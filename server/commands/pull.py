"""`quire pull MODEL`: downloads a model from Hugging Face."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from engine.flags import add_flags, check, flag, load

EPILOG = """examples:
  quire pull Qwen/Qwen3-0.6B                        into Hugging Face's cache, where `quire serve` finds it
  quire pull Qwen/Qwen3-0.6B --revision main --download-dir /models

Only what is served is downloaded: safetensors, configuration, tokenizer. What is there already is not downloaded again.
Models that ask for an account's consent need HF_TOKEN in the environment.
"""


@dataclass(frozen=True)
class PullFlags:
    """Download."""

    revision: str | None = flag(None, "branch, tag or commit", metavar="NAME")
    download_dir: str | None = flag(None, "where to keep it (else Hugging Face's cache)", metavar="FOLDER")

    def __post_init__(self) -> None:
        check(self)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "pull", help="download a model", description="Download a model from Hugging Face.", epilog=EPILOG
    )
    parser.add_argument("model", metavar="MODEL", help="its Hugging Face id, such as Qwen/Qwen3-0.6B")
    add_flags(parser, PullFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the folder, once it is whole."""
    from engine.pull import pull

    given = vars(args).copy()
    model = given.pop("model")
    (flags,) = load(given, PullFlags)
    print(pull(model, revision=flags.revision, download_dir=flags.download_dir))
    return 0
