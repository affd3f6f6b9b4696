"""Downloads models from the Hugging Face Hub."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm, validate_repo_id

from engine.models.errors import ModelError
from engine.models.files import PICKLED, WEIGHT_FILES, Progress, silent
from engine.models.gguf.header import SPLIT
from engine.models.lora import CONFIG, WEIGHTS

TEXT_FILES = ["*.json", "*.jinja", "tokenizer*", "tiktoken.model", "*.tiktoken", "vocab.txt"]
# Exports in subfolders (but not 1_Pooling, 2_Dense, nor additional_chat_templates), and Mistral's second copy of the
# weights.
OTHER_FORMATS = ["[!0-9]*/*.json", "[!0-9]*/*.safetensors", "tokenizer*/*", "consolidated*"]


def download(repo: str, revision: str | None, download_dir: str | None, weights: bool, progress: Progress) -> Path:
    """Return the folder of a Hub model, downloaded unless it is cached. Arguments and errors: see `resolve_model`."""
    patterns = TEXT_FILES + ([WEIGHT_FILES] if weights else [])
    folder = _download(repo, revision, download_dir, patterns, OTHER_FORMATS, progress)
    if weights and not any(folder.glob(WEIGHT_FILES)):
        return _download(repo, revision, download_dir, [PICKLED], [], progress)
    return folder


def download_gguf(
    repo: str, kind: str | None, file: str | None, revision: str | None, download_dir: str | None, progress: Progress
) -> Path:
    """Return the folder of a Hub model with its GGUF files: of a type such as Q4_K_M, or one and those it is split in.

    Others may lie there too. Errors: see `resolve_model`.
    """
    if kind is not None:  # in small or capital letters
        letters = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in kind)
        patterns = [f"*{letters}*.gguf"]
    else:
        assert file is not None
        split = SPLIT.fullmatch(file)
        patterns = [file if split is None else f"{glob.escape(split[1])}-*-of-{split[3]}.gguf"]
    return _download(repo, revision, download_dir, patterns, ["*mmproj*", "*imatrix*"], progress)


def download_adapter(repo: str) -> Path:
    """Return the folder of a LoRA adapter of the Hub. Errors: see `resolve_model`."""
    return _download(repo, None, None, [CONFIG, WEIGHTS], [], silent)


def _download(
    repo: str,
    revision: str | None,
    download_dir: str | None,
    patterns: list[str],
    ignored: list[str],
    progress: Progress,
) -> Path:
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise ModelError(
            f"{repo}: there is no such folder; give an existing one, or a model of the Hub as owner/name"
        ) from None
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                tqdm_class=_reporting(progress),
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repo}: access to this model is gated; ask for it at https://huggingface.co/{repo}, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo}: has no revision {revision!r}; give a branch, tag or commit that it has") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repo}: neither a local folder nor a model of the Hub; check the spelling; if private, set HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(
            f"{repo}: neither a local folder nor in the cache, and the Hub cannot be reached; "
            "check the path, the network, or unset HF_HUB_OFFLINE"
        ) from error
    except (OSError, httpx.HTTPError) as error:
        raise ModelError(f"{repo}: the download failed ({_first_line(error)}); try again") from error


def _reporting(progress: Progress) -> type[tqdm]:
    """Return a progress bar class for the Hub client that also reports bytes to `progress`, even if it is not drawn."""

    class Bar(tqdm):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.disable:
                self.n += n or 0
            if getattr(self, "unit", "B") == "B" and self.total:
                progress("downloading", int(self.n), int(self.total))
            return shown

    return Bar


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
