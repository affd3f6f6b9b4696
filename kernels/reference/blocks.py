"""Copies of whole blocks between a cache and rows of packed blocks."""

from __future__ import annotations

from torch import Tensor

from kernels.data.block_parts import BlockParts


def gather_blocks(packed: Tensor, parts: BlockParts, block_ids: Tensor) -> None:
    """Copy the blocks block_ids [N] int64 to packed [N, block_bytes or more] uint8, contiguous."""
    start = 0
    for part in parts.parts:
        end = start + part.shape[1]
        packed[:, start:end] = part[block_ids]
        start = end


def scatter_blocks(packed: Tensor, parts: BlockParts, block_ids: Tensor) -> None:
    """Copy packed [N, block_bytes or more] uint8, contiguous, to the blocks block_ids [N] int64, which all differ."""
    start = 0
    for part in parts.parts:
        end = start + part.shape[1]
        part[block_ids] = packed[:, start:end]
        start = end
