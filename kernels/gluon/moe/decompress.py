"""Stacks of compressed matrices back to bfloat16, in Gluon; see `kernels.data.compressed_weight`."""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.data.compressed_weight import CompressedWeight
from kernels.gluon.common.compressed_bits import (
    DOWN,
    decode_fragments,
    listed_channel,
    listed_row,
    listed_value,
    piece_layout,
)
from kernels.gluon.common.layouts import barrier
from kernels.gpu.launch import cdiv

STEPS = 4  # of 64 channels, of a program


@gluon.jit
def _stored_row(row, N: gl.constexpr, GATED: gl.constexpr):
    """Index in the matrix of a row in the order of blocks."""
    if GATED:
        return row // 16 * 8 + row % 8 + row // 8 % 2 * (N // 2)
    else:
        return row


@gluon.jit
def _decompress_kernel(
    codes, scale, small, out,
    N: gl.constexpr, K: gl.constexpr, ROOM: gl.constexpr, GATED: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """STEPS times 64 channels of a block's 64 rows, and those of its small weights that are among them."""
    WORDS: gl.constexpr = piece_layout()
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    block = gl.program_id(0)
    first = gl.program_id(1) * STEPS
    expert = block // (N // 64)
    at = (
        gl.arange(0, 16, layout=gl.SliceLayout(1, WORDS))[:, None] * 32
        + gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))[None, :]
    )
    words = codes + (block // 2).to(gl.int64) * (K // 64 * 3072) + block % 2 * 1536 + at
    rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    scales = gl.load(scale + rows)[:, None]
    out += expert.to(gl.int64) * (N * K)
    to = (
        out
        + (_stored_row(rows - expert * N, N, GATED) * K)[:, None]
        + gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))[None, :]
    )
    loaded = ()
    for i in gl.static_range(STEPS):
        step = gl.minimum(first + i, K // 64 - 1)
        for piece in gl.static_range(3):
            loaded = loaded + (gl.load(words + step * 3072 + piece * 512),)
    for i in gl.static_range(STEPS):
        values = decode_fragments(loaded[3 * i], loaded[3 * i + 1], loaded[3 * i + 2], 4).reshape([64, 64])
        values = gl.convert_layout(values, OUT)
        step = gl.minimum(first + i, K // 64 - 1)
        gl.store(to + step * 64, (values.to(gl.float32) * scales).to(gl.bfloat16))
    barrier()  # the zeros that stand for small weights are written
    listed = gl.load(small + block * ROOM + gl.arange(0, ROOM, layout=LIST))
    channel = listed_channel(listed)
    row = block * 64 + listed_row(listed)
    value = listed_value(listed).to(gl.float32) * gl.load(scale + row) * DOWN * DOWN
    own = (channel >= first * 64) & (channel < first * 64 + STEPS * 64) & (value != 0.0)
    gl.store(out + _stored_row(row - expert * N, N, GATED) * K + channel, value.to(gl.bfloat16), mask=own)


def decompress(weight: CompressedWeight) -> Tensor:
    """[E, N, K] bfloat16, as it was."""
    count, n, k = weight.shape
    out = torch.empty(count, n, k, dtype=torch.bfloat16, device=weight.device)
    _decompress_kernel[(count * n // 64, cdiv(k // 64, STEPS))](
        weight.codes, weight.scale, weight.small, out, N=n, K=k, ROOM=weight.small.shape[2], GATED=weight.gated,
        STEPS=STEPS, num_warps=4,
    )  # fmt: skip
    return out
