"""`quire generate`: continues a text and prints the continuation as it is generated."""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
from pathlib import Path
from typing import Any

from engine import ConfigError, EngineConfig, EngineError, EngineRequest
from engine.flags import add_flags
from server.cli.common import SAMPLING_FLAGS, SamplingFlags, load_with_model

EPILOG = """examples:
  quire generate "Once upon a time"
  quire generate --model Qwen/Qwen3-0.6B --max-tokens 100 --temperature 0 "The capital of France is"
  quire generate --file notes.txt --stop "\\n\\n"
  git log -5 | quire generate --model ./my-model
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text. The continuation is streamed to standard output; everything else goes to "
        "standard error.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="text to continue (default: --file, or standard input without its last newline)",
    )
    parser.add_argument("--file", metavar="FILE", help="file to read the text from, without its last newline")
    add_flags(parser, EngineConfig, SAMPLING_FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompt = _given_prompt(args)
    config, sampling = load_with_model(args, EngineConfig, SAMPLING_FLAGS)
    asyncio.run(_generate(config, sampling, _typed_prompt() if prompt is None else prompt))
    return 0


def _given_prompt(args: argparse.Namespace) -> str | None:
    """Return the text of the command line or of --file; None if neither is given."""
    if args.prompt is not None and args.file is not None:
        raise ConfigError("the prompt is given twice, as an argument and as --file")
    if args.file is None:
        return None if args.prompt is None else str(args.prompt)
    try:
        return _not_empty(Path(args.file).read_text(encoding="utf-8"), args.file)
    except OSError as error:
        raise ConfigError(f"--file {args.file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the prompt in {args.file} is not UTF-8 text") from None


def _typed_prompt() -> str:
    """Return the text of standard input."""
    if sys.stdin.isatty():
        print("Type the text to continue, then Ctrl-D on a line of its own:", file=sys.stderr)
    try:
        return _not_empty(io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read(), "standard input")
    except UnicodeDecodeError:
        raise ConfigError("the prompt in standard input is not UTF-8 text") from None


def _not_empty(text: str, source: str) -> str:
    if not (prompt := text.removesuffix("\n")):
        raise ConfigError(f'there is no prompt: {source} is empty. Give a text: quire generate "Once upon a time"')
    return prompt


async def _generate(config: EngineConfig, sampling: SamplingFlags, prompt: str) -> None:
    from engine import AsyncEngine

    engine = await AsyncEngine.start(config)
    try:
        print(engine.summary, file=sys.stderr)
        if engine.model.tokenizer is None:
            raise ConfigError("skip_tokenizer_init must be false: the prompt is a text")
        try:
            updates = engine.generate(
                EngineRequest(
                    "0", engine.model.tokenizer.encode(prompt), sampling.params(engine.model.default_sampling)
                )
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        async for update in updates:
            print(update.text, end="", flush=True)
        print()
        if update.finish_reason == "error":
            raise EngineError(f"the engine failed: {update.error}")
    finally:
        engine.close()
