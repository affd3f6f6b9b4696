"""The head of a sequence classifier: a linear map of the last token's hidden state to a logit for each label.

It is so small that the API process computes it, from what the engine gives as an embedding.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any, Literal

from engine.models.errors import ModelError
from engine.models.files import read_json

SUFFIX = "ForSequenceClassification"  # of architectures
HEAD = "score.weight"
MAX_LABELS = 4096
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_KINDS: dict[Any, Literal["softmax", "sigmoid", "none"]] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


@dataclass(frozen=True, slots=True)
class Classifier:
    """What makes scores of hidden states."""

    weights: list[array[float]]  # of each label, as long as a hidden state
    labels: list[str]
    activation: Literal["softmax", "sigmoid", "none"]

    def scores(self, hidden: Sequence[float], *, activated: bool = True) -> list[float]:
        """Of each label. hidden: the last token's, after the final norm. Not `activated`: logits."""
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


def read_classifier(folder: Path, architecture: str, hidden_size: int) -> Classifier | None:
    """The head of the model in `folder`; None: it is no classifier. ModelError when it lacks one, or has another."""
    if not architecture.endswith(SUFFIX):
        return None
    config = read_json(folder / "config.json")
    weights = _read_head(folder, hidden_size)
    names = config.get("id2label")
    names = names if isinstance(names, dict) else {}
    labels = [str(names.get(str(index), f"LABEL_{index}")) for index in range(len(weights))]
    default: Literal["softmax", "sigmoid"] = "sigmoid" if len(weights) == 1 else "softmax"
    activation = _KINDS.get(config.get("problem_type"), default)
    return Classifier(weights, labels, "none" if _is_identity(config) else activation)


def _is_identity(config: dict[str, Any]) -> bool:
    """Whether sentence-transformers leaves the logits as they are."""
    of_library = config.get("sentence_transformers")
    named = of_library.get("activation_fn") if isinstance(of_library, dict) else None
    return str(named or config.get("sbert_ce_default_activation_function", "")).endswith("Identity")


def _read_head(folder: Path, hidden_size: int) -> list[array[float]]:
    name = "model.safetensors"
    if not (folder / name).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        name = weight_map.get(HEAD, "") if isinstance(weight_map, dict) else ""
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ModelError(f"{folder / _INDEX}: names no file that has {HEAD!r}, the classifier's head")
    path = folder / name
    try:
        return _read_rows(path, hidden_size)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{path}: {HEAD!r}, the classifier's head, cannot be read ({error})") from None


def _read_rows(path: Path, hidden_size: int) -> list[array[float]]:
    """The tensor as rows of floats. A file begins with the length of its header, which is JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError("the header is too long")
        entry = json.loads(file.read(length))[HEAD]
        kind, (num_labels, width), (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if width != hidden_size or not 1 <= num_labels <= MAX_LABELS:
            raise ValueError(f"its shape is {entry['shape']}, and the hidden size {hidden_size}")
        if end - start != num_labels * width * _SIZES[kind]:
            raise ValueError(f"it has {end - start} bytes")
        file.seek(8 + length + start)
        data = file.read(end - start)
    values = _floats(data, kind)
    if len(values) != num_labels * width:
        raise ValueError("the file is truncated")
    return [values[index * width : (index + 1) * width] for index in range(num_labels)]


def _floats(data: bytes, kind: str) -> array[float]:
    match kind:
        case "F32":
            return array("f", data)
        case "F16":
            return array("f", struct.unpack(f"<{len(data) // 2}e", data))
    wide = bytearray(2 * len(data))  # a bfloat16 is the upper half of a float32
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return array("f", bytes(wide))
