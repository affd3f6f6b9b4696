"""Copies of whole blocks, by the reference and in Triton's interpreter."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import reference
from kernels.data.block_parts import CHUNK_BYTES, BlockParts
from kernels.triton import blocks

# Bytes of the parts; distance between blocks, if there are gaps.
SHAPES = [([16, 4096], 0), ([CHUNK_BYTES + 48, 32], 0), ([24, 8], 0), ([20], 64), ([6, 2], 0), ([3, 5], 0)]


@pytest.mark.parametrize("module", [blocks, reference], ids=["triton", "reference"])
@pytest.mark.parametrize(("sizes", "distance"), SHAPES)
def test_every_byte_of_these_blocks_and_no_other(module: Any, sizes: list[int], distance: int) -> None:
    parts = [torch.randint(256, (9, distance or size), dtype=torch.uint8)[:, :size] for size in sizes]
    place, block_ids = BlockParts.of(parts), torch.tensor([7, 0, 3])
    assert place.block_bytes == sum(sizes)
    packed = torch.full((3, place.block_bytes + 4), 99, dtype=torch.uint8)
    module.gather_blocks(packed, place, block_ids)
    assert torch.equal(packed[:, :-4], torch.cat([part[block_ids] for part in parts], 1))
    assert (packed[:, -4:] == 99).all()
    want = [part.clone() for part in parts]
    for part in want:
        part[[2, 8, 1]] = part[[7, 0, 3]]
    module.scatter_blocks(packed, place, torch.tensor([2, 8, 1]))
    for got, expected in zip(parts, want, strict=True):
        assert torch.equal(got, expected)


def test_alignment() -> None:
    memory = torch.zeros(64 * 9 + 8, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    assert BlockParts.of([memory[start : start + 9 * 64].view(9, 64)]).alignment == 16
    assert BlockParts.of([memory[start : start + 9 * 64].view(9, 64)[:, 4:]]).alignment == 4
    assert BlockParts.of([memory[start : start + 9 * 64].view(9, 64)[:, :9]]).alignment == 1
