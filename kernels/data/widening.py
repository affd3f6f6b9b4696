"""When prefill attention over an e4m3 cache gains from upcast copies of its pages, made once a layer. Needs no Triton.

On Hopper, a warpgroup converts the codes of an e4m3 cache to float16 before the tensor core reads them: again for each
tile of queries, and more slowly than TMA loads upcast pages. An upcast copy costs time for each key, and saves it for
each query that sees the key. New keys and values are only written once more when they are stored; older ones are read,
too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.data.plan import padded_query_rows

WIDE_DTYPE = torch.float16  # holds every e4m3 number, and is that of the queries (see `rope_and_store`)
WIDE_PAGE = 128  # slots of a wide page: all keys of a tile of the Hopper kernel, which then loads few boxes

# Seconds for each operation, by the channels to which Hopper's kernel pads a head. As measured on an H200 with 8,192
# new tokens in prompts of 512 to 8,192 (`python -m tests.gpu prefill`): 7e-16 to 1.4e-15 with 64 channels, else 5e-16
# to 8e-16.
SAVED = {64: 8e-16, 128: 6e-16, 256: 6e-16}
COPIED = 2.4e12  # bytes that `widen_pages` reads and writes a second
LAUNCH = 5e-6  # seconds of one more kernel, or of a layer's part of preparing the step on the CPU: an estimate


def can_gain(
    capability: tuple[int, int] | None, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> bool:
    """Return whether Hopper's prefill kernel computes such heads (see its `supports`) and gains from upcast copies.

    `dtype`: the model's.
    """
    rows = padded_query_rows(num_heads // num_kv_heads)
    return (
        capability is not None
        and capability[0] == 9
        and dtype in (torch.bfloat16, torch.float16)
        and 64 <= head_dim <= max(SAVED)
        and head_dim % 16 == 0
        and rows & (rows - 1) == 0
        and rows <= 64
    )


def first_needed(query_len: int, context_len: int, window: int) -> int:
    """The first position that any of a sequence's newest `query_len` tokens sees; window 0: all."""
    return max(context_len - query_len + 1 - window, 0) if window else 0


def num_wide_pages(query_lens: Sequence[int], context_lens: Sequence[int], window: int) -> int:
    """Wide pages of all positions that the sequences' newest tokens see."""
    return sum(
        -(-context // WIDE_PAGE) - first_needed(query, context, window) // WIDE_PAGE
        for query, context in zip(query_lens, context_lens, strict=True)
    )


def num_pairs(query_lens: Sequence[int], context_lens: Sequence[int], window: int) -> int:
    """Pairs of a query and a key that it sees."""
    total = 0
    for queries, context in zip(query_lens, context_lens, strict=True):
        first = context - queries
        whole = min(max(window - first, 0), queries) if window else queries  # queries that see all keys up to their own
        total += whole * first + whole * (whole + 1) // 2 + (queries - whole) * window
    return total


def seconds_saved(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> float:
    """Estimate what a layer gains from upcast copies; below 0: it loses. Heads must be those of `can_gain`."""
    padded = min(channels for channels in SAVED if channels >= head_dim)
    num_flops = num_pairs(query_lens, context_lens, window) * num_heads * 4 * padded
    num_new = sum(query_lens)
    num_old = max(num_wide_pages(query_lens, context_lens, window) * WIDE_PAGE - num_new, 0)
    num_bytes = num_kv_heads * head_dim * 2 * (2 * num_new + (1 + 2) * num_old)  # K and V, written, and read if old
    return num_flops * SAVED[padded] - num_bytes / COPIED - LAUNCH
