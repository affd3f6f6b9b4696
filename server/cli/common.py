"""The bundled model and the sampling options, which several commands use."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

from engine import ConfigError, EngineConfig, SamplingParams
from engine.core.params.declare import Parameter, parameters_of
from engine.flags import flag, load


def _demo_model() -> Path:
    """Return the bundled model's folder: the checkout's or the wheel's; the checkout's path if neither exists."""
    checkout = Path(__file__).resolve().parents[2] / "configs" / "demo"
    if not (checkout / "config.json").is_file():
        import importlib.metadata  # takes 0.03 s

        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files("quire") or ():
                if file.parts[-4:] == ("share", "quire", "demo", "config.json"):
                    return Path(str(file.locate())).resolve().parent
    return checkout


DEMO_MODEL = _demo_model()
DEMO_NAME = "quire-demo"


# Parameters without an option: a terminal shows one answer without log probabilities, and --seed is the engine's flag.
_COMMON = frozenset(["temperature", "top_p", "max_tokens"])
_WITHOUT_OPTION = frozenset(["n", "seed", "logprobs", "prompt_logprobs", "thinking_token_budget"])


class SamplingFlags:
    """Sampling (default: the model's generation_config.json)."""

    def given(self) -> dict[str, Any]:
        """Return the given parameters, by their names in the OpenAI API."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        return SamplingParams(**({"max_tokens": None} | defaults | self.given()))


def _flag_of(parameter: Parameter) -> tuple[str, Any, Any]:
    """Return a field of a settings class with the type, range and description of a parameter."""
    declared = parameter.declaration
    help, is_size = declared.help, parameter.name == "max_tokens"
    limits = {"above": declared.above, "at_least": declared.at_least, "at_most": declared.at_most}
    help += " (default: as many as fit)" if is_size else ""
    common = parameter.name in _COMMON
    return parameter.name, parameter.kind | None, flag(None, help, size=is_size, common=common, **limits)


SAMPLING_FLAGS = dataclasses.make_dataclass(
    "SamplingFlags",
    [
        *(
            _flag_of(each)
            for each in parameters_of(SamplingParams).values()
            if each.kind in (int, float, bool) and each.name not in _WITHOUT_OPTION
        ),
        ("stop", tuple[str, ...] | None, flag(None, "strings at which the answer ends")),
    ],
    bases=(SamplingFlags,),
    namespace={"__doc__": SamplingFlags.__doc__},
    frozen=True,
)


def models_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_arguments",
        metavar="MODEL",
        nargs="*",
        help="folder, .gguf file or Hugging Face id of the model, as --model; several: each is loaded when it is first "
        "asked for, and sleeps while others need its place",
    )


def model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="folder, .gguf file or Hugging Face id of the model, as --model",
    )


def base_url(url: str) -> str:
    """Return the base URL of a server, without `/v1` and slashes at the end. `ConfigError` when it is not a URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"URL must begin with http:// or https://, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def load_with_model(args: argparse.Namespace, *classes: type) -> list[Any]:
    """Return the settings. If no source names a model, take the bundled one and say so on standard error.

    Raises `ModelError` if the model is a path where no supported one is, before anything slow is imported.
    """
    from engine.models.catalog import check_local

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
            print(f"No model given: using the small bundled model, {DEMO_MODEL}", file=sys.stderr)
            loaded[index] = dataclasses.replace(settings, served_model_name=settings.served_model_name or (DEMO_NAME,))
        elif isinstance(settings, EngineConfig):
            check_local(settings.model, settings.hf_overrides)
    return loaded
