"""Frees the device memory of a runner while its engine sleeps: weights move to host memory, KV cache and graphs go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from engine.models.files import Progress
from engine.worker.model_runner import ModelRunner
from engine.worker.startup import prepare_steps

CHUNK_BYTES = 256 << 20  # of pinned memory: whole chunks, since the allocator rounds sizes up to a power of two
_LEAVES = (type, ModuleType, BuiltinFunctionType, str, bytes, int, float, torch.dtype, torch.device)


class HostCopy:
    """The content of storages on a device, in host memory. The storages are empty until `restore`."""

    def __init__(self, storages: list[UntypedStorage], *, pinned: bool) -> None:
        """Move the storages. Tensors keep them, so every view is valid again after `restore`, at other addresses."""
        self._storages, self._sizes = storages, [storage.nbytes() for storage in storages]
        self.num_bytes = left = sum(self._sizes)
        self._chunks: list[Tensor] = []
        while left > 0:
            self._chunks.append(torch.empty(min(CHUNK_BYTES, left), dtype=torch.uint8, pin_memory=pinned))
            left -= CHUNK_BYTES
        for on_device, on_host in self._pieces():
            on_host.copy_(on_device)
        self._empty()

    def restore(self) -> None:
        """Move the content back. After an error, such as out of memory, it is still here: try again."""
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
            for on_device, on_host in self._pieces():
                on_device.copy_(on_host, non_blocking=True)
            if any(storage.device.type == "cuda" for storage in self._storages):
                torch.cuda.synchronize()
        except BaseException:
            self._empty()
            raise

    def _empty(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the same bytes on the device and in host memory."""
        at = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < size:
                index, offset = divmod(at, CHUNK_BYTES)
                count = min(size - start, CHUNK_BYTES - offset)
                yield values[start : start + count], self._chunks[index][offset : offset + count]
                start, at = start + count, at + count


class SleepingRunner:
    """A runner without KV cache, graphs and device memory. All its requests have ended, and its rows are forgotten."""

    def __init__(self, runner: ModelRunner) -> None:
        """Put the runner to sleep. On a CPU its weights stay where they are: in host memory."""
        self._runner = runner
        runner.reset()
        if runner.mapped is not None:  # the KV cache and the graphs stay, without memory
            if runner.host is not None:
                runner.host.detach()
            runner.mapped.unmap()
            free_unused(runner.device.torch_device)
            return
        runner.release_cache()
        free_unused(runner.device.torch_device)
        self._copy: HostCopy | None = None
        if runner.device.is_accelerator:
            self._copy = HostCopy(storages_of(runner, runner.device.torch_device), pinned=True)
            free_unused(runner.device.torch_device)

    def wake_up(self, progress: Progress) -> None:
        """Make the runner ready to step. After an error it still sleeps."""
        progress("loading", 0, 0)
        runner = self._runner
        if runner.mapped is not None:
            runner.mapped.map()
            parts = runner.block_parts()
            with torch.inference_mode():
                for part in (part for pool in parts for part in pool):
                    part.zero_()  # an unwritten slot must not read as NaN
            if runner.host is not None:
                runner.host.attach(parts)
            return
        if self._copy is not None:
            self._copy.restore()
        try:
            prepare_steps(self._runner, progress)
        except BaseException:
            self._runner.release_cache()
            if self._copy is not None:
                self._copy = HostCopy(storages_of(self._runner, self._runner.device.torch_device), pinned=True)
            raise


def free_unused(device: torch.device) -> None:
    """Return the memory of what nothing refers to any more, such as captured graphs in cycles, to the system."""
    is_frozen = gc.get_freeze_count() > 0  # in an engine process; offline, the process is the user's
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def storages_of(root: object, device: torch.device) -> list[UntypedStorage]:
    """Return the memory on the device of all tensors that `root` refers to, directly or through other objects."""
    found: dict[int, UntypedStorage] = {}
    for tensor in _tensors_of(root):
        if tensor.device.type == device.type and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found[storage._cdata] = storage
    return list(found.values())


def _tensors_of(root: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    kept: list[Any] = [root]  # keeps what is looked at alive, so that ids stay unique
    for each in kept:
        if id(each) in seen or isinstance(each, _LEAVES):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        # Functions refer to the globals of their module: only what they enclose belongs to `root`.
        kept += (each.__closure__ or ()) if isinstance(each, FunctionType) else gc.get_referents(each)
