"""Recurrent layers on a CPU: one sequence at a time, in large matrix multiplications. See `kernels.reference`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import library
from kernels.cpu.scan import DELTA, Gates, native_scan
from kernels.data.state import DeltaStates, StateContext

CHUNK = 64  # tokens whose updates are solved for at once
MOST_INPUTS = 128  # of a convolution in a block, for the kernel in C++


class Sequence(NamedTuple):
    """The tokens of a sequence in a step."""

    part: slice  # of the step's tokens
    first: int  # position of the first one
    end: int
    table: list[int]  # entries of the block table up to the last token's


def sequences(context: StateContext, num_tokens: int) -> Iterator[Sequence]:
    """Yield the sequences, without padding."""
    padding, starts = len(context.block_tables) - 1, context.query_start.tolist()
    for i, (row, end) in enumerate(zip(context.rows.tolist(), context.context_lens.tolist(), strict=True)):
        part = slice(starts[i], starts[i + 1])
        if row != padding and part.start < part.stop:
            table = context.block_tables[row, : (end - 1) // context.block_size + 1].tolist()
            yield Sequence(part, end - (part.stop - part.start), end, table)


class _Convolution(ctypes.Structure):
    """`Convolution` in recurrent.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "inputs", "out")),
        *((name, ctypes.c_void_p) for name in ("tables", "rows", "query_start", "context_lens")),
        *((name, ctypes.c_int64) for name in ("seqs", "tokens", "stride", "channels")),
        *((name, ctypes.c_int64) for name in ("num_rows", "max_blocks", "block_size")),
        *((name, ctypes.c_int32) for name in ("length", "ring", "gated", "is_bf16")),
    )


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    """See `kernels.reference.short_conv`."""
    if (out := _native_conv(x, weight, bias, inputs, context, gated=True)) is not None:
        return out
    before, after, values = x.chunk(3, 1)
    return after * _causal_conv(before * values, weight, bias, inputs, context)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    """See `kernels.reference.causal_conv`."""
    if (out := _native_conv(x, weight, bias, inputs, context, gated=False)) is not None:
        return out
    return F.silu(_causal_conv(x, weight, bias, inputs, context), inplace=True)


def _native_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext, *, gated: bool
) -> Tensor | None:
    """Compute `short_conv` (gated) or `causal_conv` in C++; None: there is no kernel for these tensors."""
    native, c = library(), context
    parts = (weight, inputs) if bias is None else (weight, bias, inputs)
    sequences = c.block_tables, c.rows, c.query_start, c.context_lens
    if (
        native is None
        or x.dtype not in (torch.float32, torch.bfloat16)
        or x.stride(1) != 1
        or inputs.shape[1] > MOST_INPUTS
        or any(part.dtype != x.dtype or not part.is_contiguous() for part in parts)
        or any(each.dtype != torch.int32 or not each.is_contiguous() for each in sequences)
    ):
        return None
    (num_tokens, _), (channels, length) = x.shape, weight.shape
    out = x.new_empty(num_tokens, channels)
    tensors = (x, weight, bias, inputs, out, *sequences)
    struct = _Convolution(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        len(c.rows), num_tokens, x.stride(0), channels, *c.block_tables.shape, c.block_size,
        length, inputs.shape[1], gated, x.dtype == torch.bfloat16,
    )  # fmt: skip
    native.call("quire_causal_conv", struct, tensors)
    return out


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    out, size, length = x.new_zeros(x.shape), context.block_size, weight.shape[1]
    taps, offset = weight.T.float(), None if bias is None else bias.float()
    for part, first, end, table in sequences(context, len(x)):
        known = _newest(inputs, table, first, length - 1, size)
        seen = torch.cat((known, x[part]))  # from position `begin` on
        begin, count = first - len(known), end - first
        total = seen[len(known) :] * taps[-1]
        for lag in range(1, length):
            missing = max(lag - len(known), 0)  # tokens before the sequence
            if missing < count:
                at = len(known) - lag + missing
                total[missing:].addcmul_(seen[at : at + count - missing].float(), taps[-1 - lag])
        out[part] = total if offset is None else total.add_(offset)
        for index in range(first // size, len(table)):
            if (block := table[index]) >= 0:
                stop = min((index + 1) * size, end)
                _store(inputs[block], seen, begin, stop)
    return out


def _newest(inputs: Tensor, table: list[int], first: int, count: int, size: int) -> Tensor:
    """Return the inputs of up to `count` tokens before position `first`: [n, C]."""
    count = min(count, first)
    if not count:
        return inputs.new_empty(0, inputs.shape[2])
    slots = torch.arange(first - count, first) % inputs.shape[1]
    return inputs[table[(first - 1) // size], slots]


def _store(ring: Tensor, seen: Tensor, begin: int, stop: int) -> None:
    """Write the newest inputs before position `stop` of those from `begin` on into ring [N, C]."""
    start = max(stop - len(ring), begin)
    ring[torch.arange(start, stop) % len(ring)] = seen[start - begin : stop - begin]


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.delta_rule`."""
    if (native := native_delta_rule(qkv, gates, rate, bias, states, context)) is not None:
        return native
    (num_keys, key_dim), (num_values, value_dim) = states.keys.shape[2:], states.updates.shape[2:]
    b, a = gates.chunk(2, 1)
    out = qkv.new_zeros(len(qkv), *states.updates.shape[2:])
    beta = b.sigmoid().float().T
    decay = (F.softplus(a.float() + bias) * -rate).T  # [Hv, T]
    query, keys, values = qkv.split((num_keys * key_dim, num_keys * key_dim, num_values * value_dim), 1)
    for sequence in sequences(context, len(qkv)):
        at = sequence.part
        raw = keys[at].unflatten(1, (num_keys, key_dim))
        net = Net(sequence, states, context.block_size, raw)
        new = Tokens(
            of_heads(query[at].unflatten(1, (num_keys, key_dim)), num_values) * key_dim**-0.5,
            of_heads(raw, num_values),
            values[at].unflatten(1, (num_values, value_dim)).transpose(0, 1).float(),
            beta[:, at],
            decay[:, at],
        )
        net.run(new, out[at])
    return out


def native_delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor | None:
    """Compute `delta_rule` in C++; None: there is no kernel for these tensors."""
    width, half = states.keys.shape[2] * states.keys.shape[3], gates.shape[1] // 2
    own = Gates(DELTA, gates[:, half:], rate, bias, gates[:, :half])
    return native_scan(qkv, (0, width, 2 * width), own, states, context)


def of_heads(x: Tensor, count: int) -> Tensor:
    """Return x [n, Hk, Dk] with length 1, for each value head: [count, n, Dk] float32."""
    x = x.float()
    x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return x.transpose(0, 1).repeat_interleave(count // x.shape[1], 0)


class Tokens(NamedTuple):
    """n tokens of a sequence, by value heads."""

    query: Tensor  # [Hv, n, Dk]
    keys: Tensor  # [Hv, n, Dk]
    values: Tensor  # [Hv, n, Dv]
    beta: Tensor  # [Hv, n]; not read by state-space layers
    decay: Tensor  # [Hv, n]

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(*(each[:, start:stop] for each in self))


Old: TypeAlias = tuple[Tensor, Tensor, Tensor]  # keys, updates and decays of a block's tokens before


class Net:
    """The delta rule of a sequence."""

    chunk = CHUNK

    def __init__(self, sequence: Sequence, states: DeltaStates, size: int, raw_keys: Tensor) -> None:
        """raw_keys [n, Hk, Dk]: as they are stored."""
        self._sequence, self._states, self._size, self._raw = sequence, states, size, raw_keys

    def run(self, new: Tokens, out: Tensor) -> None:
        """Write the outputs [n, Hv, Dv], and the states."""
        (_, first, end, table), size, s = self._sequence, self._size, self._states
        num_heads, key_dim, value_dim = s.before.shape[1:]
        position, start = first, first - first % size
        old: Old | None = None
        state = torch.zeros(num_heads, key_dim, value_dim)
        if first:
            index = (first - 1) // size
            block, count = table[index], first - index * size
            if index:
                state = s.before[block].float()
            keys = self._keys(s.keys[block, :count], num_heads)
            old = keys, s.updates[block, :count].transpose(0, 1), s.decays[block, :count].transpose(0, 1)
            if count == size:  # the block is full: the step begins with the next one
                state, old = _after(state, *old), None
        while position < end:
            index = start // size
            if (block := table[index]) >= 0 and position == start:
                s.before[block] = state
            stop = self._stop(start, position, end)
            part = new.part(position - first, stop - first)
            outputs, keys, updates, decays = self._solve(part, old, state)
            out[position - first : stop - first] = outputs.transpose(0, 1)
            if block >= 0:
                self._store(block, position, min(stop, start + size), start, updates, decays)
            if stop < end:
                state = _after(state, keys, updates, decays)
            position = start = stop
            old = None

    def _keys(self, raw: Tensor, num_heads: int) -> Tensor:
        """Return stored keys [n, Hk, Dk] as they are multiplied, for each value head: [Hv, n, Dk] float32."""
        return of_heads(raw, num_heads)

    def _solve(self, new: Tokens, old: Old | None, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `_solve`."""
        return _solve(new, old, state)

    def _stop(self, start: int, position: int, end: int) -> int:
        """Return where a chunk from `start` on ends: before the next block that is held, and after a part of one."""
        size, table = self._size, self._sequence.table
        stop = start + size
        if position > start:
            return min(stop, end)
        while stop < end and stop - start < self.chunk and table[stop // size] < 0:
            stop += size
        return min(stop, end)

    def _store(self, block: int, position: int, stop: int, start: int, updates: Tensor, decays: Tensor) -> None:
        """Store what the tokens from `position` to `stop` change in the block that begins at `start`."""
        s, slots, first = self._states, slice(position - start, stop - start), self._sequence.first
        s.keys[block, slots] = self._raw[position - first : stop - first]
        s.updates[block, slots] = updates[:, slots].transpose(0, 1)
        s.decays[block, slots] = decays[:, slots].transpose(0, 1)


def _after(state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor) -> Tensor:
    """Return the state [Hv, Dk, Dv] after tokens with keys [Hv, n, Dk], updates [Hv, n, Dv] and decays [Hv, n], or
    of channels [Hv, n, Dk].
    """
    decays = decays.unsqueeze(2) if decays.dim() == 2 else decays
    last = decays[:, -1:]
    weighted = keys * (last - decays).exp()
    return torch.baddbmm(state * last.exp().transpose(1, 2), weighted.transpose(1, 2), updates)


def between(own: Tensor, decays: Tensor) -> Tensor:
    """Return what of each token is left at new ones, 0 of later ones: [Hv, n, m], by decays [Hv, n] and [Hv, m]."""
    since, (count, total) = own.unsqueeze(2) - decays.unsqueeze(1), (own.shape[1], decays.shape[1])
    if count > 1:
        is_past = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        since = since.masked_fill(~is_past, -torch.inf)
    return since.exp()


def _solve(new: Tokens, old: Old | None, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the outputs [Hv, n, Dv] of new tokens after old ones, whose keys, updates and decays are given.

    Also returns keys [Hv, m, Dk], updates [Hv, m, Dv] and decays [Hv, m] since `state` of all tokens.
    """
    own, num_old = new.decay.cumsum(1), 0
    keys, updates, decays = new.keys, new.values[:, :0], own
    if old is not None:
        num_old, own = old[0].shape[1], own + old[2][:, -1:]
        keys, updates, decays = torch.cat((old[0], new.keys), 1), old[1], torch.cat((old[2], own), 1)
    shrunk, count, decay = own.exp().unsqueeze(2), own.shape[1], between(own, decays)
    beta = new.beta.unsqueeze(2)
    solved = (new.values - shrunk * torch.bmm(new.keys, state)) * beta
    if keys.shape[1] > 1:
        similar = torch.bmm(new.keys, keys.transpose(1, 2)) * decay * beta
        if num_old:
            solved -= torch.bmm(similar[:, :, :num_old], updates)
        if count > 1:
            similar = similar[:, :, num_old:].tril(-1)
            solved = torch.linalg.solve_triangular(similar, solved, upper=False, unitriangular=True)
    updates = torch.cat((updates, solved), 1) if num_old else solved
    seen = torch.bmm(new.query, keys.transpose(1, 2)) * decay
    outputs = torch.baddbmm(shrunk * torch.bmm(new.query, state), seen, updates)
    return outputs, keys, updates, decays
