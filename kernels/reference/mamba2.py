"""State-space layers (Mamba-2) over states in blocks, see `StateContext`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.data.state import DeltaStates, StateContext, StateSpace
from kernels.reference.precision import to_wide
from kernels.reference.recurrent import Tokens, of_sequence


def mamba2(xbc: Tensor, steps: Tensor, layer: StateSpace, states: DeltaStates, context: StateContext) -> Tensor:
    """Compute a state-space layer of H heads in G groups → [T, H, P]. Each group serves H / G consecutive heads.

    xbc [T, H P + G N + G N]: x of each head, B and C of each group; steps [T, H]. With dt = softplus(step + bias), at
    least limits[0] and at most limits[1], the state S [N, P] of a head and its output y are after each token:

        S ← e^(-rate · dt) S + B (dt x)ᵀ;  y = Sᵀ C + skip · x

    In `states`, keys are B and updates are dt x.
    """
    s, size, (rate, bias, skip, limits) = states, context.block_size, layer
    (num_groups, state_dim), (num_heads, head_dim) = s.keys.shape[2:], s.updates.shape[2:]
    out = xbc.new_zeros(len(xbc), num_heads, head_dim)
    tables, starts = context.block_tables, context.query_start.tolist()
    for i, (row, end) in enumerate(zip(context.rows.tolist(), context.context_lens.tolist(), strict=True)):
        count = starts[i + 1] - starts[i]
        if row == len(tables) - 1 or not count:
            continue
        part = slice(starts[i], starts[i] + count)
        x, b, c = xbc[part].split((num_heads * head_dim, num_groups * state_dim, num_groups * state_dim), 1)
        x, query = to_wide(x).unflatten(1, (num_heads, head_dim)), to_wide(c).unflatten(1, (num_groups, state_dim))
        dt = step_sizes(steps[part], bias, limits)
        keys = b.unflatten(1, (num_groups, state_dim))
        new = Tokens(query, keys, dt[:, :, None] * x, torch.ones_like(dt), -to_wide(rate) * dt)
        outputs = of_sequence(new, end - count, tables[row].tolist(), s, size, _block)
        out[part] = (outputs + to_wide(skip)[:, None] * x).to(out.dtype)
    return out


def step_sizes(steps: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """Return dt [n, H] of steps [n, H]."""
    return F.softplus(to_wide(steps) + to_wide(bias)).clamp(*limits)


def _block(new: Tokens, old: tuple[Tensor, Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the outputs [n, H, P] of a block's new tokens. old: keys, updates and decays of its tokens before.

    Also returns keys [m, H, N], updates [m, H, P] and decays since the block's start [m, H] of all its tokens.
    """
    num_old, groups = len(old[0]), len(state) // new.keys.shape[1]
    keys = to_wide(torch.cat((old[0], new.keys))).repeat_interleave(groups, 1)
    query = new.query.repeat_interleave(groups, 1)
    decays = torch.cat((to_wide(old[2]), (old[2][-1] if num_old else 0) + new.decay.cumsum(0)))
    updates, own = torch.cat((to_wide(old[1]), new.values)), decays[num_old:]
    since = own.T[:, :, None] - decays.T[:, None, :]  # [H, n, m]
    is_past = torch.ones(since.shape[1:], dtype=torch.bool, device=own.device).tril(num_old)
    seen = torch.einsum("nhk,mhk->hnm", query, keys) * since.masked_fill(~is_past, -torch.inf).exp()
    outputs = own.exp()[:, :, None] * torch.einsum("hkv,nhk->nhv", state, query)
    return outputs + (seen @ updates.transpose(0, 1)).transpose(0, 1), keys, updates, decays


def grouped_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, gate_first: bool) -> Tensor:
    """Normalise x [T, n], scaled by SiLU(gate [T, n]), in groups of n / num_groups channels → [T, n]; weight [n].

    gate_first: of x · SiLU(gate); else the norm of x is scaled.
    """
    wide, scale = to_wide(x), F.silu(to_wide(gate))
    grouped = (wide * scale if gate_first else wide).unflatten(1, (num_groups, -1))
    normed = (grouped * (grouped.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1) * to_wide(weight)
    return (normed if gate_first else normed * scale).to(x.dtype)
