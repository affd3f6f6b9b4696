"""Writing keys and values to their slots of the paged KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0  # the largest number of torch.float8_e4m3fn


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., Hkv, D], scale [Hkv] float32 -> x / scale as float8_e4m3fn, saturated at ±448; what is not finite is NaN."""
    scaled = (x.float() / scale.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.masked_fill_(~x.isfinite(), math.nan).to(torch.float8_e4m3fn)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    """Write key, value [T, Hkv, D] to the slots slot_mapping [T] int64 of the caches [num_blocks, Hkv, block_size, D]."""
    assert (kv_scale is not None) == (key_cache.dtype == torch.float8_e4m3fn)
    if kv_scale is not None:  # bytes, since PyTorch indexes no float8
        key, value = to_e4m3(key, kv_scale[0]).view(torch.uint8), to_e4m3(value, kv_scale[1]).view(torch.uint8)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    if len(slot_mapping) and int(slot_mapping.min()) < 0:
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = key_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value
