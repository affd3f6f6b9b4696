"""Reads the files that sentence-transformers adds to embedding models: modules, pooling, prompts, the longest text."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.models.errors import ModelError
from engine.models.files import load_json, read_json
from engine.models.spec import HeadLayerSpec

MODULES = "modules.json"  # present in every embedding model
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
_POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls", None: "last"}
_ACTIVATIONS: dict[str, Literal["", "tanh", "gelu", "relu", "silu"]] = {
    "Identity": "", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts that an embedding model wants before a text, by names such as query and document."""

    texts: dict[str, str] = field(default_factory=dict)
    default: str | None = None  # name of the one that a text gets if no other is chosen

    def prefix(self, name: str | None) -> str:
        """Return the text of a name; None: the default. Raises `ValueError` with the known names."""
        name = self.default if name is None else name
        if name is None:
            return ""
        if name not in self.texts:
            known = f"must be one of {', '.join(self.texts)}" if self.texts else "is unknown: the model has no prompts"
            raise ValueError(f"{known}, got {name!r}")
        return self.texts[name]


def is_embedding_model(folder: Path) -> bool:
    """Return True if the model in `folder` is an embedding model. Raises `ModelError` if it has an unknown module."""
    return bool(_modules(folder))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kinds and folders of an embedding model's modules, in order; [] for other models."""
    path = folder / MODULES
    if not os.path.lexists(path):
        return []
    try:
        found = [(module["type"].rpartition(".")[2], str(module.get("path", ""))) for module in load_json(path)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: is no list of modules, each with its type ({error}); download it again") from error
    if unknown := [name for name, _ in found if name not in SUPPORTED]:
        raise ModelError(f"{path}: module {unknown[0]!r} is not supported; supported: {', '.join(SUPPORTED)}")
    return found


def normalizes(folder: Path) -> bool:
    """Return True if the model's embeddings have length 1: by its modules; if it has none, always."""
    modules = _modules(folder)
    return not modules or any(kind == "Normalize" for kind, _ in modules)


def dense_layers(folder: Path) -> tuple[HeadLayerSpec, ...]:
    """Return the Dense modules after pooling. Raises `ModelError` for an unknown activation."""
    layers = []
    for kind, where in _modules(folder):
        if kind != "Dense":
            continue
        path = folder / where / "config.json"
        if Path(where).name != where:
            raise ModelError(f"{folder / MODULES}: {where!r} is not the name of a folder")
        config = read_json(path, folder)
        name, size, bias = config.get("activation_function"), config.get("out_features"), config.get("bias", True)
        activation = str(name).rpartition(".")[2].removesuffix("()")
        if activation not in _ACTIVATIONS:
            raise ModelError(f"{path}: 'activation_function' {name!r} is not supported: {', '.join(_ACTIVATIONS)} are")
        if not isinstance(size, int) or not 1 <= size < 1 << 20 or not isinstance(bias, bool):
            raise ModelError(f"{path}: 'out_features' must be a positive number and 'bias' true or false")
        layers.append(
            HeadLayerSpec(name="linear", num_outputs=size, bias=bias, activation=_ACTIVATIONS[activation], folder=where)
        )
    return tuple(layers)


def max_seq_length(folder: Path) -> int | None:
    """Return the most tokens of a text that the authors recommend; None: as many as the model takes."""
    path = folder / "sentence_bert_config.json"
    if not os.path.lexists(path):
        return None
    config = read_json(path, folder)
    if config.get("do_lower_case"):
        raise ModelError(f"{path}: 'do_lower_case' must be false: the tokenizer alone changes texts")
    longest = config.get("max_seq_length")
    return longest if isinstance(longest, int) and longest > 0 else None


def read_prompts(folder: Path) -> Prompts:
    """Return the prompts in config_sentence_transformers.json."""
    path = folder / "config_sentence_transformers.json"
    if not os.path.lexists(path):
        return Prompts()
    config = read_json(path, folder)
    texts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ModelError(f"{path}: 'prompts' must be an object of texts, got {texts!r}")
    if default is not None and default not in texts:
        raise ModelError(f"{path}: 'default_prompt_name' {default!r} is not among its prompts")
    return Prompts(texts, default)


def read_pooling(folder: Path) -> str:
    """Return "last", "mean" or "cls" from 1_Pooling/config.json; "last", as usual for decoders, without such a file.

    Raises `ModelError` for another pooling method.
    """
    path = folder / "1_Pooling" / "config.json"
    config = read_json(path, folder) if os.path.lexists(path) else {}
    prefix = "pooling_mode_"
    modes: list[Any] = [
        name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True
    ] or [config.get("pooling_mode")]
    if len(modes) != 1 or not isinstance(modes[0], str | None) or modes[0] not in _POOLINGS:
        raise ModelError(f"{path}: pools by {', '.join(map(str, modes))}; choose last, mean or cls by --pooling")
    if config.get("include_prompt", True) is not True:
        raise ModelError(f"{path}: 'include_prompt' must be true: prompts' tokens cannot be left out of the pooling")
    return _POOLINGS[modes[0]]
