"""The KV cache's memory: how layers share its blocks, how many blocks fit, and the tensors that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.cache_groups import CacheGroup, longest_sequence, most_blocks
from engine.worker.device import Device, Memory


class KVCacheTooSmallError(ValueError):
    """The KV cache cannot hold one sequence of the context length that was asked for."""


HEADROOM = 2.0  # how much larger than in its calibration a key or value may be before it saturates


def e4m3_scales(kv: Tensor) -> Tensor:
    """What to divide K and V of each head by before they become e4m3: [2, num_kv_heads] float32.

    kv [2, num_blocks, num_kv_heads, block_size, head_dim] shows how large they get, in any dtype.
    """
    largest = kv.abs().amax((1, 3, 4)).float()
    return torch.where(largest > 0, largest * (HEADROOM / torch.finfo(torch.float8_e4m3fn).max), 1.0)


MAX_PADDING = 1.15  # how much larger than its layers a block may be made, to have fewer groups


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """How layers share the KV cache's blocks. All blocks have the same size, so that every group can use any of them.

    A block holds K and V of `block_size` tokens in `num_slots` layers of one group. Layers that keep the same part of the
    past are divided into groups of at most `num_slots`; layer l is in group `group_of[l]`, at `slot_of[l]` of its blocks.
    """

    groups: tuple[CacheGroup, ...]
    group_of: tuple[int, ...]
    slot_of: tuple[int, ...]
    num_slots: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, windows: Sequence[int], num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> KVCacheLayout:
        """`windows`: of each layer, 0 for full attention."""
        num_slots = _slots_of_a_block(list(Counter(windows).values()))
        groups: list[CacheGroup] = []
        group_of, slot_of = [], []
        open_groups: dict[int, tuple[int, int]] = {}  # window → the group that is being filled, its layers so far
        for window in windows:
            group, slot = open_groups.get(window, (-1, num_slots))
            if slot == num_slots:
                group, slot = len(groups), 0
                groups.append(CacheGroup(window))
            open_groups[window] = group, slot + 1
            group_of.append(group)
            slot_of.append(slot)
        return cls(tuple(groups), tuple(group_of), tuple(slot_of), num_slots, num_kv_heads, block_size, head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_slots * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: Device) -> list[Tensor]:
        """For each layer [2, num_blocks, num_kv_heads, block_size, head_dim], K then V: layers at the same slot of different
        groups have the same memory, and never the same block.

        Zeroed: a slot never written must not read as NaN.
        """
        shape = (2, num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        slots = [device.zeros(*shape, dtype=self.dtype) for _ in range(self.num_slots)]
        return [slots[slot] for slot in self.slot_of]

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """The most blocks that a request of so many tokens holds at a time; a step computes up to `max_chunk` of them."""
        return most_blocks(self.groups, num_tokens, self.block_size, max_chunk)

    def check_fits(self, num_blocks: int, max_model_len: int, max_chunk: int) -> None:
        """`KVCacheTooSmallError` unless one sequence of `max_model_len` tokens fits into `num_blocks` blocks."""
        longest = longest_sequence(self.groups, num_blocks, self.block_size, max_chunk, max_model_len)
        if longest < max_model_len:
            raise KVCacheTooSmallError(
                f"the KV cache has room for {longest} tokens ({num_blocks} blocks of {self.block_size}), but "
                f"max_model_len is {max_model_len}: use --max-model-len {longest} or less, or give the cache more memory "
                "(--gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override)"
            )

    def cpu_cache_bytes(self, max_num_seqs: int, max_model_len: int, max_chunk: int, free: int) -> int:
        """On a CPU with `free` bytes: enough for every sequence at full length, but at most 4 GiB or a quarter of them."""
        of_one = self.most_blocks(max_model_len, max_chunk) * self.block_bytes
        return min(max_num_seqs * of_one, max(4 << 30, of_one), free // 4)


def _slots_of_a_block(counts: Sequence[int]) -> int:
    """The number of layers in a block that makes the fewest groups, then the least padding; counts: layers of each kind."""

    def cost(num_slots: int) -> tuple[int, int]:
        num_groups = sum(-(-count // num_slots) for count in counts)
        return num_groups, num_groups * num_slots

    return min((n for n in range(1, max(counts) + 1) if cost(n)[1] <= MAX_PADDING * sum(counts)), key=cost)


def gpu_cache_bytes(memory: Memory, utilization: float, reserve: int) -> int:
    """Bytes left for the KV cache: the share of the device's memory this process may use, less what it holds at its peak.

    `memory` is measured after a profiling run, so that its peak is that of weights and activations. What other processes
    hold counts against the share. `reserve` bytes stay free for graphs.
    """
    outside = memory.total - memory.free - memory.used
    return int(memory.total * utilization) - outside - memory.peak - reserve
