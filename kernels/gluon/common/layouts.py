"""Layouts of accumulators and operands, tensor descriptors and a partition's barrier."""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # until Triton 3.6


@gluon.constexpr_function
def side_by_side(width, channels):
    """Sums [64, width] with `channels` of a row, 4 or 8, side by side in each thread, so that it stores them at once.

    As in the tensor core's layout, which has two side by side, four threads have the channels of a row: they trade
    them.
    """
    own = channels.bit_length() - 1
    bases = [[0, 1 << bit] for bit in range(width.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [*bases[:own], [8, 0], *bases[own + 2 :]],
        [*bases[own : own + 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, width],
    )


@functools.cache
def _box_layout(row_bytes: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=row_bytes, element_bitwidth=bits, rank=rank)


def box_descriptor(tensor: Tensor, *box: int) -> TensorDescriptor:
    """A descriptor with which TMA copies boxes of this shape to shared memory, swizzled as the tensor
    core reads them. A row of a box has 32, 64 or 128 bytes.
    """
    size = tensor.element_size()
    layout = _box_layout(box[-1] * size, 8 * size, len(box))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box), layout)


@gluon.jit
def warps(LAYOUT: gl.constexpr, NUM: gl.constexpr):
    """Indices [NUM, 1, 1] of the first dimension, in the layout of a tensor of three."""
    return gl.arange(0, NUM, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]


@gluon.jit
def middle(LAYOUT: gl.constexpr, NUM: gl.constexpr):
    """Indices [1, NUM, 1] of the second dimension."""
    return gl.arange(0, NUM, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]


@gluon.jit
def last(LAYOUT: gl.constexpr, NUM: gl.constexpr):
    """Indices [1, 1, NUM] of the last dimension."""
    return gl.arange(0, NUM, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
