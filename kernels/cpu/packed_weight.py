"""Matrices as the CPU's own GEMMs read them: see `native/products.cpp` for the layout."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import layout, library
from kernels.cpu.scale_steps import SPAN, Steps, in_steps
from kernels.data.quantized_weight import QuantizedWeight

KINDS: dict[torch.dtype | str, int] = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3, "int6": 4}
INT8, INT4, INT6 = KINDS["int8"], KINDS["int4"], KINDS["int6"]
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
        ("scale_steps", ctypes.c_void_p),
        ("zero_steps", ctypes.c_void_p),
        ("grouped", ctypes.c_int32),
        ("span", ctypes.c_int32),
        ("offset", ctypes.c_int32),
    )


class Scales(NamedTuple):
    """Tensors of `Weight` in products.cpp: each is None where a weight has another in its place, or none."""

    scale: Tensor | None = None
    short: Tensor | None = None
    zero: Tensor | None = None
    scale_steps: Tensor | None = None
    zero_steps: Tensor | None = None


NO_SCALES = Scales()


class NativeWeight(Tensor):
    """A matrix [N, K], or a stack of them, for the CPU's own GEMMs, which alone can read it: as a tensor, its
    blocks.
    """

    num_rows: int
    num_channels: int
    struct: _Struct
    kind: torch.dtype | str  # of KINDS
    others: Scales  # that `struct` points to, beside the blocks
    stack: tuple[NativeWeight, ...] = ()  # its matrices, in the same memory


def pack_stack(weight: Tensor | QuantizedWeight) -> NativeWeight | None:
    """A stack of E matrices [N, K], each a whole number of tiles, packed as one; None: the GEMMs cannot take it."""
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
    for data, *scales in zip(packed.as_subclass(Tensor).chunk(count), *pieces, strict=True):
        one = _native(shape, whole.kind, data, whole.group, Scales(*scales), whole.offset, grouped=whole.grouped)
        packed.stack = (*packed.stack, one)
    return packed


def pack_floats(weight: Tensor) -> NativeWeight | None:
    """weight [N, K] of float32 or bfloat16; None: of other dtypes there are no GEMMs."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    kind = KINDS[weight.dtype]
    return _native(weight.shape, kind, _kept(_tiles(weight, _step(kind))))


def pack_codes(weight: QuantizedWeight) -> NativeWeight | None:
    """Integers of eight or four bits in groups of channels that GEMMs can take; None: others.

    Products round x to eight bits, with a scale for each token and group of at most 128 channels.
    """
    n, k = len(weight), weight.num_channels
    if weight.kind not in GROUPS or weight.order is not None:
        return None
    group = next((size for size in GROUPS[weight.kind] if k % size == 0 and min(weight.group, k) % size == 0), None)
    if group is None:
        return None
    scale = weight.scale.float().repeat_interleave(weight.rows, 0)[:n]
    if weight.factor is not None:
        scale = scale * weight.factor[:, None]
    if weight.kind == "int8" and scale.shape[1] == 1 and weight.zero is None and weight.minimum is None:
        return _native((n, k), INT8, _bytes(weight.codes), group, Scales(_padded(scale)[:, 0].contiguous()), grouped=0)
    scale = _by_group(scale, k, group)
    steps = in_steps(scale, group) if group < 128 else None
    if steps is not None and (found := _in_steps(weight, steps, group)) is not None:
        return found
    zero = None
    if weight.zero is not None:
        zero = _by_group(weight.zero.float(), k, group) * scale
    if weight.minimum is not None:
        minimum = _by_group(weight.minimum.float(), k, group)
        zero = minimum if zero is None else zero + minimum
    zero = None if zero is None else _kept_groups(zero)
    kind, data = KINDS[weight.kind], _bytes(weight.codes) if weight.kind == "int8" else _nibbles(_fours(weight))
    if weight.kind == "int4" and torch.equal(scale.bfloat16().float(), scale):
        return _native((n, k), kind, data, group, Scales(short=_kept_groups(scale.bfloat16()), zero=zero))
    return _native((n, k), kind, data, group, Scales(_kept_groups(scale), zero=zero))


def _in_steps(weight: QuantizedWeight, scale: Steps, group: int) -> NativeWeight | None:
    """Pack codes whose scales are whole multiples of few; None: the zero points are not, too."""
    shape, zero, none = (len(weight), weight.num_channels), None, 0
    if weight.minimum is not None:
        zero = in_steps(_by_group(weight.minimum, shape[1], group), group)
    if weight.zero is not None:
        none = int(weight.zero.view(-1)[0])  # the code, less its offset, that is zero
        if weight.minimum is None or not bool((weight.zero == none).all()):
            return None
    if (zero is None) != (weight.minimum is None):
        return None
    scales = Scales(
        _kept_groups(scale.factor), None, None if zero is None else _kept_groups(zero.factor),
        _kept_groups(scale.codes), None if zero is None else _kept_groups(zero.codes),
    )  # fmt: skip
    if weight.kind == "int4":
        return _native(shape, INT4, _nibbles(_fours(weight)), group, scales, 8 + none)
    if none == 0 and bool(((weight.codes >= -32) & (weight.codes < 32)).all()):
        return _native(shape, INT6, _sixes(weight.codes), group, scales)
    return None if none else _native(shape, INT8, _bytes(weight.codes), group, scales)


def _by_group(each: Tensor, channels: int, group: int) -> Tensor:
    """Values [N, G] of equally many channels -> [N, channels / group], repeated."""
    count = -(-channels // group)
    return each.repeat_interleave(-(-count // each.shape[1]), 1)[:, :count]


def _bytes(codes: Tensor) -> Tensor:
    """Pack codes [N, K] of int8, each with the offset of bytes added, which may wrap."""
    kept = _kept(_tiles(codes.view(torch.uint8), 4))
    return kept.add_(layout().byte_offset) if layout().byte_offset else kept


def _fours(weight: QuantizedWeight) -> Tensor:
    return torch.cat([weight.codes & 15, weight.codes >> 4], 1)


def _nibbles(codes: Tensor) -> Tensor:
    """Pack codes [N, K] from 0 to 15."""
    steps = _tiles(codes, 8).unflatten(-1, (2, 4))  # [tiles, steps, rows, 2, 4]
    return _kept(steps[..., 0, :] | steps[..., 1, :] << 4)


def _sixes(codes: Tensor) -> Tensor:
    """Pack codes [N, K] from -32 to 31, K a multiple of 16."""
    steps = _tiles((codes + 32).to(torch.uint8), 16).unflatten(-1, (4, 4))
    low, high = steps & 15, steps >> 4
    lines = (low[..., 0, :] | low[..., 1, :] << 4, low[..., 2, :] | low[..., 3, :] << 4)
    upper = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    return _kept(torch.stack([*lines, upper], 2).flatten(1, 2))


def _step(kind: int) -> int:
    """Return how many channels of a row lie side by side."""
    return (1, layout().bf16_channels, 4, 8, 16)[kind]


def _padded(matrix: Tensor, step: int = 1) -> Tensor:
    """Add zeros up to whole tiles of rows and steps of channels; the matrix itself, not a copy, if none are missing."""
    missing = (0, -matrix.shape[1] % step, 0, -len(matrix) % layout().tile_rows)
    return F.pad(matrix, missing) if any(missing) else matrix.contiguous()


def _tiles(matrix: Tensor, step: int) -> Tensor:
    """[N, K] → [tiles, steps, rows of a tile, step], padded with zeros."""
    padded = _padded(matrix, step)
    return padded.view(-1, layout().tile_rows, padded.shape[1] // step, step).transpose(1, 2)


def unpacked(weight: NativeWeight) -> Tensor:
    """Return a matrix [N, K] in plain order, as a copy: codes are dequantised to float32."""
    kind, data = weight.struct.kind, weight.as_subclass(Tensor)
    if kind == INT4:
        data = torch.stack([data & 15, data >> 4], -2).flatten(-2)
    elif kind == INT6:
        first, last, upper = data.unflatten(1, (-1, 3)).unbind(2)
        low = torch.stack([first & 15, first >> 4, last & 15, last >> 4], -2)
        data = (low | torch.stack([upper << 4 & 48, upper << 2 & 48, upper & 48, upper >> 2 & 48], -2)).flatten(-2)
    if kind < INT8:
        return _in_order(data)[: weight.num_rows, : weight.num_channels]
    offset, others = weight.struct.offset, weight.others
    matrix = _in_order(data if offset or kind != INT8 else data.view(torch.int8)).float() - offset
    if not weight.struct.grouped:
        assert others.scale is not None
        return (matrix * others.scale[:, None])[: weight.num_rows, : weight.num_channels]
    scale = _values(others.scale if others.short is None else others.short.float(), others.scale_steps)
    matrix = matrix.unflatten(1, (scale.shape[1], -1)) * scale[..., None]
    if others.zero is not None:
        matrix -= _values(others.zero, others.zero_steps)[..., None]
    return matrix.flatten(1)[: weight.num_rows, : weight.num_channels]


def _values(of_groups: Tensor | None, steps: Tensor | None) -> Tensor:
    """Return scales or zero points, [rows, groups], as they are or in steps of their span's."""
    assert of_groups is not None
    values = _in_order(of_groups[..., None])
    if steps is None:
        return values
    codes = _in_order(steps[..., None])
    return codes * values.repeat_interleave(codes.shape[1] // values.shape[1], 1)


def _in_order(blocks: Tensor) -> Tensor:
    """[tiles, steps, rows of a tile, step] → [rows, channels]."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def _kept(tensor: Tensor) -> Tensor:
    """A contiguous copy that is fast to read."""
    native = library()
    assert native is not None
    return native.memory.keep(tensor)


def _kept_groups(each: Tensor) -> Tensor:
    """[N, groups] → [tiles, groups, rows of a tile]."""
    return _kept(_tiles(each, 1).squeeze(-1))


def _native(
    shape: tuple[int, ...],
    kind: int,
    data: Tensor,
    group: int = 0,
    scales: Scales = NO_SCALES,
    offset: int | None = None,
    *,
    grouped: int = 1,
) -> NativeWeight:
    """offset: of codes; None: the usual one."""
    if offset is None:
        offset = (0, 0, layout().byte_offset, 8, 32)[kind]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (data, *scales)]
    channels = (data.shape[1] // 3 if kind == INT6 else data.shape[1]) * _step(kind)
    span = (SPAN // group).bit_length() - 1 if scales.scale_steps is not None else 0
    struct = _Struct(kind, shape[0], channels, group, *pointers, grouped, span, offset)
    weight = data.as_subclass(NativeWeight)
    weight.num_rows, weight.num_channels, weight.struct = shape[0], shape[1], struct
    weight.kind = list(KINDS)[kind]
    weight.others = scales
    return weight
