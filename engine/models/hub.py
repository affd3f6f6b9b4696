"""Finds a model's files in a local folder or on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from engine.models.errors import ModelError
from engine.models.files import Progress, listing, silent

_GGUF = "give the model that it was made from, as a folder or Hub id with config.json and .safetensors"


def resolve_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    progress: Progress = silent,
) -> Path:
    """Return the folder of a model: `name_or_path` itself, or the folder of the downloaded Hub model.

    Downloads only files that are used and not cached, without the safetensors if `weights` is False. `progress`: called
    with the bytes. Raises `ModelError` with a message of one line that says what to do.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        raise ModelError(f"{folder}: GGUF files are not supported; {_GGUF}")
    if folder.is_file():
        raise ModelError(f"{folder}: is a file; give the folder that holds config.json and the weights")
    if not folder.is_dir():
        from engine.models.download import download  # takes a tenth of a second, which local folders do not need

        folder = download(name_or_path, revision, download_dir, weights, progress)
    if not (folder / "config.json").is_file():
        if any(folder.glob("*.gguf")):
            raise ModelError(f"{folder}: holds GGUF files, which are not supported; {_GGUF}")
        raise ModelError(f"{folder}: holds no config.json (it holds {listing(folder)}); give the model's own folder")
    return folder
