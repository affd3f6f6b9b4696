"""Matrices of few bits: what their codes stand for, and how floats become codes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized_weight import QuantizedWeight

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of codes 0 to 7; from 8 on they are negative
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def dequantize(codes: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The whole matrix [N, K] in `dtype`, computed in float32, or in float64 for that. `codes` are the weight's."""
    wide = torch.promote_types(dtype, torch.float32)
    n, k = len(weight), weight.num_channels
    values = _values(codes, weight.kind).to(wide)
    scale = weight.scale.to(wide).repeat_interleave(weight.rows, 0)[:n]
    if weight.zero is not None:
        values = values - weight.zero.to(wide).repeat_interleave(weight.group, 1)[:, :k]
    values = values * scale.repeat_interleave(weight.group, 1)[:, :k]
    if weight.factor is not None:
        values *= weight.factor[:, None].to(wide)
    if weight.order is not None:
        values = torch.empty_like(values).index_copy_(1, weight.order, values)
    return values.to(dtype)


def _values(codes: Tensor, kind: str) -> Tensor:
    """[N, K], where two codes share a byte of `codes`."""
    if kind in ("e4m3", "int8"):
        return codes.float()
    nibbles = torch.cat([codes & 15, codes >> 4], 1)
    if kind == "int4":
        return nibbles.float() - 8
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[nibbles.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [N, K] from 0 to 15, K even, as `QuantizedWeight` holds them: [N, K / 2] uint8."""
    low, high = codes.to(torch.uint8).chunk(2, 1)
    return low | high << 4


STEPS_OF_LARGEST = (8.5, 8.0, 7.5, 7.0)  # scales that are tried: a group's largest value is that many steps from 0
ROUNDED_AT_ONCE = 1 << 20  # values, so that they stay in a CPU's cache


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [N, K] -> codes [N, K] uint8 from 0 to 15 and the scale of each group of channels [N, K / group] bfloat16.

    x ≈ (codes - 8) · scale: of a few scales for each group, the one with the least squared error.
    """
    parts = [_quantize_groups(part, group) for part in x.split(max(ROUNDED_AT_ONCE // x.shape[1], 1))]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts])


def _quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    values = x.float().unflatten(1, (-1, group))
    largest = values.gather(2, values.abs().argmax(2, keepdim=True))
    codes, scale = torch.full_like(values, 8), torch.ones_like(largest)
    least = torch.full_like(largest, torch.inf)
    for steps in STEPS_OF_LARGEST:
        tried = (largest / -steps).bfloat16().float()  # of the codes' range, -8 to 7, the wider half
        tried = torch.where(tried == 0, 1.0, tried)
        rounded = (values / tried).round().clamp(-8, 7)
        error = (rounded * tried - values).square().sum(2, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, tried, scale)
        codes = torch.where(better, rounded + 8, codes)
    return codes.to(torch.uint8).flatten(1), scale.squeeze(2).bfloat16()


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] of `dtype` (float8_e4m3fn or int8) and the scale of each row [M, 1] float32; x ≈ codes · scale."""
    wide, largest = x.float(), LARGEST[dtype]
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    codes = wide / scale
    if dtype == torch.int8:
        codes = codes.round()
    return codes.clamp(-largest, largest).to(dtype), scale
