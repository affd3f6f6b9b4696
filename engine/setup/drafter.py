"""Resolves the drafter that `speculative_config` names: its files, and what it does not go with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.models.drafters.dflash import read_dflash
from engine.models.drafters.eagle3 import read_eagle3
from engine.models.drafters.mtp import mtp_spec
from engine.models.drafters.spec import DraftSpec
from engine.models.drafters.token_map import read_token_map
from engine.models.families import read_spec
from engine.models.files import read_json
from engine.models.hub import resolve_model
from engine.models.recurrent_spec import RecurrentSpec
from engine.models.spec import ModelSpec
from engine.setup.options import drafts_of, quantization_in_memory
from engine.setup.speculative import SpeculativeConfig, config_error
from engine.worker.options import RunnerOptions

TOKENIZER = "tokenizer.json"


def with_drafter(
    options: RunnerOptions, config: EngineConfig, spec: ModelSpec, *, weights: bool = True
) -> RunnerOptions:
    """Return the options with the drafter, if the configuration has one. `spec`: of the target, as it is in memory.

    `weights`: download the drafter's if need be. Raises `ConfigError` and `ModelError`.
    """
    settings = drafts_of(config, spec, options.device)
    if settings is None or not settings.needs_model:
        return options
    if options.num_stages > 1:
        raise config_error(
            f"method {settings.method} cannot be used with pipeline_parallel_size: drafters read what the last stage "
            "has, and embeddings, which the first one has"
        )
    if settings.rejects and options.device.is_accelerator:
        raise config_error("rejection_sample_method standard with a model runs on CPUs only: use exact")
    if settings.rejects and options.deterministic:
        raise config_error("rejection_sample_method standard cannot be used with deterministic: texts depend on steps")
    if not any(_attends_to_all(layer.mixer, options.max_model_len) for layer in spec.layers):
        raise config_error(
            f"method {settings.method} cannot be used with a model whose layers all have windows: the drafter's keys "
            "and values are kept beside those of a layer that attends to all tokens"
        )
    return replace(options, drafter=_drafter(settings, options, config, spec, weights))


def _drafter(
    settings: SpeculativeConfig, options: RunnerOptions, config: EngineConfig, spec: ModelSpec, weights: bool
) -> DraftSpec:
    target = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir, weights=weights)
    if settings.method == "mtp":
        if not spec.mtp:
            raise config_error(
                f"method mtp needs a checkpoint with prediction layers: {spec.architecture} has none that is known"
            )
        token_ids: tuple[int, ...] = ()
        if settings.speculative_token_map:
            token_ids = read_token_map(Path(settings.speculative_token_map).expanduser(), spec.vocab_size)
        head = settings.draft_lm_head_quantization
        model = mtp_spec(spec)
        return DraftSpec(method="mtp", folder=target, model=model, head_quantization=head, token_ids=token_ids)
    folder = resolve_model(settings.model, download_dir=config.download_dir, weights=weights)
    if settings.method in ("dflash", "eagle3") and spec.altup is not None:
        raise config_error(f"{spec.architecture} has several residual streams, which {settings.method} does not read")
    if settings.method == "dflash":
        found = read_dflash(folder, spec, settings.num_speculative_tokens)
        return replace(found, head_quantization=settings.draft_lm_head_quantization)
    if settings.method == "eagle3":
        return replace(read_eagle3(folder, spec), head_quantization=settings.draft_lm_head_quantization)
    draft = read_spec(folder)
    plain = replace(config, quantization=None)
    draft = replace(draft, quantization=quantization_in_memory(draft, plain, options.device))
    if not draft.has_head:
        raise config_error(f"model {settings.model!r} is an embedding model, which cannot generate")
    if draft.has_states:
        raise config_error(f"model {settings.model!r} has recurrent layers, which a draft model may not have")
    _check_vocabulary(settings, folder, draft, target, spec)
    return DraftSpec(method="draft_model", folder=folder, model=draft)


def _attends_to_all(mixer: Any, max_model_len: int) -> bool:
    return not isinstance(mixer, RecurrentSpec) and not 0 < mixer.window < max_model_len


def _check_vocabulary(
    settings: SpeculativeConfig, folder: Path, draft: ModelSpec, target: Path, spec: ModelSpec
) -> None:
    """Raise `ConfigError` unless both models have the same tokens."""
    if draft.vocab_size != spec.vocab_size:
        raise config_error(
            f"model {settings.model!r} must have the vocabulary of the target, of {spec.vocab_size} tokens; it has "
            f"{draft.vocab_size}"
        )
    own, others = _tokens(folder), _tokens(target)
    if own and others and own != others:
        differing = next(token for token in sorted(own.keys() | others.keys()) if own.get(token) != others.get(token))
        raise config_error(
            f"model {settings.model!r} must have the vocabulary of the target: {differing[:40]!r} is not the same token"
        )


def _tokens(folder: Path) -> dict[str, int]:
    """Return the ids of a model's tokens; {}: it has no file that says so."""
    file = folder / TOKENIZER
    if not file.is_file():
        return {}
    model = read_json(file, folder).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary if isinstance(vocabulary, dict) else {}
