"""What several commands share: the bundled model, sampling options, an engine that streams. Knows no HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import check, flag, load

if TYPE_CHECKING:
    from engine.core.sampling_params import SamplingParams

DEMO_MODEL = Path(__file__).resolve().parents[2] / "configs" / "demo"
DEMO_NAME = "quire-demo"


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling. What is not given is the model's own suggestion."""

    max_tokens: int | None = flag(None, "most tokens of the answer (else as many as fit)", size=True, at_least=1)
    temperature: float | None = flag(None, "0: always the likeliest token", at_least=0, at_most=100)
    top_p: float | None = flag(None, "sample from the likeliest tokens of this total probability", above=0, at_most=1)
    top_k: int | None = flag(None, "sample from this many likeliest tokens; 0: from all", at_least=-1)
    min_p: float | None = flag(
        None, "leave out tokens less likely than this share of the likeliest's", at_least=0, at_most=1
    )
    stop: tuple[str, ...] | None = flag(None, "texts that end the answer")

    def __post_init__(self) -> None:
        check(self)

    def given(self) -> dict[str, Any]:
        """What was given, by the names of the OpenAI API."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        from engine.core.sampling_params import SamplingParams

        return SamplingParams(**({"max_tokens": None} | defaults | self.given()))


def model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")


def load_with_model(args: argparse.Namespace, *classes: type) -> list[Any]:
    """The settings, with the model as named anywhere; the bundled model, said on the terminal, when named nowhere."""
    given = vars(args).copy()
    named = given.pop("model_argument", None)
    if named is not None:
        if given.get("model", named) != named:
            raise ConfigError(f"the model is named twice: {named!r} and --model {given['model']!r}")
        given["model"] = named
    bundled = {"model": str(DEMO_MODEL)} if (DEMO_MODEL / "config.json").is_file() else {}
    loaded = load(given, *classes, defaults=bundled)
    for index, settings in enumerate(loaded):
        if isinstance(settings, EngineConfig) and "model" not in given and settings.model == str(DEMO_MODEL):
            print(f"No model given: taking the small bundled one, {DEMO_MODEL}", file=sys.stderr)
            loaded[index] = dataclasses.replace(settings, served_model_name=settings.served_model_name or (DEMO_NAME,))
    return loaded
