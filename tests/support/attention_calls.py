"""Calls of attention with the fields of its records given one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kernels import AttentionArgs, KVSlots, PagedContext, RopeArgs


def spread(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `paged_attention_decode` or `paged_attention_prefill` as a function of query, caches, tables, rows and
    lengths.

    lens: (context_lens,), or for prefill (query_start, context_lens); options: of `AttentionArgs` and of the function.
    """

    def call(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        tables: Tensor,
        rows: Tensor,
        *lens: Tensor,
        **options: Any,
    ) -> Tensor:
        own = {name: options.pop(name) for name in ("plan", "tiles", "out") if name in options}
        context = PagedContext(key_cache, value_cache, tables, rows, lens[-1])
        return attend(query, *lens[:-1], context, AttentionArgs(**options), **own)

    return call


def spread_rope(rope_and_store: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `rope_and_store` as a function of qkv, positions, the table of the rotation, caches and slots.

    options: of `RopeArgs`, and kv_scale and wide of `KVSlots`.
    """

    def call(
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        **options: Any,
    ) -> Tensor:
        into = KVSlots(key_cache, value_cache, slots, options.pop("kv_scale", None), options.pop("wide", None))
        return rope_and_store(qkv, positions, RopeArgs(cos_sin=cos_sin, **options), into)

    return call
