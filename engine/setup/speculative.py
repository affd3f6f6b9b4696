"""The settings of drafts, under the names of vLLM's `--speculative-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import ConfigError
from engine.worker.proposers.suffix import SuffixLimits
from engine.worker.sampling.imposed import ImposedAcceptance

# Whether there are drafts where they pay, if nothing is configured: by lookup, and by the prediction layers of the
# checkpoint.
ON_CPUS = True
ON_ACCELERATORS = False
WITH_STATES = False  # of models with recurrent layers, too
MAX_TOKENS = 32
MAX_LOOKUP = 16
MODEL_METHODS = ("draft_model", "mtp", "eagle3", "dflash")  # which run a model on the device
METHODS = ("ngram", "suffix", *MODEL_METHODS)
NEEDS_FOLDER = ("draft_model", "eagle3", "dflash")
MODEL_TOKENS = 3  # drafts by a model, unless it is said how many
BLOCK_TOKENS = 7  # by one that guesses a block at a time
REJECTION_METHODS = ("exact", "standard", "synthetic")
HEAD_METHODS = ("fp8", "int8", "int4")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of the proposal and verification of drafts."""

    method: str = "ngram"
    model: str = ""  # draft_model, eagle3, dflash: folder or Hugging Face id
    num_speculative_tokens: int = 8  # the most drafts of a request in a step; 0: no drafts
    prompt_lookup_min: int = 3  # lookup: tokens that must agree before a guess
    prompt_lookup_max: int = 6  # lookup: tokens whose agreement is tried first
    enable_adaptive_verification: bool = True  # verify only drafts that pay
    # exact: drafts are compared with samples, which keeps a seed's text; standard: rejection sampling by the drafter's
    # probabilities, which keeps the distribution; synthetic: they are accepted whatever they are, for benchmarks
    rejection_sample_method: str = "exact"
    synthetic_acceptance_length: float = 0.0  # synthetic: tokens of a step, with all drafts; 0: not synthetic
    # mtp: file of the tokens that it may guess, see `token_map`; "": all
    speculative_token_map: str = ""
    # mtp, eagle3, dflash: fp8, int8 or int4, to which the drafter's output head is quantised when it is loaded
    draft_lm_head_quantization: str = ""
    # suffix, lookup in earlier answers:
    suffix_decoding_max_tree_depth: int = 24  # tokens whose agreement is compared
    suffix_decoding_max_cached_requests: int = 10_000  # answers to a caller that are kept
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token that agrees
    suffix_decoding_min_token_prob: float = 0.1  # that the last draft is right, by earlier occurrences

    @property
    def needs_model(self) -> bool:
        """Return whether a model on the device proposes."""
        return self.method in MODEL_METHODS

    @property
    def rejects(self) -> bool:
        """Return whether drafts are verified by a drafter's probabilities. A lookup has none: it is certain, and for
        certain drafts comparing is rejection sampling.
        """
        return self.rejection_sample_method == "standard" and self.needs_model

    @property
    def imposed(self) -> ImposedAcceptance | None:
        """The acceptance that does not depend on drafts; None: they are compared."""
        if self.rejection_sample_method != "synthetic":
            return None
        return ImposedAcceptance.of_length(self.synthetic_acceptance_length, self.num_speculative_tokens)

    @property
    def suffix_limits(self) -> SuffixLimits | None:
        """The limits of lookup in earlier answers; None: there is none."""
        if self.method != "suffix":
            return None
        depth, answers = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
        factor, least = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        return SuffixLimits(min(self.prompt_lookup_min, depth), depth, answers, factor, least)


_DEFAULT = SpeculativeConfig()
_RANGES: dict[str, tuple[float, float]] = {
    "num_speculative_tokens": (0, MAX_TOKENS),
    "prompt_lookup_min": (1, MAX_LOOKUP),
    "prompt_lookup_max": (1, MAX_LOOKUP),
    "synthetic_acceptance_length": (1.0, MAX_TOKENS + 1.0),
    "suffix_decoding_max_tree_depth": (2, 256),
    "suffix_decoding_max_cached_requests": (1, 1_000_000),
    "suffix_decoding_max_spec_factor": (0.1, 16.0),
    "suffix_decoding_min_token_prob": (0.0, 1.0),
}
_CHOICES = {
    "method": METHODS,
    "rejection_sample_method": REJECTION_METHODS,
    "draft_lm_head_quantization": HEAD_METHODS,
}
_TEXTS = {"model": "a folder or a Hugging Face id", "speculative_token_map": "a file of token ids"}
_NEED = {  # settings → the methods with which they are allowed
    "speculative_token_map": ("mtp",),
    "draft_lm_head_quantization": ("mtp", "eagle3", "dflash"),
}


def parse(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Check the object that a user gives. Raises `ConfigError`."""
    values = dict(given)
    known = {field.name: field for field in fields(SpeculativeConfig)}
    for name, choices in _CHOICES.items():
        if name in values and values[name] not in choices:
            raise config_error(f"{name} must be {', '.join(choices)}, got {values[name]!r}")
    if unknown := [name for name in values if name not in known]:
        raise config_error(f"{unknown[0]!r} is not known; it may have {', '.join(known)}")
    for name, value in values.items():
        _check_value(name, value)
    method = values.get("method", "ngram")
    if ("model" in values) != (method in NEEDS_FOLDER):
        verb = "needs a model" if method in NEEDS_FOLDER else "takes no model"
        raise config_error(f"method {method} {verb}")
    if method in MODEL_METHODS:
        values.setdefault("num_speculative_tokens", BLOCK_TOKENS if method == "dflash" else MODEL_TOKENS)
    if "prompt_lookup_min" in values and "prompt_lookup_max" not in values:
        values["prompt_lookup_max"] = max(values["prompt_lookup_min"], _DEFAULT.prompt_lookup_max)
    if "prompt_lookup_max" in values and "prompt_lookup_min" not in values:
        values["prompt_lookup_min"] = min(values["prompt_lookup_max"], _DEFAULT.prompt_lookup_min)
    config = SpeculativeConfig(**values)
    _check_together(config, values)
    return config


def _check_value(name: str, value: Any) -> None:
    if name in _RANGES:
        least, most = _RANGES[name]
        if isinstance(least, float):
            if type(value) not in (int, float) or not least <= value <= most:
                raise config_error(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
        elif type(value) is not int or not least <= value <= most:
            raise config_error(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    elif name in _TEXTS:
        if not isinstance(value, str) or not value:
            raise config_error(f"{name} must be {_TEXTS[name]}, got {value!r}")
    elif name not in _CHOICES and type(value) is not bool:
        raise config_error(f"{name} must be true or false, got {value!r}")


def _check_together(config: SpeculativeConfig, given: Mapping[str, Any]) -> None:
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise config_error(
            f"prompt_lookup_min must be at most prompt_lookup_max, {config.prompt_lookup_max}, "
            f"got {config.prompt_lookup_min}"
        )
    if suffix := [name for name in given if name.startswith("suffix_") and config.method != "suffix"]:
        raise config_error(f"{suffix[0]} needs method suffix, got {config.method}")
    for name, methods in _NEED.items():
        if name in given and config.method not in methods:
            raise config_error(f"{name} needs method {' or '.join(methods)}, got {config.method}")
    length, most = config.synthetic_acceptance_length, config.num_speculative_tokens + 1
    if (config.rejection_sample_method == "synthetic") != bool(length):
        raise config_error("rejection_sample_method synthetic and synthetic_acceptance_length need each other")
    if length > most:
        raise config_error(f"synthetic_acceptance_length must be at most 1 + num_speculative_tokens, {most}")


def config_error(reason: str) -> ConfigError:
    """Return the error of a setting, with its reason."""
    return ConfigError(f"speculative_config: {reason}")


def speculative_config(given: Mapping[str, Any] | None, on_accelerator: bool) -> SpeculativeConfig | None:
    """Return the settings of drafts; None: there are none. `on_accelerator`: the model runs on one."""
    if given is None:
        return _DEFAULT if (ON_ACCELERATORS if on_accelerator else ON_CPUS) else None
    config = parse(given)
    return config if config.num_speculative_tokens else None
