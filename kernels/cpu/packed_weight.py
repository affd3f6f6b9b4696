"""Matrices as the CPU's own products read them: see `native/products.cpp` for the layout."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import layout, library
from kernels.data.quantized_weight import QuantizedWeight

KINDS: dict[torch.dtype | str, int] = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3}
INT8, INT4 = KINDS["int8"], KINDS["int4"]
# Channels of x that share a scale: as many as divide a weight's, or all channels.
GROUPS = {"int8": (128, 64, 32, 16), "int4": (128, 64, 32)}


class _Struct(ctypes.Structure):
    """`Weight` in products.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("short_scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("grouped", ctypes.c_int32),
    )


class NativeWeight(Tensor):
    """A matrix [N, K], or a stack of them, for the CPU's own products, which alone can read it: as a tensor, its
    blocks.
    """

    num_rows: int
    num_channels: int
    struct: _Struct
    kind: torch.dtype | str  # of KINDS
    others: tuple[Tensor | None, ...]  # that `struct` points to, beside the blocks
    stack: tuple[NativeWeight, ...] = ()  # its matrices, in the same memory


def pack_stack(weight: Tensor | QuantizedWeight) -> NativeWeight | None:
    """A stack of E matrices [N, K], each a whole number of tiles, packed as one; None: the products cannot take it."""
    codes = weight if isinstance(weight, Tensor) else weight.codes
    count, n = codes.shape[:2]
    padding = -n % layout().tile_rows
    if isinstance(weight, Tensor):
        packed = pack_floats(F.pad(weight, (0, 0, 0, padding)).flatten(0, 1))
    elif weight.rows > 1 and (n % weight.rows or padding):
        return None
    else:
        parts = {name: getattr(weight, name) for name in ("codes", "scale", "zero", "factor", "minimum")}
        rows: dict[str, Any] = {
            name: F.pad(part, (0, 0) * (part.dim() - 2) + (0, padding)).flatten(0, 1)
            for name, part in parts.items()
            if part is not None
        }
        packed = pack_codes(replace(weight, **rows))
    if packed is None:
        return None
    whole, shape = packed.struct, (n, packed.num_channels)
    pieces = [(None,) * count if part is None else part.chunk(count) for part in packed.others]
    for data, scale, short, zero in zip(packed.as_subclass(Tensor).chunk(count), *pieces, strict=True):
        one = _native(
            shape, whole.kind, data, whole.group, scale=scale, short_scale=short, zero=zero, grouped=whole.grouped
        )
        packed.stack = (*packed.stack, one)
    return packed


def pack_floats(weight: Tensor) -> NativeWeight | None:
    """weight [N, K] of float32 or bfloat16; None: of other dtypes there are no products."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    kind = KINDS[weight.dtype]
    return _native(weight.shape, kind, _kept(_tiles(weight, _step(kind))))


def pack_codes(weight: QuantizedWeight) -> NativeWeight | None:
    """Integers of eight or four bits in groups of channels that products can take; None: others.

    Products round x to eight bits, with a scale for each token and group of at most 128 channels.
    """
    n, k = len(weight), weight.num_channels
    if weight.kind not in GROUPS or weight.order is not None:
        return None
    group = next((size for size in GROUPS[weight.kind] if k % size == 0 and min(weight.group, k) % size == 0), None)
    if group is None:
        return None
    if weight.kind == "int8":
        stored = (weight.codes.short() + layout().byte_offset).to(torch.uint8)
        data = _kept(_tiles(stored, 4))
    else:
        unsigned = torch.cat([weight.codes & 15, weight.codes >> 4], 1)
        steps = _tiles(unsigned, 8).unflatten(-1, (2, 4))  # [tiles, steps, rows, 2, 4]
        data = _kept(steps[..., 0, :] | steps[..., 1, :] << 4)
    scale = weight.scale.float().repeat_interleave(weight.rows, 0)[:n]
    if weight.factor is not None:
        scale = scale * weight.factor[:, None]
    has_zero = weight.zero is not None or weight.minimum is not None
    grouped = weight.kind == "int4" or scale.shape[1] > 1 or has_zero
    if not grouped:
        return _native((n, k), KINDS[weight.kind], data, group, scale=_padded(scale)[:, 0].contiguous())
    each = -(-k // group)
    scale = scale.repeat_interleave(-(-each // scale.shape[1]), 1)[:, :each]
    zero = None
    if weight.zero is not None:
        zero = weight.zero.float().repeat_interleave(-(-each // weight.zero.shape[1]), 1)[:, :each] * scale
    if weight.minimum is not None:
        minimum = weight.minimum.float().repeat_interleave(-(-each // weight.minimum.shape[1]), 1)[:, :each]
        zero = minimum if zero is None else zero + minimum
    zero = None if zero is None else _kept(_tiles(zero, 1).squeeze(-1))
    is_short = weight.kind == "int4" and torch.equal(scale.bfloat16().float(), scale)
    scale = _kept(_tiles(scale.bfloat16() if is_short else scale, 1).squeeze(-1))
    which = {"short_scale" if is_short else "scale": scale}
    return _native((n, k), KINDS[weight.kind], data, group, zero=zero, grouped=1, **which)


def _step(kind: int) -> int:
    """Return how many channels of a row lie side by side."""
    return (1, layout().bf16_channels, 4, 8)[kind]


def _padded(matrix: Tensor) -> Tensor:
    return F.pad(matrix, (0, 0, 0, -len(matrix) % layout().tile_rows))


def _tiles(matrix: Tensor, step: int) -> Tensor:
    """[N, K] → [tiles, steps, rows of a tile, step], padded with zeros."""
    padded = F.pad(_padded(matrix), (0, -matrix.shape[1] % step))
    return padded.view(-1, layout().tile_rows, padded.shape[1] // step, step).transpose(1, 2)


def unpacked(weight: NativeWeight) -> Tensor:
    """Return a matrix [N, K] in plain order, as a copy: codes are dequantised to float32."""
    kind, data = weight.struct.kind, weight.as_subclass(Tensor)
    if kind == INT4:
        data = torch.stack([data & 15, data >> 4], -2).flatten(-2)
    if kind < INT8:
        return _in_order(data)[: weight.num_rows, : weight.num_channels]
    offset = layout().byte_offset if kind == INT8 else 8
    matrix = _in_order(data if offset else data.view(torch.int8)).float() - offset
    own, short, zero = weight.others
    scale = own if short is None else short.float()
    assert scale is not None
    if not weight.struct.grouped:
        matrix *= scale[:, None]
    else:
        scale = _in_order(scale[..., None])
        matrix = (matrix.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
    if zero is not None:
        zero = _in_order(zero[..., None])
        matrix = (matrix.unflatten(1, (zero.shape[1], -1)) - zero[..., None]).flatten(1)
    return matrix[: weight.num_rows, : weight.num_channels]


def _in_order(blocks: Tensor) -> Tensor:
    """[tiles, steps, rows of a tile, step] → [rows, channels]."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def _kept(tensor: Tensor) -> Tensor:
    """A contiguous copy that is fast to read."""
    native = library()
    assert native is not None
    return native.memory.keep(tensor)


def _native(
    shape: tuple[int, ...],
    kind: int,
    data: Tensor,
    group: int = 0,
    *,
    scale: Tensor | None = None,
    short_scale: Tensor | None = None,
    zero: Tensor | None = None,
    grouped: int = 0,
) -> NativeWeight:
    others = (scale, short_scale, zero)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (data, *others)]
    struct = _Struct(kind, shape[0], data.shape[1] * _step(kind), group, *pointers, grouped)
    weight = data.as_subclass(NativeWeight)
    weight.num_rows, weight.num_channels, weight.struct = shape[0], shape[1], struct
    weight.kind = list(KINDS)[kind]
    weight.others = others
    return weight
