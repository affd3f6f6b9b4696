"""Recurrent layers over states in blocks, see `StateContext`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.data.state import StateContext
from kernels.reference.precision import to_wide


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    """Compute the gated short convolution C · conv(B · X) of x = [B, C, X] [T, 3C] → [T, C].

    weight [C, L], the newest token last; bias [C]. inputs [num_blocks, N, C], N >= L, in x's dtype: input p of the
    convolution is in entry p % N of its block, as are the inputs before it, up to the newest of the block.
    """
    before, after, values = x.chunk(3, 1)
    return after * _causal_conv(before * values, weight, bias, inputs, context)


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    """Convolve each channel of x [T, C] with the inputs before it, and store these."""
    length, past = weight.shape[1], _Past(x, inputs, weight.shape[1], context)
    taps = torch.stack([past.before(lag) for lag in reversed(range(length))], 2)  # [T, C, L]
    out = (to_wide(taps) * to_wide(weight)).sum(2)
    past.store()
    return (out if bias is None else out + to_wide(bias)).to(x.dtype)


class _Past:
    """The inputs x [T, C] of a step's tokens, and those before them, from the cache."""

    def __init__(self, x: Tensor, inputs: Tensor, length: int, context: StateContext) -> None:
        """`length`: inputs that a token sees, including its own."""
        c, seq = context, context.sequence_of.long()
        self._x, self._inputs, self._length = x, inputs, length
        self._tokens = torch.arange(len(x), device=x.device)
        starts, ends = c.query_start[:-1].long()[seq], c.query_start[1:].long()[seq]
        self._index = self._tokens - starts  # in the sequence's part of the step
        rows = c.rows.long()[seq]
        self._is_real = rows < len(c.block_tables) - 1
        self._first = torch.where(self._is_real, c.context_lens.long()[seq] - (ends - starts), 0)  # its position
        self._position = self._first + self._index
        tables, last = c.block_tables, c.block_tables.shape[1] - 1
        self._source = tables[rows, ((self._first - 1).clamp(min=0) // c.block_size).clamp(max=last)].long()
        self._target = tables[rows, (self._position // c.block_size).clamp(max=last)].long()
        is_newest = (self._tokens == ends - 1) | ((self._position + 1) % c.block_size == 0)
        self._is_stored = is_newest & self._is_real & (self._target >= 0)  # the newest token of a block

    def before(self, lag: int, tokens: Tensor | None = None) -> Tensor:
        """Return the inputs of the tokens `lag` before these (None: all), 0 before the sequence: [n, C]."""
        at = self._tokens if tokens is None else tokens
        first, position = self._first[at], self._position[at] - lag
        in_step = position >= first
        size = self._inputs.shape[1]
        cached = self._inputs[self._source[at].clamp(min=0), position.clamp(min=0) % size]
        found = torch.where(in_step[:, None], self._x[(at - lag).clamp(min=0)], cached)
        is_there = in_step | ((position >= 0) & (position > first - self._length))
        return torch.where((is_there & self._is_real[at])[:, None], found, 0)

    def store(self) -> None:
        """Write the newest inputs of each block that is held."""
        size = self._inputs.shape[1]
        at = self._tokens[self._is_stored]
        found = [self.before(lag, at) for lag in range(size)]  # all are read before any is written
        for lag, value in enumerate(found):
            position = self._position[at] - lag
            known = position > self._first[at] - self._length
            where = known & (position >= 0)
            self._inputs[self._target[at][where], position[where] % size] = value[where]
