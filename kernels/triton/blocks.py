"""Copies of whole blocks in Triton: one program for each block and piece of it."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.data.block_parts import CHUNK_BYTES, BlockParts

WORDS = {1: (tl.uint8, 1), 2: (tl.int16, 2), 4: (tl.int32, 4), 8: (tl.int64, 8), 16: (tl.int64, 8)}  # and their bytes


@triton.jit
def _copy_blocks_kernel(
    packed, pieces, block_ids, row_bytes,
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr, ALIGNMENT: tl.constexpr, SIZE: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Launched without programmatic dependence: it waits for all earlier work of its stream."""
    piece = pieces + tl.program_id(0) * 4
    row = tl.program_id(1).to(tl.int64)
    address = tl.load(piece) + tl.load(block_ids + row) * tl.load(piece + 1)
    offset = row * row_bytes + tl.load(piece + 2)
    num_words = tl.load(piece + 3) // WORD_BYTES
    if ALIGNMENT == 16:
        num_words = tl.multiple_of(num_words, 2)
    in_cache = tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGNMENT)
    in_row = tl.multiple_of((packed + offset).to(tl.pointer_type(WORD), bitcast=True), ALIGNMENT)
    words = tl.arange(0, SIZE)
    mask = words < num_words
    if GATHER:
        tl.store(in_row + words, tl.load(in_cache + words, mask=mask), mask=mask)
    else:
        tl.store(in_cache + words, tl.load(in_row + words, mask=mask), mask=mask)


def _copy(packed: Tensor, parts: BlockParts, block_ids: Tensor, gather: bool) -> None:
    assert packed.is_contiguous()
    assert len(packed) == len(block_ids)
    assert packed.shape[1] >= parts.block_bytes
    alignment = math.gcd(parts.alignment, packed.shape[1])
    word, word_bytes = WORDS[alignment]
    _copy_blocks_kernel[(len(parts.pieces), len(block_ids))](
        packed, parts.pieces, block_ids, packed.shape[1], WORD=word, WORD_BYTES=word_bytes,
        ALIGNMENT=alignment, SIZE=CHUNK_BYTES // word_bytes, GATHER=gather, num_warps=4,
    )  # fmt: skip


def gather_blocks(packed: Tensor, parts: BlockParts, block_ids: Tensor) -> None:
    """See `kernels.reference.gather_blocks`."""
    _copy(packed, parts, block_ids, gather=True)


def scatter_blocks(packed: Tensor, parts: BlockParts, block_ids: Tensor) -> None:
    """See `kernels.reference.scatter_blocks`."""
    _copy(packed, parts, block_ids, gather=False)
