"""LoRA adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.models.files import listing, read_json
from engine.utils.folder_files import open_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names
# Of a classifier's head that was trained with the adapter. PEFT writes the second one while it has several adapters.
ADAPTER_HEADS = (PREFIX + "score.weight", PREFIX + "score.modules_to_save.default.weight")
MAX_RANK = 512
OF_EMBEDDING = ""  # key of retrained tokens that the configuration names without a module
MAX_TOKENS = 1 << 20  # with retrained rows
MAX_BYTES = 16 << 30  # of a file of weights
MAX_PATTERNS, MAX_PATTERN, MAX_REPEATS = 1024, 256, 3  # of rank_pattern and alpha_pattern
ADVICE = "merge it into the model (PEFT's merge_and_unload) and serve the result"
PLAIN_INITS = ("gaussian", "eva", "orthogonal")  # that leave the base model as it is
# Fields of PEFT's LoraConfig whose adapters do something else at inference → what that is.
OTHER_KINDS = {
    "alora_invocation_tokens": "an aLoRA, which begins at a token of the prompt",
    "use_qalora": "a QA-LoRA, whose A reads the means of groups of channels",
    "use_bdlora": "a block-diagonal LoRA",
    "arrow_config": "an Arrow router among several adapters",
    "layer_replication": "LoRA with replicated layers, which the base model does not have",
    "kasa_config": "a KaSA, which changes the base weights too",
    "monteclora_config": "a MonteCLoRA",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of adapter_config.json that says what an adapter computes. Its modules are those of its tensors."""

    path: Path
    rank: int
    alpha: float
    rank_stabilised: bool = False  # scaled by α / √r instead of α / r
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...] = ()  # for the end of a module's name → r
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...] = ()
    token_ids: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # with retrained rows, by the end of a module's name
    base: str = ""  # the model that it was trained on, as its author named it

    @property
    def most_rank(self) -> int:
        return max([self.rank, *(rank for _, rank in self.rank_pattern)])

    def rank_of(self, module: str) -> int:
        """Return r of a module. `module`: its name in the base model."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of B · A."""
        rank = self.rank_of(module)
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (sqrt(rank) if self.rank_stabilised else rank)


def adapter_version(folder: Path) -> str:
    """Return a hash that changes when a file of the adapter is replaced. Raises `ModelError` if a file is unusable."""
    digest = sha256()
    for name in (CONFIG, WEIGHTS):
        path = folder / name
        try:
            with open_file(path, folder, MAX_BYTES) as file:
                found = path.stat()
                content = file.read(1 << 20) if name == CONFIG else b""
        except OSError as error:
            raise _unreadable(path, folder, error) from None
        digest.update(json.dumps([name, found.st_size, found.st_mtime_ns, found.st_ino]).encode() + content)
    return digest.hexdigest()


def _unreadable(path: Path, folder: Path, error: OSError) -> ModelError:
    if not folder.is_dir():
        return ModelError(f"{folder}: is no folder; give the folder that holds {CONFIG} and {WEIGHTS}")
    if isinstance(error, FileNotFoundError):
        advice = "; save it with save_pretrained, as safetensors" if path.name == WEIGHTS else ""
        return ModelError(f"{folder}: holds no {path.name} (it holds {listing(folder)}){advice}")
    return ModelError(f"{path}: cannot be read ({error.strerror or error})")


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json. Raises `ModelError` for an adapter of another kind, naming it."""
    path = folder / CONFIG
    if not path.is_file():
        raise _unreadable(path, folder, FileNotFoundError())
    config = read_json(path, folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: 'peft_type' is {_shown(kind)}: only LoRA adapters are served; {ADVICE}")
    for name, what in OTHER_KINDS.items():
        if config.get(name):
            raise ModelError(f"{path}: {name!r} is set: {what} is not served; {ADVICE}")
    init = config.get("init_lora_weights")
    if not isinstance(init, bool | None) and init not in PLAIN_INITS:
        raise ModelError(
            f"{path}: 'init_lora_weights' is {_shown(init)}, which changed the base model, too: save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    rank = _rank(path, "r", config.get("r"))
    return AdapterConfig(
        path,
        rank,
        _number(path, "lora_alpha", config.get("lora_alpha", 8)),
        bool(config.get("use_rslora")),
        tuple((key, _rank(path, "rank_pattern", value)) for key, value in _pattern(path, config, "rank_pattern")),
        tuple((key, _number(path, "alpha_pattern", value)) for key, value in _pattern(path, config, "alpha_pattern")),
        _tokens(path, config.get("trainable_token_indices")),
        str(config.get("base_model_name_or_path") or "")[:200],
    )


def _tokens(path: Path, given: Any) -> dict[str, list[int]]:
    """Return `trainable_token_indices`: module → tokens; PEFT takes a list as those of the embedding."""
    found = given if isinstance(given, dict) else {OF_EMBEDDING: given} if given else {}
    for ids in found.values():
        is_list = isinstance(ids, list) and 0 < len(ids) <= MAX_TOKENS
        if not is_list or not all(type(each) is int and 0 <= each < 1 << 31 for each in ids):
            raise ModelError(f"{path}: 'trainable_token_indices' must be lists of tokens, got {_shown(given)}")
    return found


def _rank(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ModelError(f"{path}: {name!r} must be from 1 to {MAX_RANK}, got {_shown(value)}")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e6:
        raise ModelError(f"{path}: {name!r} must be a number, got {_shown(value)}")
    return float(value)


def _pattern(path: Path, config: Mapping[str, Any], name: str) -> list[tuple[re.Pattern[str], Any]]:
    """Return the entries of a pattern: regular expressions of little work, since an adapter is not trusted."""
    entries = []
    value = config.get(name) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise ModelError(f"{path}: {name!r} must be an object of at most {MAX_PATTERNS} names, got {_shown(value)}")
    for key, each in value.items():
        repeats = len(re.findall(r"[*+?{]", key))
        if len(key) > MAX_PATTERN or repeats > MAX_REPEATS or re.search(r"\)[*+?{]|\(\?|\\[1-9]", key):
            raise ModelError(f"{path}: {name!r} has a pattern that is too complex: {_shown(key)}")
        try:
            entries.append((re.compile(rf"(.*\.)?({key})$"), each))
        except re.error as error:
            raise ModelError(f"{path}: {name!r} has {_shown(key)}, which is no regular expression ({error})") from None
    return entries


def _of_pattern(pattern: tuple[tuple[re.Pattern[str], Any], ...], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does."""
    return next((value for key, value in pattern if key.match(module)), default)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
