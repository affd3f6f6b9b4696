"""torchao's layouts in safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.models.formats.gguf import with_zero_points
from engine.models.formats.layouts import I8, STD, STD_OF_CODES, U8, Plain
from engine.models.formats.quantized import QuantizedFormat, Stored, Tensors, UnpackedRows
from engine.models.matrix import FLOAT_DTYPES, Matrix


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
        pairs, scale = tensors["_weight_qdata"], tensors["_weight_scale"].T.contiguous()
        codes, minimum = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1) ^ 8, -tensors["_weight_zero_point"].T
        if codes.is_cpu:
            return UnpackedRows(codes, scale, minimum=minimum.contiguous())
        grouped = codes.unflatten(1, (scale.shape[1], -1))
        grouped, scale, zero = with_zero_points(grouped, scale, minimum, 8)
        return UnpackedRows(grouped.flatten(1), scale, zero=zero)

    def random(self, shape: tuple[int, ...], stored: Stored, generator: torch.Generator) -> Tensor:
        if stored.name == "_weight_qdata":
            return torch.randint(0, 256, shape, generator=generator, device=generator.device)
        return torch.full(shape, STD / STD_OF_CODES["int4"] if stored.name == "_weight_scale" else 0)
