"""torchao's layouts in safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.models.formats.gguf import with_zero_points
from engine.models.formats.layouts import I8, I32, STD, STD_OF_CODES, U8, Plain
from engine.models.formats.quantized import QuantizedFormat, Stored, Tensors, UnpackedRows
from engine.models.matrix import FLOAT_DTYPES, Matrix

PADDED = 1024  # channels of a matrix in tiles: a multiple of this


class TorchAO(Plain):
    """torchao's int8 and float8: `_weight_qdata` [N, K], `_weight_scale`, and zero points, which are 0."""

    def optional_tensors(self, matrix: Matrix) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        yield from super().optional_tensors(matrix)
        for name in dict.fromkeys(part.name for part in matrix.parts):
            yield f"{name}._weight_zero_point", _check_zero


def _check_zero(value: Tensor) -> None:
    if value.any():
        raise ValueError("must be 0: zero points of torchao's int8 weights are not supported")


class TorchAOInt4(QuantizedFormat):
    """torchao's plain int4: `_weight_qdata` [N, K / 2] int8, even channels in the low bits, signed; `_weight_scale` and
    `_weight_zero_point` [G, N], whose sum with code · scale is the weight.
    """

    def stored(self) -> Iterator[Stored]:
        group = self.scheme.group
        yield Stored("_weight_qdata", torch.uint8, I8 | U8, 1, 2)
        yield Stored("_weight_scale", torch.float32, FLOAT_DTYPES, 1, group, transposed=True)
        yield Stored("_weight_zero_point", torch.float32, FLOAT_DTYPES, 1, group, transposed=True)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        pairs, zero = tensors["_weight_qdata"], tensors["_weight_zero_point"]
        codes = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1) ^ 8
        return _with_sums(codes, tensors["_weight_scale"].T.contiguous(), zero.T)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        if stored.name == "_weight_qdata":
            return torch.randint(0, 256, shape, generator=generator, device=generator.device)
        return torch.full(shape, STD / STD_OF_CODES["int4"] if stored.name == "_weight_scale" else 0)


class TorchAOTiles(QuantizedFormat):
    """torchao's int4 in tiles of tensor cores: `_weight_qdata` [N / 8, K / 128, 32, 4] int32 and
    `_weight_scale_and_zero` [G, N, 2], with K padded to a multiple of `PADDED`. A weight is (code - 8) · scale + zero.
    """

    columns = 0  # of the matrix, without those that pad it

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        self.columns = len(matrix.columns)
        super().create(matrix, dtype, device)

    def stored(self) -> Iterator[Stored]:
        groups = PADDED // self.scheme.group
        yield Stored("_weight_qdata", torch.int32, I32, 8, PADDED, inner=(32, 4), column_words=PADDED // 128)
        name = "_weight_scale_and_zero"
        yield Stored(name, torch.float32, FLOAT_DTYPES, 1, PADDED, True, inner=(2,), column_words=groups)

    def unpack(self, tensors: Tensors) -> UnpackedRows:
        codes = codes_of_tiles(tensors["_weight_qdata"])[:, : self.columns]
        scale, zero = tensors["_weight_scale_and_zero"][: self.columns // self.scheme.group].unbind(2)
        return _with_sums(codes.contiguous(), scale.T.contiguous(), zero.T)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        if stored.name == "_weight_qdata":
            return torch.randint(-(2**31), 2**31, shape, generator=generator, device=generator.device)
        return torch.tensor([STD / STD_OF_CODES["int4"], 0.0]).expand(shape)


def codes_of_tiles(words: Tensor) -> Tensor:
    """Unpack words [N / 8, K / 128, 32, 4] of PyTorch's `_convert_weight_to_int4pack` on GPUs: codes [N, K] uint8.

    Of 32 lanes, lane 4 n + c holds row n of a tile and, of each 8 channels, the channels 2 c and 2 c + 1. A word has
    two pairs of each of two blocks of 16 channels: first the even channels, then the odd ones.
    """
    tiles, blocks = words.shape[:2]
    codes = torch.stack([words >> 4 * i & 15 for i in range(8)], -1).to(torch.uint8)
    split = codes.view(tiles, blocks, 8, 4, 4, 2, 2, 2)  # lane's row and channels, word, odd, block of 16, half
    return split.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(8 * tiles, 128 * blocks)


def _with_sums(codes: Tensor, scale: Tensor, zero: Tensor) -> UnpackedRows:
    """Return rows whose weights are (code - 8) · scale + zero: scale, zero [N, G]."""
    if codes.is_cpu:
        return UnpackedRows(codes, scale, minimum=-zero)
    grouped, scale, zeros = with_zero_points(codes.unflatten(1, (scale.shape[1], -1)), scale, -zero, 8)
    return UnpackedRows(grouped.flatten(1), scale, zero=zeros)
