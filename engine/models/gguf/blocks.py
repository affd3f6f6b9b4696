"""Types of GGUF tensors: blocks of quantised values, and their conversion to floats.

All quantised types have one form: a block is G groups of integers, and x = code · scale − minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.gguf.types import SIZES

# Values: each needs some twelve bytes meanwhile, which a CPU's caches then hold.
DECODED_AT_ONCE, DECODED_ON_GPU = 1 << 19, 1 << 22
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


class Groups(NamedTuple):
    """The contents of n blocks."""

    codes: Tensor  # [n, G, values of a group] integers
    scale: Tensor  # [n, G] float32
    minimum: Tensor | None = None  # [n, G] float32; None: 0


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors."""

    values: int  # of a block
    num_bytes: int  # of a block
    unpack: Callable[[Tensor], Groups] | None = None  # [n, num_bytes] uint8 → groups; None: `dtype`
    dtype: torch.dtype = torch.float32  # of plain values

    def decode(self, blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Convert blocks [rows, bytes] uint8 to [rows, columns], rounded to `dtype`; plain values keep theirs."""
        if self.unpack is None:
            return blocks.contiguous().view(self.dtype)
        rows = len(blocks)
        columns = blocks.shape[1] // self.num_bytes * self.values
        out = torch.empty(rows, columns, dtype=dtype, device=blocks.device)
        step = max((DECODED_AT_ONCE if blocks.is_cpu else DECODED_ON_GPU) // max(columns, 1), 1)
        for part, into in zip(blocks.split(step), out.split(step), strict=True):
            codes, scale, minimum = self.unpack(part.reshape(-1, self.num_bytes))
            values = codes * scale.unsqueeze(2)
            if minimum is not None:
                values -= minimum.unsqueeze(2)
            into.copy_(values.view(into.shape))
        return out


def _f16(data: Tensor) -> Tensor:
    """Convert bytes [n, 2] to [n, 1] float32."""
    return data.contiguous().view(torch.float16).float()


def _bits(data: Tensor, width: int, run: int) -> Tensor:
    """Split bytes [n, m · run] into fields of `width` bits, lowest first: [n, m · 8 / width, run] uint8.

    The values of one run of bytes are together, those of its lowest bits first.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device).view(1, 1, -1, 1)
    return (data.reshape(len(data), -1, 1, run) >> shifts & (1 << width) - 1).flatten(1, 2)


def _nibbles(data: Tensor) -> Tensor:
    """Split bytes [n, 16] into [n, 1, 32]: the low halves, then the high ones."""
    return _bits(data, 4, 16).view(len(data), 1, 32)


def _table(values: tuple[int, ...], index: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int8, device=index.device)[index.int()]


def _q8_0(data: Tensor) -> Groups:
    return Groups(data[:, 2:].view(torch.int8).unsqueeze(1), _f16(data[:, :2]))


def _q4_0(data: Tensor) -> Groups:
    return Groups(_nibbles(data[:, 2:]).to(torch.int8) - 8, _f16(data[:, :2]))


def _q4_1(data: Tensor) -> Groups:
    return Groups(_nibbles(data[:, 4:]), _f16(data[:, :2]), -_f16(data[:, 2:4]))


def _fifth_bits(data: Tensor, low: Tensor) -> Tensor:
    """Add bit j of [n, 4] bytes as the fifth bit of value j [n, 1, 32]."""
    return low | _bits(data, 1, 1).view(-1, 1, 32) << 4


def _q5_0(data: Tensor) -> Groups:
    return Groups(_fifth_bits(data[:, 2:6], _nibbles(data[:, 6:])).to(torch.int8) - 16, _f16(data[:, :2]))


def _q5_1(data: Tensor) -> Groups:
    return Groups(_fifth_bits(data[:, 4:8], _nibbles(data[:, 8:])), _f16(data[:, :2]), -_f16(data[:, 2:4]))


def _q2_k(data: Tensor) -> Groups:
    codes = _bits(data[:, 16:80], 2, 32).view(-1, 16, 16)
    scales = data[:, :16]
    return Groups(codes, _f16(data[:, 80:82]) * (scales & 15), _f16(data[:, 82:84]) * (scales >> 4))


def _q3_k(data: Tensor) -> Groups:
    low, high = _bits(data[:, 96:104], 4, 8).flatten(1), _bits(data[:, 104:108], 2, 4).flatten(1)
    scales = (low | high << 4).to(torch.int8) - 32
    above = _bits(data[:, :32], 1, 32).to(torch.int8) * 4 - 4  # a bit of 1 adds nothing
    codes = _bits(data[:, 32:96], 2, 32).to(torch.int8) + above
    return Groups(codes.view(-1, 16, 16), _f16(data[:, 108:110]) * scales)


def _six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and the eight minima [n, 8] uint8 of twelve bytes."""
    scale, minimum, both = data.unflatten(1, (3, 4)).unbind(1)
    return (
        torch.cat([scale & 63, both & 15 | scale >> 2 & 48], 1),
        torch.cat([minimum & 63, both >> 4 | minimum >> 2 & 48], 1),
    )


def _q4_k(data: Tensor) -> Groups:
    scale, minimum = _six_bits(data[:, 4:16])
    return Groups(_bits(data[:, 16:], 4, 32), _f16(data[:, :2]) * scale, _f16(data[:, 2:4]) * minimum)


def _q5_k(data: Tensor) -> Groups:
    scale, minimum = _six_bits(data[:, 4:16])
    codes = _bits(data[:, 48:], 4, 32) | _bits(data[:, 16:48], 1, 32) << 4
    return Groups(codes, _f16(data[:, :2]) * scale, _f16(data[:, 2:4]) * minimum)


def _q6_k(data: Tensor) -> Groups:
    low = _bits(data[:, :128], 4, 64).view(-1, 8, 32)
    codes = (low | _bits(data[:, 128:192], 2, 32) << 4).to(torch.int8) - 32
    scale = data[:, 192:208].view(torch.int8)
    return Groups(codes.view(-1, 16, 16), _f16(data[:, 208:]) * scale)


def _iq4_nl(data: Tensor) -> Groups:
    return Groups(_table(IQ4, _nibbles(data[:, 2:])), _f16(data[:, :2]))


def _iq4_xs(data: Tensor) -> Groups:
    low, high = _bits(data[:, 4:8], 4, 1).flatten(1), _bits(data[:, 2:4], 2, 1).flatten(1)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _table(IQ4, _bits(data[:, 8:], 4, 16).view(-1, 8, 32))
    return Groups(codes, _f16(data[:, :2]) * scales)


def _mxfp4(data: Tensor) -> Groups:
    scale = torch.exp2(data[:, :1].double() - 128).float()  # half of the power, since codes are doubled
    return Groups(_table(E2M1, _nibbles(data[:, 1:])), scale)


def mxfp4_codes(data: Tensor) -> Groups:
    """Unpack MXFP4 with codes as they are stored, 0 to 15, and the scales of their values."""
    return Groups(_nibbles(data[:, 1:]), torch.exp2(data[:, :1].double() - 127).float())


_UNPACK: Mapping[str, Callable[[Tensor], Groups]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES: Mapping[str, BlockType] = {
    name: BlockType(*size, _UNPACK.get(name), _PLAIN.get(name, torch.float32)) for name, size in SIZES.items()
}
