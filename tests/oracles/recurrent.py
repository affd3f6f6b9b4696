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
        state = torch.zeros(num_values, key_dim, value_dim, dtype=torch.float64)
        for t in range(len(x)):
            state = state * decay[t][:, None, None]
            update = b[t].sigmoid()[:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + key[t][:, :, None] * update[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) * key_dim**-0.5)
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
