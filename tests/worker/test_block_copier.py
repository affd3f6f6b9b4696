"""KV blocks leave the device and come back as they were, whatever the layers and wherever they go."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from engine.models.shard import Stage
from engine.worker.block_store.block_copier import BlockCopier
from engine.worker.device import CpuDevice
from engine.worker.kv_cache import KVCacheLayout
from tests.support.kv_tensors import allocate_kv


@dataclass(frozen=True, slots=True)
class Accelerator(CpuDevice):
    """Blocks are gathered on the device before they are copied to the host."""

    is_accelerator = True


@pytest.mark.parametrize("device", [CpuDevice(), Accelerator()], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("windows", "stage"),
    [([0], Stage()), ([0] * 3, Stage()), ([0] * 3, Stage(0, 2)), ([0, 64] * 2, Stage()), ([0, 64] * 2, Stage(1, 2))],
    ids=["one layer", "full", "first stage", "groups", "last stage of groups"],
)
def test_blocks_come_back_in_other_blocks(
    device: CpuDevice, dtype: torch.dtype, windows: list[int], stage: Stage
) -> None:
    layout = KVCacheLayout.of(windows, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    layout = replace(layout, own_layers=stage.layers(len(windows)))
    generator = torch.Generator().manual_seed(0)
    kv_cache = allocate_kv(layout, 7, device)
    for kv in kv_cache:
        kv.copy_(torch.randn(kv.shape, generator=generator).to(dtype))
    before = [kv.clone().view(torch.uint8) for kv in kv_cache]
    copier = BlockCopier(kv_cache, layout, device, 3)
    buffer = copier.new_buffer()
    assert buffer.shape == (3, layout.block_bytes)
    copier.read([5, 0, 2], buffer).synchronize()
    for kv in kv_cache:
        kv.view(torch.uint8)[:, [5, 0, 2]] = 0
    copier.write(buffer[:2], [6, 1]).synchronize()
    for kv, was in zip(kv_cache, before, strict=True):
        now = kv.view(torch.uint8)
        assert now[:, 6].equal(was[:, 5])
        assert now[:, 1].equal(was[:, 0])
        assert now[:, [3, 4]].equal(was[:, [3, 4]])
        assert not now[:, [0, 2, 5]].any()
