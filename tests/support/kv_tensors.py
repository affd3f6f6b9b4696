"""The KV cache of models whose layers all attend."""

from __future__ import annotations

from torch import Tensor

from engine.worker.device import Device
from engine.worker.kv_cache import KVCacheLayout


def allocate_kv(layout: KVCacheLayout, num_blocks: int, device: Device) -> list[Tensor]:
    """Allocate `num_blocks` blocks: a tensor for each layer, see `KVCacheLayout.allocate`."""
    return [kv for kv in layout.allocate(num_blocks, device) if isinstance(kv, Tensor)]
