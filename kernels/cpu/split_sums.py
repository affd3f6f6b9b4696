"""Deterministic forms of sums over channels and experts on a CPU: in eighths, see `kernels.reference.split_sums`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import moe
from kernels.cpu.alone import pack_weight
from kernels.cpu.each_row import each_row
from kernels.cpu.elementwise import add_scaled, to_floats
from kernels.cpu.library import library
from kernels.cpu.matmul import multiply
from kernels.cpu.packed_weight import GROUPS, NativeWeight
from kernels.data.lora import AdapterTokens, ExpertLora
from kernels.data.moe import Experts
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.data.split_weight import SplitWeight, has_whole_groups, pieces_of, tree


class _Struct(ctypes.Structure):
    """`Pieces` in elementwise.cpp."""

    _fields_ = (
        ("pieces", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
    )


def split_weight(weight: Weight, columns: tuple[slice, ...], bias: Tensor | None = None) -> SplitWeight:
    """See `kernels.reference.split_weight`. Codes stay codes where a piece has whole groups of channels."""
    if isinstance(weight, QuantizedWeight) and not _multiplies(weight, columns):
        weight = reference.dequantize(weight.codes, weight, torch.float32)
    pieces = tuple(pack_weight(piece) for piece in pieces_of(weight, columns))
    return SplitWeight(pieces, columns, None if bias is None else bias.float().contiguous())


def _multiplies(weight: QuantizedWeight, columns: tuple[slice, ...]) -> bool:
    """Return True if GEMMs take pieces of the codes. The answer is that of every rank's part of the matrix."""
    width = columns[0].stop
    group, sizes = min(weight.group, width), GROUPS.get(weight.kind, ())
    return has_whole_groups(weight, columns) and any(width % size == 0 and group % size == 0 for size in sizes)


def split_linear(x: Tensor, weight: SplitWeight) -> Tensor:
    """See `kernels.reference.split_linear`."""
    x = to_floats(x)

    def product(i: int) -> Tensor:
        piece = weight.pieces[i]
        assert isinstance(piece, NativeWeight)
        out = x.new_empty(len(x), piece.num_rows)
        return multiply(x[:, weight.columns[i]], piece, None if i else weight.bias, out)

    return tree(len(weight.pieces), product, add_scaled)


def split_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: Experts,
    pieces: tuple[slice, ...],
    adapters: ExpertLora | None = None,
    tokens: AdapterTokens | None = None,
) -> Tensor:
    """See `kernels.reference.split_experts`."""
    if adapters is None or tokens is None:
        outputs = moe.routed_outputs(x, ids, stack)
    else:
        alone = [
            moe.adapted_outputs(own, its_ids, stack, adapters, tokens[i : i + 1])
            for i, (own, its_ids) in enumerate(each_row(x, ids))
        ]
        outputs = torch.cat(alone)
    weighted = outputs * weights.to(outputs.dtype)[:, :, None]

    def total(i: int) -> Tensor:
        here = (ids >= pieces[i].start) & (ids < pieces[i].stop)
        return weighted.masked_fill(~here[:, :, None], 0).cumsum(1)[:, -1].contiguous()

    return tree(len(pieces), total, add_scaled)


def add_pieces(pieces: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kernels.reference.add_pieces`."""
    native = library()
    if native is None or not pieces.is_contiguous() or dtype not in (torch.float32, torch.bfloat16):
        return reference.add_pieces(pieces, dtype)
    out = pieces.new_empty(pieces.shape[1:], dtype=dtype)
    struct = _Struct(pieces.data_ptr(), out.data_ptr(), len(pieces), out.numel(), dtype == torch.bfloat16)
    native.call("quire_add_pieces", struct, (pieces, out))
    return out
