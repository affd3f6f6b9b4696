"""Kimi delta attention: the delta rule with a decay for each channel of keys, over states in blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.data.state import DeltaStates, StateContext
from kernels.reference.precision import to_wide
from kernels.reference.recurrent import Tokens, of_sequence, unit


def kda(
    qkv: Tensor, beta: Tensor, forget: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """Compute Kimi delta attention of H heads → [T, H, Dv].

    qkv [T, H Dk + H Dk + H Dv]; beta [T, H]; forget [T, H Dk]; rate [H] and bias [H Dk] float32. As `delta_rule` with
    β = σ(beta) and decays e^g of each channel of keys, g = -rate · softplus(forget + bias):

        S ← diag(e^g) S;  δ = β (v - Sᵀk);  S ← S + k δᵀ;  o = Sᵀq

    In `states`, decays are those of channels: [num_blocks, block_size, H, Dk].
    """
    s, size = states, context.block_size
    (num_heads, key_dim), value_dim = s.keys.shape[2:], s.updates.shape[3]
    out = qkv.new_zeros(len(qkv), num_heads, value_dim)
    tables, starts = context.block_tables, context.query_start.tolist()
    for i, (row, end) in enumerate(zip(context.rows.tolist(), context.context_lens.tolist(), strict=True)):
        count = starts[i + 1] - starts[i]
        if row == len(tables) - 1 or not count:
            continue
        part = slice(starts[i], starts[i] + count)
        inner = num_heads * key_dim
        query, keys, values = qkv[part].split((inner, inner, num_heads * value_dim), 1)
        query, keys = (each.unflatten(1, (num_heads, key_dim)) for each in (query, keys))
        decay = F.softplus(to_wide(forget[part]) + to_wide(bias)).unflatten(1, (num_heads, key_dim))
        new = Tokens(
            unit(query) * key_dim**-0.5,
            keys,
            to_wide(values).unflatten(1, (num_heads, value_dim)),
            to_wide(beta[part].sigmoid()),
            -to_wide(rate)[:, None] * decay,
        )
        out[part] = of_sequence(new, end - count, tables[row].tolist(), s, size, _block).to(out.dtype)
    return out


def _block(new: Tokens, old: tuple[Tensor, Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the outputs [n, H, Dv] of a block's new tokens. old: keys, updates and decays of its tokens before.

    Also returns keys [m, H, Dk], updates [m, H, Dv] and decays since the block's start [m, H, Dk] of all its tokens.
    """
    num_old = len(old[0])
    keys = unit(torch.cat((old[0], new.keys)))
    decays = torch.cat((to_wide(old[2]), (old[2][-1] if num_old else 0) + new.decay.cumsum(0)))
    own, n = decays[num_old:], len(new.beta)
    is_past = torch.ones(n, len(decays), dtype=torch.bool, device=own.device).tril(num_old)
    between = (own[:, None] - decays).masked_fill(~is_past[:, :, None, None], -torch.inf).exp()  # [n, m, H, Dk]
    similar = torch.einsum("nhk,mhk,nmhk->hnm", keys[num_old:], keys, between) * new.beta.T[:, :, None]
    wanted = new.values - torch.einsum("hkv,nhk->nhv", state, own.exp() * keys[num_old:])
    right = (new.beta[:, :, None] * wanted).transpose(0, 1) - similar[:, :, :num_old] @ to_wide(old[1]).transpose(0, 1)
    solved = torch.linalg.solve_triangular(similar[:, :, num_old:].tril(-1), right, upper=False, unitriangular=True)
    updates = torch.cat((to_wide(old[1]), solved.transpose(0, 1)))
    seen = torch.einsum("nhk,mhk,nmhk->hnm", new.query, keys, between)
    outputs = torch.einsum("hkv,nhk->nhv", state, own.exp() * new.query)
    return outputs + (seen @ updates.transpose(0, 1)).transpose(0, 1), keys, updates, decays
