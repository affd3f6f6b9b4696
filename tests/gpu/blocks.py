"""Checks of KV blocks that leave the device for the prefix cache's file, and come back."""

from __future__ import annotations

from functools import partial

import torch

from engine.worker.block_store.block_copier import BlockCopier
from engine.worker.device import find_device
from engine.worker.kv_cache import KVCacheLayout
from tests.gpu.checks import BF16, E4M3, Checks

NUM_BLOCKS, NUM_COPIED = 64, 4


def check_blocks(checks: Checks) -> None:
    """Every byte of the copied blocks, and none of the others; for a model of 28 layers, some of them with windows."""
    device = find_device(checks.device)
    for windows, dtype in (([0] * 28, BF16), ([0, 0, 512, 512] * 7, BF16), ([0] * 28, E4M3)):
        layout = KVCacheLayout.of(windows, num_kv_heads=8, head_dim=128, block_size=16, dtype=dtype)
        kv_cache = layout.allocate(NUM_BLOCKS, device)
        slots = layout.slots(kv_cache)
        for kv in slots:
            kv.copy_(torch.randint(256, kv.shape, dtype=torch.uint8, device=device.torch_device))
        want = [kv.clone() for kv in slots]
        copier = BlockCopier(kv_cache, layout, device, NUM_COPIED)
        buffer, source = copier.new_buffer(), list(range(1, 2 * NUM_COPIED, 2))
        target = [NUM_BLOCKS - 1 - block_id for block_id in source]
        copier.read(source, buffer).synchronize()
        copier.write(buffer, target).synchronize()
        for kv in want:
            kv[:, target] = kv[:, source]
        error = sum(float((kv != other).float().mean()) for kv, other in zip(slots, want, strict=True))
        name, size = f"{len(layout.groups)} groups, {dtype}", NUM_COPIED * copier.block_bytes
        checks.add(f"{NUM_COPIED} blocks out and in: {name}", error, 0.0, partial(copier.read, source, buffer), size)
