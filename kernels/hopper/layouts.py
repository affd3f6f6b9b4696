"""Layouts of a warpgroup's sums other than the matrix unit's own."""

# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def side_by_side(width, channels):
    """Sums [64, width] with `channels` of a row, 4 or 8, side by side in each thread, so that it stores them at once.

    As in the matrix unit's layout, which has two side by side, four threads have the channels of a row: they trade them.
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
