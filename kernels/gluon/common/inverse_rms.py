"""The factor of a norm whose x stays in registers, for GEMMs of few tokens."""

# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def inverse_rms(
    x, eps, num_tokens, stride_x, K: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr
):
    """1 / rms of each row of x [M, K], in layout TOKENS."""
    SPAN: gl.constexpr = 256 * WARPS
    OF_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    m = gl.arange(0, M, layout=gl.SliceLayout(1, OF_ROWS))[:, None]
    k = gl.arange(0, SPAN, layout=gl.SliceLayout(0, OF_ROWS))[None, :]
    squares = gl.zeros([M, SPAN], gl.float32, OF_ROWS)
    for at in gl.static_range(0, K, SPAN):
        row = gl.load(x + m * stride_x + at + k, mask=(m < num_tokens) & (at + k < K), other=0.0).to(gl.float32)
        squares += row * row
    return gl.convert_layout(gl.rsqrt(gl.sum(squares, 1) / K + eps), TOKENS)
