"""The settings of drafts, under the names of vLLM's `--speculative-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import ConfigError

MAX_TOKENS = 32
MAX_LOOKUP = 16
MODEL_METHODS = ("draft_model", "mtp", "eagle3")  # which run a model on the device
METHODS = ("ngram", *MODEL_METHODS)
NEEDS_FOLDER = ("draft_model", "eagle3")
MODEL_TOKENS = 3  # drafts by a model, unless it is said how many


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of the proposal and verification of drafts."""

    method: str = "ngram"
    model: str = ""  # draft_model, eagle3: folder or Hugging Face id
    num_speculative_tokens: int = 8  # the most drafts of a request in a step; 0: no drafts
    prompt_lookup_min: int = 3  # ngram: tokens that must agree before a guess
    prompt_lookup_max: int = 6  # ngram: tokens whose agreement is tried first
    enable_adaptive_verification: bool = True  # verify only drafts that pay

    @property
    def needs_model(self) -> bool:
        """Return whether a model on the device proposes."""
        return self.method in MODEL_METHODS


_DEFAULT = SpeculativeConfig()
_RANGES = {
    "num_speculative_tokens": (0, MAX_TOKENS),
    "prompt_lookup_min": (1, MAX_LOOKUP),
    "prompt_lookup_max": (1, MAX_LOOKUP),
}


def parse(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Check the object that a user gives. Raises `ConfigError`."""
    values = dict(given)
    known = {field.name: field for field in fields(SpeculativeConfig)}
    method = values.get("method", "ngram")
    if method not in METHODS:
        raise config_error(f"method must be {', '.join(METHODS)}, got {method!r}")
    if unknown := [name for name in values if name not in known]:
        raise config_error(f"{unknown[0]!r} is not known; it may have {', '.join(known)}")
    for name, value in values.items():
        if name in _RANGES:
            least, most = _RANGES[name]
            if type(value) is not int or not least <= value <= most:
                raise config_error(f"{name} must be a whole number from {least} to {most}, got {value!r}")
        elif name == "model":
            if not isinstance(value, str) or not value:
                raise config_error(f"model must be a folder or a Hugging Face id, got {value!r}")
        elif name != "method" and type(value) is not bool:
            raise config_error(f"{name} must be true or false, got {value!r}")
    if ("model" in values) != (method in NEEDS_FOLDER):
        verb = "needs a model" if method in NEEDS_FOLDER else "takes no model"
        raise config_error(f"method {method} {verb}")
    if method in MODEL_METHODS:
        values.setdefault("num_speculative_tokens", MODEL_TOKENS)
    if "prompt_lookup_min" in values and "prompt_lookup_max" not in values:
        values["prompt_lookup_max"] = max(values["prompt_lookup_min"], _DEFAULT.prompt_lookup_max)
    if "prompt_lookup_max" in values and "prompt_lookup_min" not in values:
        values["prompt_lookup_min"] = min(values["prompt_lookup_max"], _DEFAULT.prompt_lookup_min)
    config = SpeculativeConfig(**values)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise config_error(
            f"prompt_lookup_min must be at most prompt_lookup_max, {config.prompt_lookup_max}, "
            f"got {config.prompt_lookup_min}"
        )
    return config


def config_error(reason: str) -> ConfigError:
    """Return the error of a setting, with its reason."""
    return ConfigError(f"speculative_config: {reason}")


def speculative_config(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Return the settings of drafts; None: there are none."""
    if given is None:
        return None
    config = parse(given)
    return config if config.num_speculative_tokens else None
