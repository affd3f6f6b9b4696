"""Writing keys and values to their slots of the paged KV cache, and widening its pages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0  # the largest number of torch.float8_e4m3fn


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., Hkv, D], scale [Hkv] float32 -> x / scale as float8_e4m3fn, saturated at ±448; what is not finite is
    NaN.
    """
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
    """Write key, value [T, Hkv, D] to the slots slot_mapping [T] int64 of the caches [num_blocks, Hkv, block_size,
    D].
    """
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


def widen_pages(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    out: Tensor,
) -> None:
    """Copy pieces of contexts in e4m3 caches [num_blocks, Hkv, block_size, D] to out [2, P, Hkv, page, D], which has
    any dtype that holds e4m3 exactly. Scales are not applied.

    pages [N, 3] int32: a sequence, the first position that is needed, and which of the P pages to write. A page
    begins at a multiple of `page`. Slots before the needed one become 0; those from position lens[sequence] on are not
    written. lens [S] int32; block_tables and rows [S] as in
    `paged_attention_prefill`.
    """
    page, block_size = out.shape[3], key_cache.shape[2]
    for sequence, first, index in pages.tolist():
        begin = first // page * page
        positions = torch.arange(first, min(begin + page, int(lens[sequence])))
        table = block_tables[int(rows[sequence])]
        slots = (table[positions // block_size].long(), slice(None), positions % block_size)
        for side, cache in zip(out[:, index], (key_cache, value_cache), strict=True):  # [Hkv, page, D]
            codes = cache.view(torch.uint8)[slots].view(cache.dtype)  # bytes, since PyTorch indexes no float8
            side[:, : first - begin] = 0
            side[:, first - begin :][:, : len(positions)] = codes.to(out.dtype).transpose(0, 1)
