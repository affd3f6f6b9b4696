"""The blocks of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import kernels
from engine.models.formats.layouts import STD, U8
from engine.models.formats.quantized import QuantizedFormat, Stored, Tensors, UnpackedRows
from engine.models.gguf.blocks import TYPES, mxfp4_codes
from engine.models.matrix import Matrix
from engine.models.quantization import Scheme

DEVIATIONS = {  # of random codes, scaled; where there are minima, these are such that the mean is about 0
    "Q8_0": 73.9, "Q5_0": 9.2, "Q4_0": 4.6, "IQ4_NL": 70.0, "IQ4_XS": 1290.0, "Q4_1": 4.6, "Q5_1": 9.2, "Q4_K": 260.0,
    "Q5_K": 530.0, "Q6_K": 1365.0, "Q2_K": 13.9, "Q3_K": 43.4,
}  # fmt: skip
MINIMA = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # scale of random minima
SCALES_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}  # the bytes of a block's scale, and of that of its minima; else 0
SIX_BITS = "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"  # types whose codes fit into six bits and whose scales are products
PRODUCTS = "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"  # types whose scales are products, too long for 16 bits


def rounded(scale: Tensor) -> Tensor:
    """Round scales to float16 if each keeps ten bits: GPUs round weights to bfloat16, which has seven."""
    short = scale.half()
    return short if bool(((short.float() - scale).abs() <= scale.abs() * 2**-11).all()) else scale


def with_zero_points(codes: Tensor, scale: Tensor, minimum: Tensor, none: int) -> tuple[Tensor, Tensor, Tensor]:
    """Turn minima into zero points, fractions of codes: code · scale − minimum = (code − zero) · scale.

    codes: [n, G, values of a group]; scale, minimum: [n, G]; `none`: the code whose value is 0. Returns codes and
    scales, in which a group without a scale has its minimum as the scale, and zero points [n, G] float16.
    """
    flat = scale == 0
    codes = codes.masked_fill(flat.unsqueeze(2), none)
    scale = torch.where(flat, minimum.to(scale.dtype), scale)
    zero = torch.where(flat, 1.0, minimum / scale.float())
    return codes, scale, torch.where(scale == 0, 0.0, zero).half()


class GGUFBlocks(QuantizedFormat):
    """`blocks` [N, K / 32, bytes] (or K / 256): integers and a scale of each 32 channels."""

    def stored(self) -> Iterator[Stored]:
        of = TYPES[self.scheme.block]
        yield Stored("blocks", torch.uint8, U8, 1, of.values, inner=(of.num_bytes,))

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        blocks = tensors["blocks"]
        unpack = mxfp4_codes if self.scheme.kind == "e2m1" else TYPES[self.scheme.block].unpack
        assert unpack is not None
        codes, scale, minimum = unpack(blocks.flatten(0, 1))
        n = len(blocks)
        on_gpu = not blocks.is_cpu
        scale = rounded(scale) if on_gpu else scale
        if minimum is None:
            codes = (codes + 8).to(torch.uint8) if self.scheme.kind == "int4" else codes
            return UnpackedRows(codes.reshape(n, -1), scale.reshape(n, -1))
        offset = 8 if self.scheme.kind == "int4" else 0  # a code's value is the code less 8
        codes = codes.to(torch.int8 if self.scheme.kind == "int8" else torch.uint8)
        if not on_gpu:
            codes, scale, minimum = codes.reshape(n, -1), scale.reshape(n, -1), minimum.reshape(n, -1)
            zero = torch.full_like(scale, -offset, dtype=torch.int8) if offset else None  # so minima are not rounded
            return UnpackedRows(codes, scale, zero=zero, minimum=minimum)
        codes, scale, zero = with_zero_points(codes, scale, minimum - offset * scale, offset)
        return UnpackedRows(codes.reshape(n, -1), scale.reshape(n, -1), zero=zero.reshape(n, -1))

    def of_part(self, name: str) -> GGUFBlocks:
        return self

    def pack(self, matrix: Matrix) -> None:
        """Pack the blocks as they are where the device's kernels read them, else integers."""
        own = [i for i, part in enumerate(matrix.parts) if len(part.rows)]
        if not matrix.num_stacked:
            first, *others = (matrix.stored[i, "blocks"] for i in own)
            kinds = [self.of_part(matrix.parts[i].name).scheme.block for i in own]
            weight = kernels.pack_blocks(first, others, kinds, matrix.dtype)
            if weight is not None:
                matrix.stored.clear()
                matrix.weight = weight
                return
        super().pack(matrix)

    def growth(self, matrix: Matrix, capability: tuple[int, int] | None) -> int:
        if not matrix.num_stacked and kernels.reads_blocks(capability, matrix.dtype):
            own = [i for i, part in enumerate(matrix.parts) if len(part.rows)]
            kinds = [self.of_part(matrix.parts[i].name).scheme.block for i in own]
            if kernels.have_order(kinds, len(matrix.columns)):
                return 0
        parts = [(self.of_part(matrix.parts[i].name), blocks) for (i, _), blocks in matrix.stored.items()]
        if capability is None and {part.scheme.block for part, _ in parts} <= {*SIX_BITS} and kernels.has_cpu_kernels():
            return sum(self.grown_on_cpu(part.scheme.block, blocks) for part, blocks in parts)
        return sum(part.grown(blocks) for part, blocks in parts)

    def grown_on_cpu(self, block: str, blocks: Tensor) -> int:
        """Return how many bytes more blocks of a type of `SIX_BITS` take where C++ multiplies them: it keeps scales and
        minima of groups as bytes, with a factor for each block.
        """
        of, bits = TYPES[block], 4 if self.scheme.kind == "int4" else 6
        scales = (of.values // self.scheme.group + 4) * (1 + self.scheme.minima)
        return blocks.numel() // of.num_bytes * (of.values * bits // 8 + scales - of.num_bytes)

    def grown(self, blocks: Tensor) -> int:
        """Return how many bytes more the unpacked form of `blocks` takes, at most."""
        of, bits = TYPES[self.scheme.block], 8 if self.scheme.kind == "int8" else 4
        scale = 4 if self.scheme.block in PRODUCTS else 2  # on GPUs half of it, and of the minima: see `unpack`
        scales = of.values // self.scheme.group * (scale + (5 if bits == 4 else 4) * self.scheme.minima)
        return blocks.numel() // of.num_bytes * (of.values * bits // 8 + scales - of.num_bytes)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        blocks = torch.randint(0, 256, shape, generator=generator, device=generator.device, dtype=torch.uint8)
        if self.scheme.kind == "e2m1":
            blocks[..., 0] = 120  # the power of two 2^-7
        else:
            block = self.scheme.block
            scale, at = STD / DEVIATIONS[block], SCALES_AT.get(block, 0)
            values = torch.tensor([scale, scale * MINIMA.get(block, 0)], dtype=torch.float16).view(torch.uint8)
            size = 4 if block in MINIMA else 2
            blocks[..., at : at + size] = values[:size]
        return blocks


class MixedBlocks(GGUFBlocks):
    """A matrix whose parts are blocks of several types: integers of eight bits, in the smallest of their groups."""

    def __init__(self, schemes: Mapping[str, Scheme]) -> None:
        """schemes: of the parts, by name."""
        group, minima = min(scheme.group for scheme in schemes.values()), any(each.minima for each in schemes.values())
        super().__init__(Scheme(layout="gguf", kind="int8", group=group, minima=minima))
        self.parts = {name: WidenedBlocks(scheme, self.scheme) for name, scheme in schemes.items()}

    def of_part(self, name: str) -> GGUFBlocks:
        return self.parts[name]


class WidenedBlocks(GGUFBlocks):
    """Blocks of one type in a matrix of several."""

    def __init__(self, scheme: Scheme, whole: Scheme) -> None:
        super().__init__(scheme)
        self.whole = whole

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        rows = super().unpack(tensors)
        codes = (rows.codes.to(torch.int8) - 8) if self.scheme.kind == "int4" else rows.codes
        if codes.is_cpu and rows.zero is not None:  # that of all codes
            codes, rows = codes + 8, rows._replace(zero=None)
        copies = self.scheme.group // self.whole.group
        scale, zero, minimum = (
            None if each is None else each.repeat_interleave(copies, 1)
            for each in (rows.scale, rows.zero, rows.minimum)
        )
        assert scale is not None
        if self.whole.minima and codes.is_cpu and minimum is None:
            minimum = torch.zeros_like(scale, dtype=torch.float32)
        if self.whole.minima and not codes.is_cpu and zero is None:
            zero = torch.zeros_like(scale, dtype=torch.float16)
        return UnpackedRows(codes, scale, zero=zero, minimum=minimum)

    def grown(self, blocks: Tensor) -> int:
        of = TYPES[self.scheme.block]
        groups = of.values // self.whole.group
        return blocks.numel() // of.num_bytes * (of.values + groups * (4 + 4 * self.whole.minima) - of.num_bytes)
