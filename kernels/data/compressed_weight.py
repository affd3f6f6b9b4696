"""Stacks of bfloat16 matrices in 12 bits a weight, without loss.

Nearly all weights of a row have one of 15 exponents: its largest and the 14 below. So a weight's code is its sign, the
7 bits of its significand and 4 bits for its exponent: 3/4 of the memory, and of what a GEMM reads. The few smaller
weights have code zero; they stand in a list for each block of rows, which a GEMM treats as additional columns.
(DFloat11, arXiv 2504.11651, has exponents in a code of variable length instead.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.data.quantized_weight import Weight

BLOCK = 64  # rows, and channels, of a block of codes
LISTED = (32, 64, 128)  # lengths of lists of small weights: all blocks of a stack have the same
CHUNK = 1 << 25  # weights that are compressed at once
LARGEST = 142  # the largest exponent of a row: that of 2^15, so that its scale is finite


@dataclass(frozen=True, slots=True)
class CompressedWeight:
    """W [E, N, K] bfloat16: N is a multiple of 128, or with `gated` of 256, and K of 64.

    A code of exponent c > 0, sign s and significand m stands for (-1)^s (1 + m / 128) 2^(c - 127) times its row's
    scale.

    A block is 64 rows: with `gated`, of each sixteen eight of the first half of N (gate) and eight of the other one
    (up). A block's 64 x 64 weights of some channels are 12 x 128 words: in the order of the tensor core's fragments,
    each thread of four warps, which have sixteen rows each, has three pieces of four words, one word for each sixteen
    channels. In the first two are signs and significands, in the third exponents. See `_words`.
    """

    codes: Tensor  # [E, N / 128, K / 64, 2, 3, 512] int32
    scale: Tensor  # [E, N] float32: powers of two; rows in the order of blocks
    # [E, N / 64, R] int64: a block's small weights: in the lowest 16 bits bfloat16, which stands for 2^-128 times its
    # value times its row's scale; in the next ones the channel; from bit 32 on the row
    small: Tensor
    gated: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        count, tiles, steps = self.codes.shape[:3]
        return count, tiles * 2 * BLOCK, steps * BLOCK

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes that a GEMM reads."""
        return self.codes.nbytes + self.scale.nbytes + self.small.nbytes

    def __len__(self) -> int:
        """Return the number of matrices."""
        return len(self.codes)


def compress(weight: Tensor, gated: bool) -> CompressedWeight | None:
    """weight [E, N, K] bfloat16 → the same in 12 bits; None: it does not lie in this form, or has too many small
    weights.
    """
    count, n, k = weight.shape
    if n % (4 * BLOCK if gated else 2 * BLOCK) or k % BLOCK or k > 1 << 16 or weight.dtype != torch.bfloat16:
        return None
    device = weight.device
    codes = torch.empty(count, n // 128, k // 64, 2, 3, 512, dtype=torch.int32, device=device)
    scale = torch.empty(count, n, dtype=torch.float32, device=device)
    small = torch.zeros(count, n // 64, LISTED[-1], dtype=torch.int64, device=device)
    each = max(CHUNK // (n * k), 1)
    most = 0
    for at in range(0, count, each):
        part = slice(at, at + each)
        found = _compress(weight[part], gated, codes[part], scale[part], small[part])
        if found is None:
            return None
        most = max(most, found)
    room = next(room for room in LISTED if room >= most)
    return CompressedWeight(codes, scale, small[:, :, :room].contiguous(), gated)


def _compress(weight: Tensor, gated: bool, codes: Tensor, scale: Tensor, small: Tensor) -> int | None:
    """Write some matrices' parts of a `CompressedWeight`; the largest number of small weights in a block, None: not
    possible.
    """
    blocks = _blocks(weight, gated).view(torch.int16)
    exponent = (blocks >> 7).bitwise_and_(255)
    largest = exponent.amax((4, 5)).clamp_(min=16)
    if int(largest.max()) > LARGEST:
        return None
    code = exponent.sub_((largest - 15)[..., None, None])
    bits = blocks & -32641  # 0x807f: the sign and the significand
    power = (largest - 15).to(torch.int32)  # the scale's exponent
    scale.copy_((power + 127 << 23).view(torch.float32).reshape(scale.shape))
    at = ((code <= 0) & (blocks & 32767 != 0)).nonzero(as_tuple=True)
    values = blocks[at].view(torch.bfloat16)
    factor = power[at[:4]].double()
    listed = (values.double() * torch.exp2(128 - factor)).to(torch.bfloat16)
    if not torch.equal(listed.double() * torch.exp2(factor - 128), values.double()):
        return None
    block = at[0] * blocks.shape[1] + at[1]  # in ascending order
    number = torch.arange(len(block), device=block.device) - torch.searchsorted(block, block)
    most = int(number.max()) + 1 if len(number) else 0
    if most > LISTED[-1]:
        return None
    row, channel = at[2] * 16 + at[3], at[4] * 16 + at[5]
    small.view(-1, LISTED[-1])[block, number] = (listed.view(torch.int16).long() & 0xFFFF) | channel << 16 | row << 32
    bits[at] = 0
    codes.copy_(_words(bits, code.clamp_(min=0)))
    return most


def _blocks(weight: Tensor, gated: bool) -> Tensor:
    """[E, N, K] → [E, N / 64, warps, rows, K / 16, 16], rows in the order of `CompressedWeight`."""
    count, n, k = weight.shape
    if gated:
        weight = weight.unflatten(1, (2, n // 16, 8)).transpose(1, 2)
    return weight.reshape(count, n // BLOCK, 4, 16, k // 16, 16)


def _words(bits: Tensor, code: Tensor) -> Tensor:
    """Signs and significands (bits 15 and 0 to 6), and exponents' codes, of `_blocks` → words as in `CompressedWeight`.

    A thread of the tensor core has of sixteen channels two pairs of each of two rows. A word of its first piece has a
    pair of the upper row in place and one of the lower row eight bits to the left, rotated; the second piece is that
    eight channels on. A word of the third has the codes of these four pairs, of a pair four bits in each half.
    """
    pairs = [_fragment(part) for part in (bits, code)]
    both = (pairs[0][..., 0].int() & 0xFFFF) | pairs[0][..., 1].int() << 16
    upper, lower = both[..., 0], both[..., 1]
    significands = upper | lower << 8 | (lower >> 24 & 255)
    shifts = torch.arange(0, 16, 4, device=code.device, dtype=torch.int32).view(2, 2)
    exponents = ((pairs[1][..., 0].int() | pairs[1][..., 1].int() << 16) << shifts).sum((-1, -2), dtype=torch.int32)
    return torch.stack([significands[..., 0], significands[..., 1], exponents], 4).flatten(5)


def _fragment(x: Tensor) -> Tensor:
    """`_blocks` → [E, N / 128, K / 64, 2, warps, rows mod 8, pairs, steps, halves of channels, halves of rows,
    pair].
    """
    count, num_blocks, _, _, steps, _ = x.shape
    x = x.reshape(count, num_blocks // 2, 2, 4, 2, 8, steps // 4, 4, 2, 4, 2)
    return x.permute(0, 1, 6, 2, 3, 5, 9, 7, 8, 4, 10)


def decompress(weight: CompressedWeight) -> Tensor:
    """[E, N, K] bfloat16, as it was."""
    return torch.stack(list(_decompressed(weight)))


def _decompressed(weight: CompressedWeight) -> Iterator[Tensor]:
    _, n, k = weight.shape
    for codes, scale, small in zip(weight.codes, weight.scale, weight.small, strict=True):
        words = codes.view(n // 128, k // 64, 2, 3, 4, 8, 4, 4)
        pieces = words[:, :, :, :2]
        pairs = torch.stack([pieces, (pieces << 24) | (pieces >> 8 & 0xFFFFFF)], -1)  # upper and lower rows
        halves = torch.stack([pairs & 0x807F, pairs >> 16 & 0x807F], -1)
        shifts = torch.tensor([[[0, 16], [4, 20]], [[8, 24], [12, 28]]], device=codes.device).view(2, 1, 1, 1, 1, 2, 2)
        exponents = words[:, :, :, 2, None, :, :, :, :, None, None] >> shifts & 15
        values = (halves | exponents << 7).to(torch.int16).view(torch.bfloat16).double()
        # [tiles, K / 64, 2, halves of channels, warps, rows mod 8, pairs, steps, halves of rows, pair]
        rows = values.permute(0, 2, 4, 8, 5, 1, 7, 3, 6, 9).reshape(n // 64, 64, k)
        listed = (small & 0xFFFF).to(torch.int16).view(torch.bfloat16).double() * 2.0**-128
        block = torch.arange(n // 64, device=codes.device)[:, None].expand_as(small)
        rows.index_put_((block, small >> 32, small >> 16 & 0xFFFF), listed, accumulate=True)
        result = (rows.view(n, k) * scale.double()[:, None]).to(torch.bfloat16)
        if weight.gated:
            result = result.view(n // 16, 2, 8, k).transpose(0, 1).reshape(n, k)
        yield result


ExpertWeight: TypeAlias = Weight | CompressedWeight
