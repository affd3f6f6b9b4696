"""Blocks of GGUF files in the order of `kernels.data.block_weight`, and their dequantisation."""

import pytest
import torch

pytest.importorskip("triton")

from engine.models.gguf.blocks import TYPES
from kernels.data.block_weight import BLOCK_KINDS, BlockKind, BlockWeight, pack_rows, pieces_of_word, unit_channels
from kernels.triton.block_weight import block_gemm, dequantize
from tests.oracles.random_weights import random_blocks


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("n", "units"), [(1, 1), (19, 5)])
def test_dequantised_blocks_equal_the_files(kind: BlockKind, n: int, units: int) -> None:
    blocks = random_blocks(kind, n, units * unit_channels(kind))
    rows = pack_rows(kind, [blocks[: n // 2 + 1], blocks[n // 2 + 1 :]])
    assert rows.nbytes == blocks.nbytes
    want = TYPES[kind.upper()].decode(blocks.flatten(1))
    torch.testing.assert_close(dequantize(BlockWeight.of([rows]), torch.float32), want, rtol=1e-6, atol=1e-6)


def test_parts_of_several_types() -> None:
    blocks = {kind: random_blocks(kind, 3, 512) for kind in BLOCK_KINDS}
    weight = BlockWeight.of([pack_rows(kind, [each]) for kind, each in blocks.items()])
    want = torch.cat([TYPES[kind.upper()].decode(each.flatten(1)) for kind, each in blocks.items()])
    got = dequantize(weight, torch.bfloat16)
    assert (len(weight), weight.num_channels) == (12, 512)
    assert weight.nbytes == sum(each.nbytes for each in blocks.values())
    torch.testing.assert_close(got.float(), want, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_words_have_all_pieces(kind: BlockKind) -> None:
    pieces = [piece for j in range(8) for piece in pieces_of_word(kind, j)]
    assert sorted(pieces) == list(range(unit_channels(kind) // 16))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("num_tokens", "n", "units"), [(19, 70, 3), (80, 20, 9)])
def test_gemm(kind: BlockKind, num_tokens: int, n: int, units: int) -> None:
    k = units * unit_channels(kind)
    blocks = random_blocks(kind, n, k)
    weight = BlockWeight.of([pack_rows(kind, [blocks])])
    x, bias, residual = torch.randn(num_tokens, k), torch.randn(n), torch.randn(num_tokens, n)
    want = x.double() @ TYPES[kind.upper()].decode(blocks.flatten(1)).double().T
    got = block_gemm(x, weight, None, None)
    assert (got - want).norm() < 1e-5 * want.norm()
    into = residual.clone()
    got = block_gemm(x, weight, bias, into)
    assert got.data_ptr() == into.data_ptr()
    want += residual.double() + bias.double()
    assert (got - want).norm() < 1e-5 * want.norm()


def test_gemm_of_several_types() -> None:
    blocks = {kind: random_blocks(kind, 20, 512) for kind in BLOCK_KINDS}
    weight = BlockWeight.of([pack_rows(kind, [each]) for kind, each in blocks.items()])
    exact = torch.cat([TYPES[kind.upper()].decode(each.flatten(1)) for kind, each in blocks.items()])
    x = torch.randn(33, 512)
    want = x.double() @ exact.double().T
    assert (block_gemm(x, weight, None, None) - want).norm() < 1e-5 * want.norm()
