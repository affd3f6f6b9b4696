"""Calls of attention with the fields of its records given one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kernels import AttentionArgs, PagedContext


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
