"""The KV cache's memory on a CPU: zeros of every dtype, which cost memory only once they are written."""

import resource
from pathlib import Path

import pytest
import torch

from engine.worker.kv_cache import KVCacheShape

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_zeros_and_keep_what_is_written(dtype: torch.dtype) -> None:
    layers = KVCacheShape(num_layers=2, num_kv_heads=3, block_size=16, head_dim=8, dtype=dtype).allocate(5, CPU)
    assert [(tuple(layer.shape), layer.dtype) for layer in layers] == [((2, 5, 3, 16, 8), dtype)] * 2
    assert not any(layer.float().any() for layer in layers)
    layers[0][1, 4] = 1
    assert layers[0].float().sum() == 3 * 16 * 8
    assert not layers[1].float().any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_blocks_that_nobody_wrote_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    shape = KVCacheShape(num_layers=2, num_kv_heads=4, block_size=16, head_dim=64, dtype=torch.float32)
    before = resident()
    layers = shape.allocate((1 << 30) // shape.block_bytes, CPU)
    assert sum(layer.nbytes for layer in layers) == 1 << 30
    assert resident() - before < 1 << 28
