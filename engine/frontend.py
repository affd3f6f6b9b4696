"""What a front end knows of its model: files, tokenizer, defaults, what a valid prompt is. No device, no engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core.sampling_params import SamplingParams
from engine.errors import ConfigError
from engine.models.families import read_spec
from engine.models.generation_config import read_generation_config
from engine.models.hub import resolve_model
from engine.models.spec import ModelSpec
from engine.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frontend:
    """The text side of an engine."""

    folder: Path
    model_name: str
    spec: ModelSpec
    tokenizer: Tokenizer | None  # None with skip_tokenizer_init
    default_sampling: dict[str, Any]  # fields of SamplingParams, from generation_config.json
    max_model_len: int
    max_logprobs: int

    @classmethod
    def load(cls, config: EngineConfig) -> Frontend:
        """Find the model, download it if need be, and read its small files. Raises `ModelError`, `TokenizerError`."""
        folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
        spec = read_spec(folder)
        tokenizer = None
        if not config.skip_tokenizer_init:
            tokenizer = Tokenizer.from_folder(
                folder
                if config.tokenizer is None
                else resolve_model(
                    config.tokenizer, revision=config.revision, download_dir=config.download_dir, weights=False
                )
            )
        return cls(
            folder,
            config.served_model_name[0] if config.served_model_name else config.model,
            spec,
            tokenizer,
            _default_sampling(config, folder),
            context_length(config, spec),
            config.max_logprobs,
        )

    def local(self, config: EngineConfig) -> EngineConfig:
        """`config` for the engine beside this front end: the model where it was found, by the name that people know."""
        name = self.folder.name if Path(self.model_name).is_dir() else self.model_name
        return replace(config, model=str(self.folder), served_model_name=(name,))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ends of text by all of the model's files, the tokenizer's among them."""
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return tuple(dict.fromkeys((*self.spec.eos_token_ids, *([] if own is None else [own]))))

    def encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "the prompt is text, but there is no tokenizer (skip_tokenizer_init): give prompt_token_ids"
            )
        return self.tokenizer.encode(prompt)

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """`ValueError` when the engine could not run this request; says what would be right."""
        num_prompt, vocab_size = len(prompt_token_ids), self.spec.vocab_size
        if not num_prompt:
            raise ValueError("the prompt is empty: it must have at least one token")
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but the context holds {self.max_model_len}, at least one of them "
                "for the answer: shorten the prompt"
            )
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab_size:
            wrong = next(i for i in prompt_token_ids if not 0 <= i < vocab_size)
            raise ValueError(f"prompt token ids must be from 0 to {vocab_size - 1}, got {wrong}")
        if sampling.logprobs is not None and sampling.logprobs > self.max_logprobs:
            raise ValueError(f"logprobs must be at most max_logprobs={self.max_logprobs}, got {sampling.logprobs}")
        if sampling.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and there is none (skip_tokenizer_init)")
        for token_id in sampling.stop_token_ids or ():
            if token_id >= vocab_size:
                raise ValueError(f"stop_token_ids must be below {vocab_size}, got {token_id}")


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """The engine's `max_model_len`: as set, else the model's own."""
    if config.max_model_len is None:
        return spec.context_length
    if config.max_model_len > spec.context_length:
        raise ConfigError(
            f"max_model_len must be at most {spec.context_length}, the model's own context, got {config.max_model_len}"
        )
    return config.max_model_len


def _default_sampling(config: EngineConfig, folder: Path) -> dict[str, Any]:
    if config.generation_config == "vllm":
        return {}
    source = folder if config.generation_config == "auto" else Path(config.generation_config)
    if config.generation_config != "auto" and not (source / "generation_config.json").is_file():
        raise ConfigError(f"generation_config must be auto, vllm or a folder with generation_config.json, got {source}")
    found: dict[str, Any] = read_generation_config(source)
    known = {f.name for f in fields(SamplingParams)}
    unknown = {name: value for name, value in found.items() if name not in known}
    if unknown.pop("repetition_penalty", 1) != 1:
        _log.warning("%s asks for a repetition penalty, which is not supported: sampling without it", source)
    defaults = {name: value for name, value in found.items() if name in known}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ConfigError(f"{source / 'generation_config.json'}: {error}") from None
    return defaults
