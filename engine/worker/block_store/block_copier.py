"""Copies whole blocks between the device and buffers in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.models.mixers import LayerCache
from engine.worker.device import Device, Event
from engine.worker.kv_cache import KVCacheLayout


class Copier(Protocol):
    """Copies blocks of one pool. Copies are queued like steps: they see what was launched before them."""

    layout: KVCacheLayout
    block_bytes: int
    max_blocks: int  # the most that are copied at a time

    def new_buffer(self) -> Tensor: ...

    def read(self, block_ids: Sequence[int], buffer: Tensor) -> Event: ...

    def write(self, buffer: Tensor, block_ids: Sequence[int]) -> Event: ...


class BlockCopier:
    """Copies KV blocks. Copies are queued like steps: they see what was launched before them, and nothing that is
    launched later.
    """

    def __init__(self, kv_cache: Sequence[LayerCache], layout: KVCacheLayout, device: Device, max_blocks: int) -> None:
        """`kv_cache`: of each layer, as `layout` allocates it. At most `max_blocks` are copied at a time."""
        self.layout, self.block_bytes, self.max_blocks = layout, layout.block_bytes, max_blocks
        self._device = device
        self._slots = layout.slots(kv_cache)
        self._on_device = None  # [max_blocks, block_bytes]: where blocks are gathered before they cross the bus
        if device.is_accelerator:
            self._on_device = torch.empty(max_blocks, self.block_bytes, dtype=torch.uint8, device=device.torch_device)

    def new_buffer(self) -> Tensor:
        """[max_blocks, block_bytes] uint8."""
        return self._device.pinned(self.max_blocks, self.block_bytes, dtype=torch.uint8)

    def read(self, block_ids: Sequence[int], buffer: Tensor) -> Event:
        """Copy these blocks into the first rows of a buffer, which holds them when the event is done."""
        n = len(block_ids)
        gathered = (buffer if self._on_device is None else self._on_device)[:n]
        ids, parts = self._indices(block_ids), self._parts(gathered)
        for slot, kv in enumerate(self._slots):
            parts[:, slot].copy_(kv[:, ids].transpose(0, 1))
        if self._on_device is not None:
            buffer[:n].copy_(gathered, non_blocking=True)
        return self._device.record_event()

    def write(self, buffer: Tensor, block_ids: Sequence[int]) -> Event:
        """Copy the first rows of a buffer into these blocks. It must not change before the event is done."""
        n = len(block_ids)
        gathered = buffer[:n]
        if self._on_device is not None:
            gathered = self._on_device[:n].copy_(gathered, non_blocking=True)
        ids, parts = self._indices(block_ids), self._parts(gathered)
        for slot, kv in enumerate(self._slots):
            kv.index_copy_(1, ids, parts[:, slot].transpose(0, 1))
        return self._device.record_event()

    def _indices(self, block_ids: Sequence[int]) -> Tensor:
        return self._device.upload(torch.tensor(block_ids, dtype=torch.int64))

    def _parts(self, gathered: Tensor) -> Tensor:
        """[n, block_bytes] as [n, layers of a block, num_parts, bytes]."""
        num_parts = self.layout.num_parts
        size = self.block_bytes // max(len(self._slots) * num_parts, 1)  # a stage may have no attention
        return gathered.view(len(gathered), len(self._slots), num_parts, size)


class StateCopier:
    """Copies blocks of recurrent states, one at a time and part by part: each is large."""

    def __init__(self, parts: Sequence[Tensor], layout: KVCacheLayout, device: Device) -> None:
        """`parts`: of a block, see `KVCacheLayout.block_parts`."""
        self.layout, self.block_bytes, self.max_blocks = layout, layout.state_bytes, 1
        self._device = device
        self._parts = parts

    def new_buffer(self) -> Tensor:
        """[1, block_bytes] uint8."""
        return self._device.pinned(1, self.block_bytes, dtype=torch.uint8)

    def read(self, block_ids: Sequence[int], buffer: Tensor) -> Event:
        """See `BlockCopier.read`."""
        for block_id, row in zip(block_ids, buffer, strict=False):
            for part, to in zip(self._parts, self._of_parts(row), strict=True):
                to.copy_(part[block_id], non_blocking=True)
        return self._device.record_event()

    def write(self, buffer: Tensor, block_ids: Sequence[int]) -> Event:
        """See `BlockCopier.write`."""
        for block_id, row in zip(block_ids, buffer, strict=False):
            for part, given in zip(self._parts, self._of_parts(row), strict=True):
                part[block_id].copy_(given, non_blocking=True)
        return self._device.record_event()

    def _of_parts(self, row: Tensor) -> Sequence[Tensor]:
        return row.split([part.shape[1] for part in self._parts])


def new_copier(
    pool: int, buffer_bytes: int, kv_cache: Sequence[LayerCache], layout: KVCacheLayout, device: Device
) -> Copier:
    """Return what copies blocks of a pool, through a buffer of about so many bytes. Pool 0: KV blocks."""
    if pool:
        return StateCopier(layout.block_parts(kv_cache)[pool], layout, device)
    return BlockCopier(kv_cache, layout, device, max(buffer_bytes // max(layout.block_bytes, 1), 1))
