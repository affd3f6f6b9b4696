"""Recurrent layers over states in blocks, see `StateContext`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.data.state import DeltaStates, StateContext
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
        assert context.sequence_of is not None
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


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, context: StateContext) -> Tensor:
    """Compute SiLU of the convolution of each channel of x [T, C] → [T, C]. weight, bias, inputs: see `short_conv`."""
    return F.silu(_causal_conv(x, weight, bias, inputs, context))


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """Compute the gated delta rule of queries and keys of Hk heads and values of Hv heads → [T, Hv, Dv].

    qkv [T, Hk Dk + Hk Dk + Hv Dv]; gates = [b, a] [T, 2Hv]; rate [Hv] and bias [Hv] float32. Each key head serves
    Hv / Hk consecutive value heads. With q and k of length 1, q divided by √Dk, β = σ(b) and decay
    e^g, g = -rate · softplus(a + bias), the state S [Dk, Dv] of a value head and its output o are after each token:

        S ← e^g S;  δ = β (v - Sᵀk);  S ← S + k δᵀ;  o = Sᵀq
    """
    s, out = states, qkv.new_zeros(len(qkv), *states.updates.shape[2:])
    (num_keys, key_dim), (num_values, value_dim) = s.keys.shape[2:], s.updates.shape[2:]
    tables, starts, size = context.block_tables, context.query_start.tolist(), context.block_size
    for i, (row, end) in enumerate(zip(context.rows.tolist(), context.context_lens.tolist(), strict=True)):
        count = starts[i + 1] - starts[i]
        if row == len(tables) - 1 or not count:
            continue
        part = slice(starts[i], starts[i] + count)
        query, keys, values = qkv[part].split((num_keys * key_dim, num_keys * key_dim, num_values * value_dim), 1)
        query, keys = (each.unflatten(1, (num_keys, key_dim)) for each in (query, keys))
        beta, decay = _gates(gates[part], rate, bias)
        new = Tokens(
            unit(query) * key_dim**-0.5, keys, to_wide(values).unflatten(1, (num_values, value_dim)), beta, decay
        )
        table = tables[row].tolist()
        out[part] = of_sequence(new, end - count, table, s, size, _delta_of_block).to(out.dtype)
    return out


def _gates(gates: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return β and g [n, Hv] of gates [n, 2Hv]."""
    b, a = gates.chunk(2, 1)
    return to_wide(b.sigmoid()), -to_wide(rate) * F.softplus(to_wide(a) + to_wide(bias))


def unit(x: Tensor) -> Tensor:
    """Return x [..., n] with length 1."""
    x = to_wide(x)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Tokens(NamedTuple):
    """n tokens of a sequence: of the delta rule, or of a state-space layer, whose β is 1."""

    query: Tensor  # [n, Hk, Dk], scaled
    keys: Tensor  # [n, Hk, Dk], of any length
    values: Tensor  # [n, Hv, Dv]
    beta: Tensor  # [n, Hv]
    decay: Tensor  # [n, Hv], or of channels [n, Hv, Dk]: g

    def part(self, start: int, stop: int) -> Tokens:
        """Return the tokens of these indices."""
        return Tokens(*(each[start:stop] for each in self))


OfBlock = Callable[[Tokens, tuple[Tensor, Tensor, Tensor], Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def of_sequence(new: Tokens, first: int, table: list[int], states: DeltaStates, size: int, of_block: OfBlock) -> Tensor:
    """Compute the outputs [n, Hv, Dv] of tokens from position `first` on, block by block, and store their states.

    of_block: computes a block's new tokens, see `_delta_of_block`.
    """
    end, outputs = first + len(new.beta), []
    state: Tensor | None = None  # [Hv, Dk, Dv]: before the block
    for index in range(max(first - 1, 0) // size, (end - 1) // size + 1):
        start, block = index * size, table[index]
        num_old = min(max(first - start, 0), size)
        if state is None:
            state = (
                to_wide(states.before[block]) if num_old and start else to_wide(torch.zeros_like(states.before[block]))
            )
        elif block >= 0:
            states.before[block] = state
        if not num_old and not start and block >= 0:
            states.before[block] = state
        part = new.part(max(start - first, 0), max(start + size - first, 0))
        old = (states.keys[block, :num_old], states.updates[block, :num_old], states.decays[block, :num_old])
        output, keys, updates, decays = of_block(part, old, state)
        outputs.append(output)
        stop = num_old + len(part.beta)
        if block >= 0 and len(part.beta):
            states.keys[block, num_old:stop] = part.keys
            states.updates[block, num_old:stop] = updates[num_old:]
            states.decays[block, num_old:stop] = decays[num_old:]
        if index < (end - 1) // size:
            decays = decays.view(len(decays), len(state), -1)  # [size, Hv, 1 or Dk]
            weighted = (decays[-1] - decays).exp() * keys
            state = decays[-1].exp()[:, :, None] * state + torch.einsum("thk,thv->hkv", weighted, updates)
    return torch.cat(outputs)


def _delta_of_block(
    new: Tokens, old: tuple[Tensor, Tensor, Tensor], state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the outputs [n, Hv, Dv] of a block's new tokens. old: keys, updates and decays of its tokens before.

    Also returns keys [m, Hv, Dk], updates [m, Hv, Dv] and decays since the block's start [m, Hv] of all its tokens.
    """
    num_old, groups = len(old[0]), len(state) // new.keys.shape[1]
    keys = unit(torch.cat((old[0], new.keys))).repeat_interleave(groups, 1)
    query = new.query.repeat_interleave(groups, 1)
    last = old[2][-1] if num_old else 0
    decays = torch.cat((to_wide(old[2]), last + new.decay.cumsum(0)))
    n, own = len(new.beta), decays[num_old:]
    since = own.T[:, :, None] - decays.T[:, None, :]  # [Hv, n, m]
    is_past = torch.ones(n, len(decays), dtype=torch.bool, device=own.device).tril(num_old)
    decay = since.masked_fill(~is_past, -torch.inf).exp()
    similar = torch.einsum("nhk,mhk->hnm", keys[num_old:], keys) * decay * new.beta.T[:, :, None]
    wanted = new.values - own.exp()[:, :, None] * torch.einsum("hkv,nhk->nhv", state, keys[num_old:])
    right = (new.beta[:, :, None] * wanted).transpose(0, 1) - similar[:, :, :num_old] @ to_wide(old[1]).transpose(0, 1)
    solved = torch.linalg.solve_triangular(similar[:, :, num_old:].tril(-1), right, upper=False, unitriangular=True)
    updates = torch.cat((to_wide(old[1]), solved.transpose(0, 1)))
    seen = torch.einsum("nhk,mhk->hnm", query, keys) * decay
    outputs = own.exp()[:, :, None] * torch.einsum("hkv,nhk->nhv", state, query)
    return outputs + (seen @ updates.transpose(0, 1)).transpose(0, 1), keys, updates, decays


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight · x / rms(x) · SiLU(gate) of each head: x [T, H, D], gate [T, H · D], weight [D] → [T, H · D]."""
    normed = to_wide(x) * (to_wide(x).square().mean(-1, keepdim=True) + eps).rsqrt()
    gate = F.silu(to_wide(gate)).unflatten(1, x.shape[1:])
    return (to_wide(weight * normed.to(x.dtype)) * gate).to(x.dtype).flatten(1)
