"""Recurrent layers over whole sequences in float64: the truth for kernels that compute them in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Heads = tuple[int, int, int, int]  # key heads, value heads, their sizes


def whole_delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, lengths: list[int], heads: Heads
) -> Tensor:
    """The delta rule of whole sequences, token by token in float64 [T, Hv, Dv]."""
    num_keys, num_values, key_dim, value_dim = heads
    outputs = []
    for x, own_gates in zip(qkv.double().split(lengths), gates.double().split(lengths), strict=True):
        query, key, value = x.split((num_keys * key_dim, num_keys * key_dim, num_values * value_dim), 1)
        query, key = (
            each.view(-1, num_keys, key_dim).repeat_interleave(num_values // num_keys, 1) for each in (query, key)
        )
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
        value = value.view(-1, num_values, value_dim)
        b, a = own_gates.chunk(2, 1)
        decay = (-rate.double() * F.softplus(a + bias.double())).exp()
        state = x.new_zeros(num_values, key_dim, value_dim)
        for t in range(len(x)):
            state = state * decay[t][:, None, None]
            update = b[t].sigmoid()[:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + key[t][:, :, None] * update[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) * key_dim**-0.5)
    return torch.stack(outputs)


def whole_kda(
    qkv: Tensor, beta: Tensor, forget: Tensor, of_heads: tuple[Tensor, Tensor], lengths: list[int], heads: Heads
) -> Tensor:
    """Kimi delta attention of whole sequences, token by token in float64 [T, H, Dv].

    of_heads: rate [H], bias [H Dk].
    """
    num_heads, _, key_dim, value_dim = heads
    rate, bias = (each.double() for each in of_heads)
    decays = (-rate[:, None] * F.softplus(forget.double() + bias).unflatten(1, (num_heads, key_dim))).exp()
    outputs, at = [], 0
    for x in qkv.double().split(lengths):
        query, key, value = x.split((num_heads * key_dim, num_heads * key_dim, num_heads * value_dim), 1)
        query, key = (each.unflatten(1, (num_heads, key_dim)) for each in (query, key))
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
        value, state = value.unflatten(1, (num_heads, value_dim)), x.new_zeros(num_heads, key_dim, value_dim)
        for t in range(len(x)):
            state = state * decays[at][:, :, None]
            update = beta[at].double().sigmoid()[:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + key[t][:, :, None] * update[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) * key_dim**-0.5)
            at += 1
    return torch.stack(outputs)


def whole_conv(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int]) -> Tensor:
    """The gated convolution of whole sequences [T, 3C], in float64."""
    outputs = []
    for part in x.double().split(lengths):
        before, after, values = part.chunk(3, 1)
        padded = F.pad((before * values).T, (weight.shape[1] - 1, 0))
        bias64 = None if bias is None else bias.double()
        outputs.append(after * F.conv1d(padded, weight.double()[:, None], bias64, groups=len(weight)).T)
    return torch.cat(outputs)


def whole_mamba2(
    xbc: Tensor,
    steps: Tensor,
    of_heads: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float],
    lengths: list[int],
    heads: Heads,
) -> Tensor:
    """The state-space layer of whole sequences, token by token in float64 [T, H, P]. of_heads: rate, bias and skip.

    heads: groups, heads, sizes of states and heads.
    """
    num_groups, num_heads, state_dim, head_dim = heads
    rate, bias, skip = (each.double() for each in of_heads)
    outputs = []
    for each, own_steps in zip(xbc.double().split(lengths), steps.double().split(lengths), strict=True):
        x, b, c = each.split((num_heads * head_dim, num_groups * state_dim, num_groups * state_dim), 1)
        x = x.view(-1, num_heads, head_dim)
        b, c = (part.view(-1, num_groups, state_dim).repeat_interleave(num_heads // num_groups, 1) for part in (b, c))
        dt = F.softplus(own_steps + bias).clamp(*limits)
        state = x.new_zeros(num_heads, state_dim, head_dim)
        for t in range(len(each)):
            state = state * (-rate * dt[t]).exp()[:, None, None] + b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
            outputs.append(torch.einsum("hnp,hn->hp", state, c[t]) + skip[:, None] * x[t])
    return torch.stack(outputs)
