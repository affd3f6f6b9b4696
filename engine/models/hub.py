"""Finds a model's files in a local folder or on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from engine.models.errors import ModelError
from engine.models.files import WEIGHT_FILES, Progress, listing, silent
from engine.models.gguf.folder import model_folder
from engine.models.gguf.header import SPLIT

GGUF = ".gguf"
OTHER_GGUF = re.compile(r"(?i)(^|[-._/])(mmproj|imatrix)")  # of images, and statistics
# A model of the Hub with a type, OWNER/NAME:Q4_K_M, or with a file, OWNER/NAME:FILE.gguf or OWNER/NAME/FILE.gguf.
OF_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::(?!.*\.gguf$)([\w.-]+)|[:/](\S+\.gguf))")


def resolve_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    progress: Progress = silent,
) -> Path:
    """Return the folder of a model: `name_or_path` itself, or the folder of the downloaded Hub model.

    Of a GGUF file it is a folder in Quire's cache, which is made if it is absent.

    Downloads only files that are used and not cached, without the safetensors if `weights` is False. `progress`: called
    with the bytes. Raises `ModelError` with a message of one line that says what to do.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_file():
        if folder.suffix != GGUF:
            raise ModelError(
                f"{folder}: is a file; give a .gguf file, or the folder that holds config.json and the weights"
            )
        return model_folder(folder)
    if not folder.is_dir():
        from engine.models.download import download, download_gguf  # takes a tenth of a second

        if (match := OF_HUB.fullmatch(name_or_path)) is not None:
            repo, kind, file = match.groups()
            folder = download_gguf(repo, kind, file, revision, download_dir, progress)
            return model_folder(_chosen(folder, folder.rglob("*" + GGUF), kind, file), folder)
        folder = download(name_or_path, revision, download_dir, weights, progress)
    elif not any(folder.glob(WEIGHT_FILES)) and any(folder.glob("*" + GGUF)):
        return model_folder(_chosen(folder, folder.glob("*" + GGUF)), folder)
    if not (folder / "config.json").is_file():
        advice = "; of a GGUF model of the Hub give the type too, OWNER/NAME:Q4_K_M" if "/" in name_or_path else ""
        raise ModelError(
            f"{folder}: holds no config.json (it holds {listing(folder)}); give the model's own folder{advice}"
        )
    return folder


def short_name(name_or_path: str) -> str:
    """Return a model's name: that of its folder, or its file without .gguf, or that of the Hub."""
    path = Path(name_or_path).expanduser()
    return path.resolve().name if path.is_dir() else path.stem if path.is_file() else name_or_path


def _chosen(folder: Path, files: Iterable[Path], kind: str | None = None, name: str | None = None) -> Path:
    """Return the one model among GGUF files: of a type, or of a name. Raises `ModelError` if there are none or several.

    A split model counts once.
    """
    models: dict[str, Path] = {}
    for file in sorted(files):
        path = file.relative_to(folder).as_posix()
        split = SPLIT.fullmatch(file.name)
        if OTHER_GGUF.search(path) is None and (name is None or path == name) and (kind is None or is_of(path, kind)):
            models.setdefault(split[1] if split else file.name, file)
    if len(models) != 1:
        held = ", ".join(sorted(models)[:8]) if models else "none"
        wanted = name or (f"of type {kind}" if kind else "in the folder")
        raise ModelError(f"{folder}: must hold one GGUF model {wanted}, it holds {held}; give the file itself")
    return next(iter(models.values()))


def is_of(path: str, kind: str) -> bool:
    """Return whether the path of a GGUF file names this type of quantisation."""
    return re.search(rf"(?i)(^|[-._/]){re.escape(kind)}([-./]|$)", path) is not None
