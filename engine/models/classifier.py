"""The head of a classifier.

A decoder's is a linear layer from the last token's hidden state to one logit per label, so small that the API process
computes it from the embedding that the engine returns. An encoder's is computed in the worker, which returns logits.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import mul, sub
from pathlib import Path
from typing import Any, BinaryIO, Literal

from engine.models.errors import ModelError
from engine.models.files import read_config, read_json
from engine.models.lora import ADAPTER_HEADS, WEIGHTS
from engine.utils.folder_files import open_file

SUFFIX = "ForSequenceClassification"  # of architecture names
HEAD = "score.weight"
TOKENS = "classifier_from_token"  # in config.json: the head consists of the output head's rows of these tokens
_OUTPUT_HEAD, _EMBEDDINGS = "lm_head.weight", ("model.embed_tokens.weight", "embed_tokens.weight")
MAX_LABELS = 4096
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_KINDS: dict[Any, Literal["softmax", "sigmoid", "none"]] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """Computes scores from hidden states."""

    weights: list[array[float]]  # for each label, one per hidden channel; []: the worker computes logits
    labels: list[str]
    activation: Literal["softmax", "sigmoid", "none"]
    pooling: str = "last"  # which the head needs; "all": each token has labels

    @property
    def is_in_worker(self) -> bool:
        """True if the worker computes logits."""
        return not self.weights

    @property
    def labels_tokens(self) -> bool:
        """True if each token has labels."""
        return self.pooling == "all"

    def best(self, scores: Sequence[float]) -> str:
        """Return the label with the highest score."""
        return self.labels[max(range(len(scores)), key=scores.__getitem__)]

    def scores(self, hidden: Sequence[float], *, activated: bool = True) -> list[float]:
        """Return the score of each label. hidden: the last token's, after the final norm; or logits, if the worker has
        computed these. activated: no bare logits.
        """
        if self.is_in_worker:
            logits = list(hidden)
        else:
            logits = [math.fsum(map(mul, hidden, weights)) for weights in self.weights]
        if not activated or self.activation == "none":
            return logits
        if self.activation == "sigmoid":
            return [_sigmoid(logit) for logit in logits]
        highest = max(logits)
        powers = [math.exp(logit - highest) for logit in logits]
        total = math.fsum(powers)
        return [power / total for power in powers]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def read_classifier(
    folder: Path,
    architecture: str,
    hidden_size: int,
    overrides: Mapping[str, Any] | None = None,
    token_id: Callable[[str], int | None] = lambda token: None,
) -> Classifier | None:
    """Read the head of the model in `folder`; None if it is not a classifier.

    Raises `ModelError` if the head is missing or unsupported.

    overrides: see `read_config`. token_id: returns the id of a token of the vocabulary.
    """
    if not architecture.endswith(SUFFIX):
        return None
    config = read_config(folder, overrides)
    if TOKENS in config:
        weights = _head_of_tokens(folder, hidden_size, config, token_id)
    else:
        weights = _read_rows(folder, (HEAD,), hidden_size)
    return _classifier(config, len(weights), weights, "last")


def labelled_classifier(
    folder: Path, num_labels: int, pooling: str, overrides: Mapping[str, Any] | None = None
) -> Classifier:
    """Return the classifier of a model whose worker computes the logits. Raises `ModelError` for too many labels."""
    if num_labels > MAX_LABELS:
        raise ModelError(f"{folder / 'config.json'}: there may be {MAX_LABELS} labels, got {num_labels}")
    return _classifier(read_config(folder, overrides), num_labels, [], pooling)


def read_adapter_classifier(folder: Path, hidden_size: int, base: Classifier | None) -> Classifier | None:
    """Read the head that PEFT has saved with the adapter in `folder`; None if there is none: then the base's stays.

    Labels are those of a config.json beside the adapter, else those of `base`, if it has as many. Raises `ModelError`.
    """
    path = folder / WEIGHTS
    with _reading(path, ADAPTER_HEADS[0], folder) as file:
        if not any(name in _header(file)[0] for name in ADAPTER_HEADS):
            return None
        weights = _read_from(file, ADAPTER_HEADS, hidden_size, None)
    own = folder / "config.json"
    config = read_json(own, folder) if own.is_file() else {}
    if base is not None and len(base.weights) == len(weights) and not {"id2label", "problem_type"} & config.keys():
        return replace(base, weights=weights)
    return _classifier(config, len(weights), weights, "last")


def _classifier(config: dict[str, Any], num_labels: int, weights: list[array[float]], pooling: str) -> Classifier:
    names = config.get("id2label")
    names = names if isinstance(names, dict) else {}
    labels = [str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels)]
    default: Literal["softmax", "sigmoid"] = "sigmoid" if num_labels == 1 else "softmax"
    activation = _KINDS.get(config.get("problem_type"), default)
    return Classifier(weights, labels, "none" if _is_identity(config) else activation, pooling)


def _is_identity(config: dict[str, Any]) -> bool:
    """Return True if sentence-transformers applies no activation to the logits."""
    of_library = config.get("sentence_transformers")
    named = of_library.get("activation_fn") if isinstance(of_library, dict) else None
    return str(named or config.get("sbert_ce_default_activation_function", "")).endswith("Identity")


def _head_of_tokens(
    folder: Path, hidden_size: int, config: Mapping[str, Any], token_id: Callable[[str], int | None]
) -> list[array[float]]:
    """Return a head with one label per token; for a softmax over two tokens one label: second minus first token."""
    path, tokens, method = folder / "config.json", config[TOKENS], config.get("method")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{path}: {TOKENS!r} must be a list of tokens, got {tokens!r}")
    if not 1 <= len(tokens) <= MAX_LABELS:
        raise ModelError(f"{path}: {TOKENS!r} must be 1 to {MAX_LABELS} tokens, got {len(tokens)}")
    is_softmax = config.get("is_original_qwen3_reranker") is True or method == "from_2_way_softmax"
    if not is_softmax and method != "no_post_processing":
        raise ModelError(
            f"{path}: {TOKENS!r} needs 'is_original_qwen3_reranker': true, or a 'method': from_2_way_softmax or "
            f"no_post_processing, got {method!r}"
        )
    if is_softmax and len(tokens) != 2:
        raise ModelError(f"{path}: {TOKENS!r} must be two tokens, got {tokens!r}")
    ids = [token_id(token) for token in tokens]
    if None in ids:
        raise ModelError(f"{path}: {TOKENS!r}: {tokens[ids.index(None)]!r} is no token of the vocabulary")
    tied = config.get("tie_word_embeddings")
    names = (*_EMBEDDINGS, _OUTPUT_HEAD) if tied is True else (_OUTPUT_HEAD, *_EMBEDDINGS)
    rows = _read_rows(folder, names, hidden_size, [index for index in ids if index is not None])
    return [array("f", map(sub, rows[1], rows[0]))] if is_softmax else rows


def _read_rows(
    folder: Path, names: Sequence[str], hidden_size: int, indices: Sequence[int] | None = None
) -> list[array[float]]:
    """Read rows of the first of these tensors that is stored. indices: None: all rows, at most MAX_LABELS."""
    file = "model.safetensors"
    if (folder / _INDEX).is_file() or not (folder / file).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        files = [weight_map[name] for name in names if name in weight_map] if isinstance(weight_map, dict) else []
        file = files[0] if files else ""
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ModelError(f"{folder / _INDEX}: names no file that has {names[0]!r}, the classifier's head")
    with _reading(folder / file, names[0], folder) as opened:
        return _read_from(opened, names, hidden_size, indices)


@contextmanager
def _reading(path: Path, name: str, folder: Path) -> Iterator[BinaryIO]:
    """Open a file in the block. Raises `ModelError` for what goes wrong there, which names the tensor `name`."""
    try:
        with open_file(path, folder) as opened:
            yield opened
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: {name!r}, the classifier's head, cannot be read ({reason})") from None


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the JSON header at the start of a file, and its length."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError("the header is too long")
    return json.loads(file.read(length)), length


def _read_from(
    file: BinaryIO, names: Sequence[str], hidden_size: int, indices: Sequence[int] | None
) -> list[array[float]]:
    """Read the rows from one file."""
    header, length = _header(file)
    entry = header[next((name for name in names if name in header), names[0])]
    kind, (num_rows, width), (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if width != hidden_size or (indices is None and not 1 <= num_rows <= MAX_LABELS):
        raise ValueError(f"its shape is {entry['shape']}, and the hidden size {hidden_size}")
    if end - start != num_rows * width * _SIZES[kind]:
        raise ValueError(f"it has {end - start} bytes")
    rows = []
    for index in range(num_rows) if indices is None else indices:
        if not 0 <= index < num_rows:
            raise ValueError(f"it has {num_rows} rows, none for token {index}")
        file.seek(8 + length + start + index * width * _SIZES[kind])
        data = file.read(width * _SIZES[kind])
        if len(data) != width * _SIZES[kind]:
            raise ValueError("the file is truncated")
        rows.append(_floats(data, kind))
    return rows


def _floats(data: bytes, kind: str) -> array[float]:
    match kind:
        case "F32":
            return array("f", data)
        case "F16":
            return array("f", struct.unpack(f"<{len(data) // 2}e", data))
    wide = bytearray(2 * len(data))  # a bfloat16 is the upper half of a float32
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return array("f", bytes(wide))
