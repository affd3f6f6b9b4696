"""The source of a model's weights: its folder, and folders whose tensors replace some of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.models.errors import ModelError
from engine.models.hub import resolve_model

if TYPE_CHECKING:  # not in an API process
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")  # Linux: files in memory, which all processes share
ADDRESSES = ("nccl://", "gloo://")  # begin the addresses from which weights are received


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The model's folder, and folders of safetensors files: a tensor is that of the last folder that has it."""

    folder: str
    overlays: tuple[str, ...] = ()

    def after(self, path: str) -> WeightSource:
        """Return the source after an update from `path`: a model's folder, or one that has only tensors.

        Drops folders whose tensors are all replaced. Raises `EngineError` for a folder that cannot be read.
        """
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise EngineError(f"there is no folder {folder}")
        if (folder / "config.json").is_file():
            return WeightSource(str(folder))
        names = _names(folder)
        kept = [each for each in self.overlays if each != str(folder) and not _names(Path(each)) <= names]
        return WeightSource(self.folder, (*kept, str(folder)))

    @classmethod
    def of(cls, config: EngineConfig) -> WeightSource:
        """Return the source from which an engine starts. Its model is on this machine already."""
        folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
        return cls(str(folder), config.weight_overlays)

    def applied(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of an engine that starts with these weights."""
        tokenizer = config.tokenizer or config.model
        return replace(config, model=self.folder, tokenizer=tokenizer, weight_overlays=self.overlays)


def _names(folder: Path) -> set[str]:
    from engine.models.checkpoints import SafetensorsFolder

    try:
        return set(SafetensorsFolder(folder).tensors())
    except ModelError as error:
        raise EngineError(str(error)) from None


class Updatable(Protocol):
    """An engine whose weights can be replaced."""

    @property
    def weights(self) -> WeightSource: ...
    def update_weights(self, path: str, overlays: Sequence[str] = ()) -> None: ...


class TensorFolders:
    """Folders of tensors in shared memory, each as long as an engine's weights come from it."""

    def __init__(self) -> None:
        self.folders: list[tempfile.TemporaryDirectory[str]] = []

    def update(self, engine: Updatable, weights: str | Mapping[str, Tensor]) -> None:
        """Replace the weights by those in a folder, or by tensors. Raises `EngineError`: those of before stay then."""
        if isinstance(weights, str) and is_address(weights):
            weights = _received(weights)
        if not isinstance(weights, str):
            self.folders.append(write_tensors(weights))
            weights = self.folders[-1].name
        try:
            source = engine.weights.after(weights)
            engine.update_weights(source.folder, source.overlays)
        finally:
            self.keep(engine.weights.overlays)

    def new(self) -> str:
        """Return an empty folder."""
        self.folders.append(_new_folder())
        return self.folders[-1].name

    def keep(self, used: Sequence[str]) -> None:
        """Remove all folders but those in use."""
        for folder in self.folders:
            if folder.name not in used:
                folder.cleanup()
        self.folders = [folder for folder in self.folders if folder.name in used]

    def close(self) -> None:
        """Remove all."""
        self.keep(())


def is_address(path: str) -> bool:
    """Return whether weights are received from there, see `weight_transfer`; else it is a folder."""
    return path.startswith(ADDRESSES)


def _received(address: str) -> Mapping[str, Tensor]:
    from engine.setup.weight_transfer import receive_weights

    try:
        return receive_weights(address)
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"no weights came from {address}: {error}") from None


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    in_memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="quire-weights-", dir=in_memory)


def write_tensors(tensors: Mapping[str, Tensor]) -> tempfile.TemporaryDirectory[str]:
    """Write tensors, by the checkpoint's names, to a new folder in shared memory. It exists until its `cleanup`."""
    from safetensors.torch import save_file

    folder = _new_folder()
    # Tensors that share memory, such as tied ones, would be refused.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, Path(folder.name, "model.safetensors"))
    return folder
