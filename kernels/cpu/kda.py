"""Kimi delta attention on a CPU, like the delta rule of `kernels.cpu.recurrent`. See `kernels.reference`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.recurrent import Net, Old, Tokens, of_heads, sequences
from kernels.cpu.scan import CHANNELS, Gates, native_scan
from kernels.data.state import DeltaStates, StateContext


def kda(
    qkv: Tensor, beta: Tensor, forget: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.kda`."""
    if (native := native_kda(qkv, beta, forget, rate, bias, states, context)) is not None:
        return native
    (num_heads, key_dim), value_dim = states.keys.shape[2:], states.updates.shape[3]
    out = qkv.new_zeros(len(qkv), num_heads, value_dim)
    strength = beta.sigmoid().float().T
    decay = F.softplus(forget.float() + bias).unflatten(1, (num_heads, key_dim)) * -rate.unsqueeze(1)
    decay = decay.transpose(0, 1)  # [H, T, Dk]
    query, keys, values = qkv.split((num_heads * key_dim, num_heads * key_dim, num_heads * value_dim), 1)
    for sequence in sequences(context, len(qkv)):
        at = sequence.part
        raw = keys[at].unflatten(1, (num_heads, key_dim))
        new = Tokens(
            of_heads(query[at].unflatten(1, (num_heads, key_dim)), num_heads) * key_dim**-0.5,
            of_heads(raw, num_heads),
            values[at].unflatten(1, (num_heads, value_dim)).transpose(0, 1).float(),
            strength[:, at],
            decay[:, at],
        )
        _Kda(sequence, states, context.block_size, raw).run(new, out[at])
    return out


def native_kda(
    qkv: Tensor, beta: Tensor, forget: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor | None:
    """Compute `kda` in C++; None: there is no kernel for these tensors."""
    width = forget.shape[1]
    return native_scan(qkv, (0, width, 2 * width), Gates(CHANNELS, forget, rate, bias, beta), states, context)


class _Kda(Net):
    """The Kimi delta attention of a sequence. Decays are [H, n, Dk]."""

    chunk = 16

    def _solve(self, new: Tokens, old: Old | None, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, num_old = new.decay.cumsum(1), 0
        keys, updates, decays = new.keys, new.values[:, :0], own
        if old is not None:
            num_old, own = old[0].shape[1], own + old[2][:, -1:]
            keys, updates, decays = torch.cat((old[0], new.keys), 1), old[1], torch.cat((old[2], own), 1)
        between = own.unsqueeze(2) - decays.unsqueeze(1)  # [H, n, m, Dk]
        is_past = torch.ones(between.shape[1:3], dtype=torch.bool).tril(num_old)
        between = between.masked_fill_(~is_past.unsqueeze(2), -torch.inf).exp_().mul_(keys.unsqueeze(1))
        beta, shrunk = new.beta.unsqueeze(2), own.exp()
        similar = torch.einsum("hnk,hnmk->hnm", new.keys, between) * beta
        solved = (new.values - torch.bmm(new.keys * shrunk, state)) * beta
        if num_old:
            solved -= torch.bmm(similar[:, :, :num_old], updates)
        similar = similar[:, :, num_old:].tril(-1)
        solved = torch.linalg.solve_triangular(similar, solved, upper=False, unitriangular=True)
        updates = torch.cat((updates, solved), 1)
        seen = torch.einsum("hnk,hnmk->hnm", new.query, between)
        return torch.baddbmm(torch.bmm(new.query * shrunk, state), seen, updates), keys, updates, decays
