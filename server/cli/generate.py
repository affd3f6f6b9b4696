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
    prompt = _read_prompt(args)
    config, sampling = load_with_model(args, EngineConfig, SAMPLING_FLAGS)
    asyncio.run(_generate(config, sampling, prompt))
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        raise ConfigError("the prompt is given twice, as an argument and as --file")
    if args.prompt is not None:
        return str(args.prompt)
    try:
        if args.file is not None:
            return Path(args.file).read_text(encoding="utf-8").removesuffix("\n")
        if sys.stdin.isatty():
            print("Type the text to continue, then Ctrl-D:", file=sys.stderr)
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read().removesuffix("\n")
    except OSError as error:
        raise ConfigError(f"--file {args.file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the prompt in {args.file or 'standard input'} is not UTF-8 text") from None


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
