"""Measures once whether the C++ kernels or PyTorch are faster: see `choice`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import torch

from kernels.cpu import attention, build, native_attention
from kernels.cpu.choice import SIZES, Choices, mode
from kernels.cpu.library import library
from kernels.cpu.matmul import multiply, multiply_by_pytorch
from kernels.cpu.packed_weight import pack_floats
from kernels.data.attention import AttentionArgs, PagedContext

ROUNDS = 5
CONTEXT, BLOCK, HEADS, KV_HEADS, HEAD_DIM = 512, 16, 8, 2, 64

logger = logging.getLogger("engine.kernels")


def choose(compiling: Callable[[int, int], None] = build.compiling) -> None:
    """Read the choice of this library and CPU, or measure it: about half a second.

    `compiling`: see `build.compiling`.
    """
    build.compiling = compiling
    native = library()
    if native is None or mode() != "auto":
        return
    library_file = build.path(build.cache_folder(), native.instruction_set)
    kept, is_kept = library_file.with_suffix(".json"), build.is_own(library_file.parent) and library_file.exists()
    with build.one_process(kept.parent) if is_kept else contextlib.nullcontext():
        found = Choices.read(kept) if is_kept and build.is_own(kept) else None
        if found is None:
            found = Choices(_measure())
            logger.info("C++ kernels: %s", found.describe())
            if is_kept:
                with contextlib.suppress(OSError):
                    found.write(kept)
        native.choices = found


def _measure() -> dict[str, tuple[float, ...]]:
    """Return PyTorch's time over that of the C++ kernels for each operation and size."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        times[f"{name} products"] = tuple(_ratio(*_products(dtype, tokens)) for tokens in SIZES)
        times[f"{name} attention"] = tuple(_ratio(*_attention(dtype, tokens)) for tokens in SIZES)
    return times


def _ratio(native: Callable[[], object], pytorch: Callable[[], object]) -> float:
    """Time both alternately, each at its best."""
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for i, work in enumerate((native, pytorch)):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return round(best[1] / best[0], 2)


def _products(dtype: torch.dtype, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
    weight = pack_floats(torch.ones(2048, 1024, dtype=dtype))
    assert weight is not None
    x, out = torch.ones(tokens, 1024, dtype=dtype), torch.empty(tokens, 2048, dtype=dtype)
    return lambda: multiply(x, weight, None, out), lambda: multiply_by_pytorch(x, weight, None, out)


def _attention(dtype: torch.dtype, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Decoding of one token, else `tokens` of a prompt."""
    blocks = CONTEXT // BLOCK
    key, value = torch.ones(2, blocks, KV_HEADS, BLOCK, HEAD_DIM, dtype=dtype)
    table, one = torch.arange(blocks, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    context = PagedContext(key, value, table, one, one + CONTEXT)
    query, args = torch.ones(tokens, HEADS, HEAD_DIM, dtype=dtype), AttentionArgs(HEAD_DIM**-0.5)
    starts, out = torch.tensor([0, tokens], dtype=torch.int32), torch.empty_like(query)
    if tokens == 1:
        return (
            lambda: native_attention.attend(query, None, context, args, out),
            lambda: attention.paged_attention_decode(query, context, args, out=out),
        )
    return (
        lambda: native_attention.attend(query, starts, context, args, out),
        lambda: attention.paged_attention_prefill(query, starts, context, args, out=out),
    )
