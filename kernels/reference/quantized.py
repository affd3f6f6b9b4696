"""Low-bit weights: values of their codes, and quantisation of floats."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.data.quantized_weight import QuantizedWeight, by_rows

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of codes 0 to 7; from 8 on they are negative
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def dequantize(codes: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The whole matrix [N, K] in `dtype`, computed in float32, or in float64 for that. `codes` are the weight's."""
    wide = torch.promote_types(dtype, torch.float32)
    n, k = len(weight), weight.num_channels
    values = _values(by_rows(codes, weight.panel) if weight.panel else codes, weight.kind).to(wide)
    scale = weight.scale.to(wide).repeat_interleave(weight.rows, 0)[:n]
    if weight.zero is not None:
        values = values - weight.zero.to(wide).repeat_interleave(weight.group, 1)[:, :k]
    values = values * scale.repeat_interleave(weight.group, 1)[:, :k]
    if weight.factor is not None:
        values *= weight.factor[:, None].to(wide)
    if weight.minimum is not None:
        values -= weight.minimum.to(wide).repeat_interleave(weight.group, 1)[:, :k]
    if weight.order is not None:
        values = torch.empty_like(values).index_copy_(1, weight.order, values)
    return values.to(dtype)


def _values(codes: Tensor, kind: str) -> Tensor:
    """[N, K], where two codes share a byte of `codes`."""
    if kind in ("e4m3", "int8"):
        return codes.float()
    if kind == "int4":
        return torch.cat([codes & 15, codes >> 4], 1).float() - 8
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[_unpack_e2m1(codes)]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [N, K] from 0 to 15, K even, as `QuantizedWeight` holds those of int4: [N, K / 2] uint8."""
    low, high = codes.to(torch.uint8).chunk(2, 1)
    return low | high << 4


PACKED_AT_ONCE = 1 << 24  # codes, each of which needs some four bytes meanwhile


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes [N, K] from 0 to 15, K a multiple of 8, as `QuantizedWeight` holds those of e2m1: [N, K / 2] uint8.

    Of the 32 bits w of four bytes, in the order of memory, M = 0x81c081c0 selects those of two codes: a code's sign is
    bit 15 and its other bits 8 to 6 of a half. So decoding takes few instructions:

        low codes of bytes 0 and 1:   w & M                        high:  (w << 6 ^ w << 2) & M
        low codes of bytes 2 and 3:   w << 3 & M                   high:  (w >> 3 ^ w << 1) & M
    """
    assert codes.shape[1] % 8 == 0, f"rows of e2m1 must have a multiple of 8 codes, not {codes.shape[1]}"
    packed = codes.new_empty(len(codes), codes.shape[1] // 2, dtype=torch.uint8)
    rows = max(PACKED_AT_ONCE // max(codes.shape[1], 1), 1)
    for part, out in zip(codes.split(rows), packed.split(rows), strict=True):
        low, high = part.to(torch.uint8).contiguous().view(torch.int32).chunk(2, 1)  # [n, K / 8] each
        pairs = low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16
        a, b, c, d = ((pair | pair << 8) & 0xF000F for pair in pairs)  # a code in each half
        bits = a * 0x1040 & -0x7E3F7E40
        bits |= b * 0x208 & 0x10381038
        bits |= c * 0x401 & 0x20072007
        bits |= d << 9 & 0x0E000E00 | d << 11 & 0x40004000
        bits ^= bits >> 4 & 0x00070007
        bits ^= bits << 4 & 0x0E000E00
        bits ^= bits << 4 & 0x20002000
        bits ^= bits >> 4 & 0x4000  # the shift to the right brings the low half a bit of the high one
        out.copy_(bits.view(torch.uint8))
    return packed


def _unpack_e2m1(packed: Tensor) -> Tensor:
    """See `pack_e2m1`: [N, K / 2] -> [N, K] int32."""
    w = packed.contiguous().view(torch.int32)
    right = w >> 3 & 0x1FFFFFFF
    halves = torch.stack([w, w << 3, w << 6 ^ w << 2, right ^ w << 1], -1).view(torch.int16).int()  # [N, K / 8, 8]
    codes = halves >> 12 & 8 | halves >> 6 & 7
    return codes.unflatten(2, (2, 4)).transpose(1, 2).flatten(1)


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
    """x [M, K] -> codes [M, K] of `dtype` (float8_e4m3fn or int8) and the scale of each row [M, 1] float32; x ≈ codes ·
    scale.
    """
    wide, largest = x.float(), LARGEST[dtype]
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    codes = wide / scale
    if dtype == torch.int8:
        codes = codes.round()
    return codes.clamp(-largest, largest).to(dtype), scale
