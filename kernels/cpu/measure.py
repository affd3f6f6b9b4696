"""Measures once whether the C++ kernels or PyTorch are faster: see `choice`."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from kernels import reference
from kernels.cpu import attention, build, native_attention
from kernels.cpu.choice import MARGIN, SIZES, Choices, mode
from kernels.cpu.library import library
from kernels.cpu.matmul import multiply, multiply_by_pytorch
from kernels.cpu.packed_weight import pack_codes, pack_floats
from kernels.cpu.rotary import norm_rows
from kernels.data.attention import AttentionArgs, PagedContext
from kernels.data.forms import FORMS
from kernels.data.quantized_weight import QuantizedWeight

ROUNDS, ATTEMPTS = 3, 3
AGREEMENT = 1.25  # of two measurements, unless both choose the same
FEW, PER_SECOND = 10, 20  # interruptions by other processes that change no choice
GROUP = 128  # channels that share a scale
CONTEXT, BLOCK, HEADS, KV_HEADS, HEAD_DIM = 512, 16, 8, 2, 64

Both = tuple[Callable[[], object], Callable[[], object]]  # an operation by C++ and by PyTorch

logger = logging.getLogger("engine.kernels")


def choose(compiling: Callable[[int, int], None] = build.compiling) -> None:
    """Read the choice of this library and CPU, or measure it: about a second. RuntimeError: a deterministic form is
    wanted, and there is none.

    What a busy machine makes uncertain is not kept: the next start measures again. `compiling`: see `build.compiling`.
    """
    build.compiling = compiling
    native = library()
    if FORMS.deterministic:
        if native is None:
            raise RuntimeError(
                "deterministic needs the CPU's kernels in C++: "
                + ("unset QUIRE_CPU_KERNELS" if mode() == "pytorch" else "install a C++ compiler")
            )
        native.choices = Choices()  # PyTorch's GEMMs depend on the number of tokens
        return
    if native is None or mode() != "auto":
        return
    folder, name = build.cache_folder(), native.instruction_set
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept, is_kept = build.path(folder, name).with_suffix(".json"), build.is_own(folder) and build.is_built(name)
    with build.one_process(kept.parent) if is_kept else contextlib.nullcontext():
        found = Choices.read(kept) if is_kept and build.is_own(kept) else None
        if found is None:
            times, is_whole = _measure()
            found = Choices(times)
            if is_whole:
                logger.info("C++ kernels: %s", found.describe())
            else:
                logger.info("the machine is too busy to time the C++ kernels: they are used, the next start times them")
            if is_kept and is_whole:
                with contextlib.suppress(OSError):
                    found.write(kept)
        native.choices = found


def _measure() -> tuple[dict[str, tuple[float, ...]], bool]:
    """Return PyTorch's time over that of the C++ kernels for each operation and size, and whether these are all.

    Measuring ends where the machine is too busy for it.
    """
    operations: dict[str, Callable[[int], Both]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        operations |= {
            f"{name} products": partial(_products, dtype),
            f"{name} attention": partial(_attention, dtype),
            f"{name} norms": partial(_norms, dtype),
        }
    operations |= {"int8 products": partial(_products, "int8"), "int4 products": partial(_products, "int4")}
    times: dict[str, tuple[float, ...]] = {}
    start, interruptions = time.perf_counter(), _interruptions()
    for name, make in operations.items():
        ratios = []
        for tokens in SIZES:
            ratio = _ratio(*make(tokens))
            if ratio is None or _interruptions() - interruptions > FEW + (time.perf_counter() - start) * PER_SECOND:
                return times, False
            ratios.append(round(ratio, 2))
        times[name] = tuple(ratios)
    return times, True


def _interruptions() -> int:
    """Return how often other processes have taken a core from this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _ratio(native: Callable[[], object], pytorch: Callable[[], object]) -> float | None:
    """Time both alternately, each at its best, until two measurements agree or choose the same; None: none do."""
    native(), pytorch()
    ratio = _once(native, pytorch)
    for _ in range(ATTEMPTS):
        last, ratio = ratio, _once(native, pytorch)
        less, more = min(last, ratio), max(last, ratio)
        if more <= AGREEMENT * less or (less * MARGIN < 1) == (more * MARGIN < 1):
            return (last + ratio) / 2
    return None


def _once(native: Callable[[], object], pytorch: Callable[[], object]) -> float:
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for i, work in enumerate((native, pytorch)):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return best[1] / best[0]


def _products(kind: torch.dtype | Literal["int8", "int4"], tokens: int) -> Both:
    n, k = 2048, 1024
    if isinstance(kind, torch.dtype):
        dtype, weight = kind, pack_floats(torch.ones(n, k, dtype=kind))
    else:
        dtype, bits = torch.bfloat16, 8 if kind == "int8" else 4
        codes = torch.ones(n, k * bits // 8, dtype=torch.int8 if kind == "int8" else torch.uint8)
        weight = pack_codes(QuantizedWeight(kind, codes, torch.ones(n, k // GROUP), GROUP))
    assert weight is not None
    x, out = torch.ones(tokens, k, dtype=dtype), torch.empty(tokens, n, dtype=dtype)
    return lambda: multiply(x, weight, None, out), lambda: multiply_by_pytorch(x, weight, None, out)


def _norms(dtype: torch.dtype, tokens: int) -> Both:
    x, weight = torch.ones(tokens, 1024, dtype=dtype), torch.ones(1024, dtype=dtype)
    return lambda: norm_rows(x, weight, 1e-6), lambda: reference.rms_norm(x, weight, 1e-6)


def _attention(dtype: torch.dtype, tokens: int) -> Both:
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
