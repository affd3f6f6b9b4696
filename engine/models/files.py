"""Files of a checkpoint: JSON files, the fingerprint, folders for error messages, progress of long phases."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.utils.folder_files import read_file

WEIGHT_FILES = "*.safetensors"  # files of weights in a model's folder
PICKLED = "pytorch_model.bin"  # the only file of weights of some older models
MAX_JSON_BYTES = 64 << 20  # the index of a thousand files of weights is far smaller
QUANTIZATION, MODELOPT_CONFIG = "quantization_config", "hf_quant_config.json"
_ROPE = ("rope_scaling", "rope_parameters")  # two names of the same field: overrides may use the other one
# (phase, done, total): a phase of `engine.replicas.state` and its progress in any unit; 0 of 0: unknown.
Progress = Callable[[str, int, int], None]


def silent(phase: str, done: int, total: int) -> None:
    """Ignore progress."""


def load_json(path: Path, folder: Path | None = None) -> Any:
    """Read a JSON file. Raises `ModelError`, which names the file, if it is missing, unreadable or malformed.

    folder: the model's, in which the file must lie; None: the file's own.
    """
    try:
        return json.loads(read_file(path, folder or path.parent, MAX_JSON_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except RecursionError:
        raise ModelError(f"{path}: is nested too deeply; download it again") from None
    except ValueError as error:  # malformed JSON or not UTF-8
        raise ModelError(f"{path}: is not valid JSON ({error}); download it again") from error


def read_json(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelError` as `load_json` does, and if it is another value."""
    value = load_json(path, folder)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not a {type(value).__name__}; download it again")
    return value


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read config.json of the model in `folder`, with `overrides` merged key by key. Errors: see `read_json`.

    NVIDIA's checkpoints may have their quantisation in a file of its own.
    """
    config, over = read_json(folder / "config.json"), dict(overrides or {})
    if config.get(QUANTIZATION) is None and (folder / MODELOPT_CONFIG).is_file():
        inner = read_json(folder / MODELOPT_CONFIG, folder).get("quantization")
        config[QUANTIZATION] = {"quant_method": "modelopt", "quantization": inner}
    for name, other in (_ROPE, _ROPE[::-1]):
        if over.get(name) and other not in over and config.get(other):
            over[other] = over.pop(name)
    return _merged(config, over)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `under`: objects under the same key are merged, other values replaced."""
    found = dict(under)
    for name, value in over.items():
        own = found.get(name)
        found[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return found


def listing(folder: Path, limit: int = 8) -> str:
    """List the files of a folder for an error message: "a, b, c and 4 more"."""
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"


def fingerprint(folder: Path) -> str:
    """Return a hash of the model's configuration and weight files, which changes whenever a file is replaced.

    A file is identified by its size and modification time; in Hugging Face's cache, where files are links to blobs
    named by their content, by that name.
    """
    digest = sha256(read_file(folder / "config.json", folder, MAX_JSON_BYTES))
    if (tensors := folder / "gguf.json").is_file():  # names a GGUF file and its version
        digest.update(read_file(tensors, folder, MAX_JSON_BYTES))
    digest.update(weights_fingerprint(folder).encode())
    return digest.hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """Return a hash of the weight files alone, see `fingerprint`."""
    found = []
    for path in sorted((*folder.glob(WEIGHT_FILES), *folder.glob(PICKLED))):
        blob, status = path.resolve(), path.stat()
        version = blob.name if path.is_symlink() and blob.parent.name == "blobs" else status.st_mtime_ns
        found.append([path.name, status.st_size, version])
    return sha256(json.dumps(found).encode()).hexdigest()
