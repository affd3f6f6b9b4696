"""Matrices of GGUF's blocks on GPUs: the bytes of the file, ordered as kernels load them.

A unit is what one warp multiplies at once: 256 channels of sixteen rows, of q8_0 128. Of each row it has 32 words of
four bytes, eight for each of the four threads that share the row in the tensor core's tile: thread t has of each
sixteen channels the four from 4t on. `low` holds the codes, or their low four bits, and `high` the bits above. Scales
lie by units, so that those of sixteen rows are side by side.

Word j = 0 ... 7 of a thread has the codes of two pieces of sixteen channels, the second in the high halves of its
bytes: see `pieces_of_word`. Channels 4t, 4t + 1, 4t + 2 and 4t + 3 are in bytes 0, 2, 1 and 3: so one mask leaves two
neighbours in the halves of a register.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.data.quantized_weight import QuantizedWeight

BlockKind: TypeAlias = Literal["q4_k", "q5_k", "q6_k", "q8_0"]
BLOCK_KINDS: tuple[BlockKind, ...] = ("q4_k", "q5_k", "q6_k", "q8_0")
PACKED_AT_ONCE = 1 << 24  # codes: each needs some six bytes meanwhile


def reads_blocks(capability: tuple[int, int] | None, dtype: torch.dtype) -> bool:
    """Return whether GPUs of this compute capability multiply blocks by activations of `dtype`. Others lack the
    weight-only GEMM for 9 to 512 tokens: what they have instead takes up to 2.5 times as long.
    """
    return capability is not None and capability[0] == 9 and dtype == torch.bfloat16


def have_order(kinds: Sequence[str], num_channels: int) -> bool:
    """Return whether rows of blocks of these types of GGUF have an order for kernels. It takes the same bytes."""
    names = {name.upper(): name for name in BLOCK_KINDS}
    return all(kind in names and num_channels % unit_channels(names[kind]) == 0 for kind in kinds)


def unit_channels(kind: BlockKind) -> int:
    """Return the number of a unit's channels."""
    return 128 if kind == "q8_0" else 256


def pieces_of_word(kind: BlockKind, j: int) -> tuple[int, ...]:
    """Return which sixteen channels of a unit the low halves of word j have, and the high ones."""
    if kind == "q8_0":
        return (j,)
    if kind == "q6_k":
        return 2 * j, 2 * j + 1
    return j // 2 * 4 + j % 2, j // 2 * 4 + 2 + j % 2


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of blocks of one type. N rows, U units of channels.

    x = scale · code - minimum. q8_0: a float16 scale for 32 channels. q4_k and q5_k: for 32 channels scales and minima
    of six bits, as in the file, after two float16 factors. q6_k: int8 scales for 16 channels, and `factor`; a code's
    value is the code less 32.
    """

    kind: BlockKind
    low: Tensor  # [N, U, 128] uint8
    scale: Tensor  # [U, N, 16] uint8, of q8_0 [U, N, 8]
    high: Tensor | None = None  # [N, U, 32 or 64] uint8: q5_k, q6_k
    factor: Tensor | None = None  # [U, N] float16: q6_k

    def __len__(self) -> int:
        return len(self.low)

    @property
    def num_channels(self) -> int:
        return self.low.shape[1] * unit_channels(self.kind)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.low, self.scale, self.high, self.factor) if each is not None)


@dataclass(frozen=True, slots=True)
class BlockWeight(QuantizedWeight):
    """W [N, K] as parts below each other, which differ in their type. `codes` and `scale` are those of the first."""

    parts: tuple[BlockRows, ...] = ()

    @staticmethod
    def of(parts: Sequence[BlockRows]) -> BlockWeight:
        """Return the matrix of these parts."""
        return BlockWeight("blocks", parts[0].low, parts[0].scale, group=32, parts=tuple(parts))

    @property
    def num_channels(self) -> int:
        return self.parts[0].num_channels

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def pack_rows(kind: BlockKind, parts: Sequence[Tensor]) -> BlockRows:
    """Pack rows of blocks [n, blocks, bytes] uint8, as in a file, below each other."""
    n, units = sum(map(len, parts)), parts[0].shape[1] // (4 if kind == "q8_0" else 1)
    device = parts[0].device

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    out = BlockRows(
        kind,
        empty(n, units, 128),
        empty(units, n, 8 if kind == "q8_0" else 16),
        empty(n, units, 32 if kind == "q5_k" else 64) if kind in ("q5_k", "q6_k") else None,
        empty(units, n, dtype=torch.float16) if kind == "q6_k" else None,
    )
    step = max(PACKED_AT_ONCE // (units * unit_channels(kind)), 1)
    first = 0
    for part in parts:
        for rows in part.split(step):
            _pack(out, first, rows)
            first += len(rows)
    return out


def _pack(out: BlockRows, first: int, blocks: Tensor) -> None:
    """Fill the rows from `first` on."""
    n, here = len(blocks), slice(first, first + len(blocks))
    if out.kind == "q8_0":
        units = blocks.shape[1] // 4
        codes = blocks[..., 2:].reshape(n, units, 4, 2, 4, 2, 2)  # group, piece, t, e / 2, e mod 2
        out.low[here] = _low(codes.reshape(n, units, 8, 4, 2, 2))
        out.scale[:, here] = blocks[..., :2].reshape(n, units, 8).transpose(0, 1)
        return
    units = blocks.shape[1]
    if out.kind == "q6_k":
        low, high = blocks[..., :128].reshape(n, units, 2, 64), blocks[..., 128:192].reshape(n, units, 2, 32)
        codes = torch.stack([low & 15, low >> 4], 3)  # each half of the block: the low nibbles' 64 channels first
        above = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
        # word, half of its bytes, t, e / 2, e mod 2
        codes, above = codes.reshape(n, units, 8, 2, 4, 2, 2), above.reshape(n, units, 8, 2, 4, 2, 2)
        assert out.high is not None
        assert out.factor is not None
        # [n, units, pair of words, k, half, t, e / 2, e mod 2] -> [t, pair, e mod 2, k, (e / 2, half)]
        fields = above.reshape(n, units, 4, 2, 2, 4, 2, 2).permute(0, 1, 5, 2, 7, 3, 6, 4)
        out.high[here] = _fields(fields.reshape(n, units, 64, 4), 2)
        out.scale[:, here] = blocks[..., 192:208].transpose(0, 1)
        out.factor[:, here] = blocks[..., 208:210].contiguous().view(torch.float16).squeeze(2).transpose(0, 1)
    else:
        at = 48 if out.kind == "q5_k" else 16
        low = blocks[..., at:].reshape(n, units, 4, 32)
        pairs = torch.stack([low & 15, low >> 4], 3)  # [pair of groups, half, 32]
        codes = _by_words(pairs)
        out.scale[:, here] = blocks[..., :16].transpose(0, 1)
        if out.high is not None:
            bits = torch.stack([blocks[..., 16:48] >> shift & 1 for shift in range(8)], 2)  # [group, 32]
            above = _by_words(bits.reshape(n, units, 4, 2, 32))
            # [h, jj / 2, jj mod 2, half, t, e / 2, e mod 2] -> [t, h, e mod 2, jj / 2, (jj mod 2, e / 2, half)]
            fields = above.reshape(n, units, 2, 2, 2, 2, 4, 2, 2).permute(0, 1, 6, 2, 8, 3, 4, 7, 5)
            out.high[here] = _fields(fields.reshape(n, units, 32, 8), 1)
    out.low[here] = _low(codes[:, :, :, 0] | codes[:, :, :, 1] << 4)


def _by_words(groups: Tensor) -> Tensor:
    """Codes [n, U, pair of groups, half, 32] → [n, U, word, half, t, e / 2, e mod 2]."""
    n, units = groups.shape[:2]
    return groups.reshape(n, units, 4, 2, 2, 16).transpose(3, 4).reshape(n, units, 8, 2, 4, 2, 2)


def _low(words: Tensor) -> Tensor:
    """Bytes [n, U, word, t, e / 2, e mod 2] → [n, U, 128]: four words of each thread, then the other four."""
    n, units = words.shape[:2]
    return words.reshape(n, units, 2, 4, 4, 2, 2).permute(0, 1, 2, 4, 3, 6, 5).reshape(n, units, 128)


def _fields(fields: Tensor, width: int) -> Tensor:
    """Join the fields [..., 8 / width] of bytes, the lowest first."""
    out = fields[..., 0].clone()
    for i in range(1, fields.shape[-1]):
        out |= fields[..., i] << width * i
    return out
