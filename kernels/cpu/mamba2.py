"""State-space layers (Mamba-2) on a CPU, like the delta rule of `kernels.cpu.recurrent`. See `kernels.reference`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.recurrent import Net, Old, Tokens, between, sequences
from kernels.cpu.scan import STATE_SPACE, Gates, native_scan
from kernels.data.state import DeltaStates, StateContext, StateSpace


def mamba2(xbc: Tensor, steps: Tensor, layer: StateSpace, states: DeltaStates, context: StateContext) -> Tensor:
    """See `kernels.reference.mamba2`."""
    if (native := native_mamba2(xbc, steps, layer, states, context)) is not None:
        return native
    (num_groups, state_dim), (num_heads, head_dim) = states.keys.shape[2:], states.updates.shape[2:]
    inner, width = num_heads * head_dim, num_groups * state_dim
    out = xbc.new_zeros(len(xbc), num_heads, head_dim)
    dt = F.softplus(steps.float() + layer.bias).clamp_(*layer.limits)
    decay = (dt * -layer.rate).T  # [H, T]
    x, b, c = xbc.split((inner, width, width), 1)
    for sequence in sequences(context, len(xbc)):
        at = sequence.part
        raw = b[at].unflatten(1, (num_groups, state_dim))
        own = x[at].unflatten(1, (num_heads, head_dim)).float()
        new = Tokens(
            _heads(c[at].unflatten(1, (num_groups, state_dim)), num_heads),
            _heads(raw, num_heads),
            (own * dt[at].unsqueeze(2)).transpose(0, 1),
            decay[:, at],
            decay[:, at],
        )
        _StateSpace(sequence, states, context.block_size, raw).run(new, out[at])
        out[at] = (own * layer.skip.unsqueeze(1)).add_(out[at])
    return out


def native_mamba2(
    xbc: Tensor, steps: Tensor, layer: StateSpace, states: DeltaStates, context: StateContext
) -> Tensor | None:
    """Compute `mamba2` in C++; None: there is no kernel for these tensors."""
    (num_groups, state_dim), (num_heads, head_dim) = states.keys.shape[2:], states.updates.shape[2:]
    inner, width = num_heads * head_dim, num_groups * state_dim
    gates = Gates(STATE_SPACE, steps, layer.rate, layer.bias, skip=layer.skip, limits=layer.limits)
    return native_scan(xbc, (inner + width, inner, 0), gates, states, context)


def _heads(x: Tensor, count: int) -> Tensor:
    """Return x [n, G, N] for each head: [count, n, N] float32."""
    return x.float().transpose(0, 1).repeat_interleave(count // x.shape[1], 0)


class _StateSpace(Net):
    """The state-space layer of a sequence."""

    def _keys(self, raw: Tensor, num_heads: int) -> Tensor:
        return _heads(raw, num_heads)

    def _solve(self, new: Tokens, old: Old | None, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, keys, updates, decays = new.decay.cumsum(1), new.keys, new.values, None
        if old is not None:
            own = own + old[2][:, -1:]
            keys, updates = torch.cat((old[0], new.keys), 1), torch.cat((old[1], new.values), 1)
            decays = torch.cat((old[2], own), 1)
        decays = own if decays is None else decays
        seen = torch.bmm(new.query, keys.transpose(1, 2)) * between(own, decays)
        outputs = torch.baddbmm(own.exp().unsqueeze(2) * torch.bmm(new.query, state), seen, updates)
        return outputs, keys, updates, decays
