"""The memory of whole KV blocks or blocks of states, which all layers share, for copies out of it and into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 8192  # most bytes that a program copies


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Addresses of the parts of a block: keys and values of each layer, or the parts of a state.

    A packed block is the bytes of its parts, one after the other: `block_bytes` in all.
    """

    parts: tuple[Tensor, ...]  # [num_blocks, bytes] uint8 each, the bytes contiguous
    # [N, 4] int64 on the device: address of a piece in block 0, distance of blocks, offset in a packed block, bytes.
    pieces: Tensor
    block_bytes: int
    alignment: int  # of all addresses, offsets and sizes: 1, 2, 4, 8 or 16 bytes

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> BlockParts:
        """`parts`: at least one."""
        rows, end = [], 0
        for part in parts:
            assert part.dtype == torch.uint8
            assert part.stride(1) == 1 or part.shape[1] == 1
            for start in range(0, part.shape[1], CHUNK_BYTES):
                size = min(CHUNK_BYTES, part.shape[1] - start)
                rows.append((part.data_ptr() + start, part.stride(0), end + start, size))
            end += part.shape[1]
        pieces = torch.tensor(rows, dtype=torch.int64, device=parts[0].device)
        return cls(tuple(parts), pieces, end, math.gcd(16, end, *(value for row in rows for value in row)))
