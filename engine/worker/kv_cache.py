"""The KV cache's memory: how many blocks fit, and the tensors that hold them. Never knows which block belongs to whom."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.spec import ModelSpec


class KVCacheTooSmallError(ValueError):
    """The KV cache cannot hold one sequence of the context length that was asked for."""


HEADROOM = 2.0  # how much larger than in its calibration a key or value may be before it saturates


def e4m3_scales(kv: Tensor) -> Tensor:
    """What to divide K and V of each head by before they become e4m3: [2, num_kv_heads] float32.

    kv [2, num_blocks, num_kv_heads, block_size, head_dim] shows how large they get, in any dtype.
    """
    largest = kv.abs().amax((1, 3, 4)).float()
    return torch.where(largest > 0, largest * (HEADROOM / torch.finfo(torch.float8_e4m3fn).max), 1.0)


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """One layer's cache is [2, num_blocks, num_kv_heads, block_size, head_dim]: K then V."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> KVCacheShape:
        mixer = spec.layers[0].mixer
        return cls(spec.num_layers, mixer.num_kv_heads, block_size, mixer.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """One zeroed tensor for each layer: a slot never written must not read as NaN."""
        shape = (2, num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        if device.type == "cpu":
            return [_untouched_zeros(shape, self.dtype) for _ in range(self.num_layers)]
        return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(self.num_layers)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages cost memory only once they are written: `torch.zeros` writes them all at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def check_fits(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """`KVCacheTooSmallError` unless one sequence of `max_model_len` tokens fits into `num_blocks` blocks."""
    if num_blocks * block_size < max_model_len:
        raise KVCacheTooSmallError(
            f"the KV cache has room for {num_blocks * block_size} tokens ({num_blocks} blocks of {block_size}), but "
            f"max_model_len is {max_model_len}: use --max-model-len {max(num_blocks * block_size, 0)} or less, or give the "
            "cache more memory (--gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override)"
        )


def gpu_cache_bytes(device: torch.device, utilization: float, reserve: int) -> int:
    """Bytes left for the KV cache: the share of the device's memory this process may use, less what it holds at its peak.

    Call after a profiling run: `torch.cuda.max_memory_reserved` is then the peak of weights and activations. Memory that
    other processes hold counts against the share. `reserve` bytes stay free for CUDA graphs.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - outside - torch.cuda.max_memory_reserved(device) - reserve


def cpu_cache_bytes(block_bytes: int, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """On a CPU: enough for every sequence at full length, but at most 4 GiB or a quarter of the free memory."""
    wanted = max_num_seqs * -(-max_model_len // block_size) * block_bytes
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(wanted, max(4 << 30, -(-max_model_len // block_size) * block_bytes), free // 4)
