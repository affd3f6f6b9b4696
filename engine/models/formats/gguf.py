"""The blocks of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.models.formats.layouts import STD, U8
from engine.models.formats.quantized import QuantizedFormat, Stored, Tensors, UnpackedRows
from engine.models.gguf.blocks import TYPES, mxfp4_codes
from engine.models.matrix import Matrix

DEVIATIONS = {"Q8_0": 73.9, "Q5_0": 9.2, "Q4_0": 4.6, "IQ4_NL": 70.0, "IQ4_XS": 1290.0}  # of random codes, scaled


class GGUFBlocks(QuantizedFormat):
    """`blocks` [N, K / 32, bytes] (or K / 256): integers and a scale of each 32 channels."""

    def stored(self) -> Iterator[Stored]:
        of = TYPES[self.scheme.block]
        yield Stored("blocks", torch.uint8, U8, 1, of.values, inner=of.num_bytes)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        blocks = tensors["blocks"]
        unpack = mxfp4_codes if self.scheme.kind == "e2m1" else TYPES[self.scheme.block].unpack
        assert unpack is not None
        codes, scale, _ = unpack(blocks.flatten(0, 1))
        if self.scheme.kind == "int4":
            codes = (codes + 8).to(torch.uint8)
        return UnpackedRows(codes.reshape(len(blocks), -1), scale.reshape(len(blocks), -1))

    def growth(self, matrix: Matrix) -> int:
        of, bits = TYPES[self.scheme.block], 8 if self.scheme.kind == "int8" else 4
        scales = of.values // self.scheme.group * (4 if self.scheme.block == "IQ4_XS" else 2)
        blocks = sum(tensor.numel() for tensor in matrix.stored.values()) // of.num_bytes
        return blocks * (of.values * bits // 8 + scales - of.num_bytes)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        blocks = torch.randint(0, 256, shape, generator=generator, device=generator.device, dtype=torch.uint8)
        if self.scheme.kind == "e2m1":
            blocks[..., 0] = 120  # the power of two 2^-7
        else:  # a block begins with its scale
            scale = torch.tensor([STD / DEVIATIONS[self.scheme.block]], dtype=torch.float16)
            blocks[..., :2] = scale.view(torch.uint8)
        return blocks
