"""`quire pull MODEL`: downloads a model from Hugging Face."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from engine.flags import add_flags, flag, load

EPILOG = """examples:
  quire pull Qwen/Qwen3-0.6B                        to Hugging Face's cache, where `quire serve` finds it
  quire pull Qwen/Qwen3-0.6B --revision main --download-dir /models

Only the files that serving needs are downloaded: safetensors, configuration, tokenizer. Files that exist are not
downloaded again. Gated models need HF_TOKEN in the environment.
"""


@dataclass(frozen=True)
class PullFlags:
    """Download."""

    revision: str | None = flag(None, "branch, tag or commit", metavar="NAME")
    download_dir: str | None = flag(None, "folder for the download (default: Hugging Face's cache)", metavar="FOLDER")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "pull", help="download a model", description="Download a model from Hugging Face.", epilog=EPILOG
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face id of the model, such as Qwen/Qwen3-0.6B")
    add_flags(parser, PullFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Download the model and print its folder."""
    from engine.models.catalog import pull

    given = vars(args).copy()
    model = given.pop("model")
    (flags,) = load(given, PullFlags)
    print(pull(model, revision=flags.revision, download_dir=flags.download_dir))
    return 0
