"""Kernel launch with programmatic dependent launch, and arithmetic of grids.

With programmatic dependent launch (Hopper and later) a kernel starts while the one before it still runs. A kernel
launched with `launch_pdl=True` calls `launch_dependents` as soon as the next kernel may start on free multiprocessors,
and `wait_for_inputs` before it first touches memory that an earlier kernel writes or reads: the wait ends when all
earlier kernels are done. In a kernel launched without it both do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents as launch_dependents
from triton.language.extra.cuda import gdc_wait as wait_for_inputs

from kernels.data.capability import compute_capability

__all__ = [
    "EARLY", "cdiv", "launch_dependents", "next_power_of_2", "pdl_options",
    "prefer_shared_memory", "prefetch", "prefetch_lines", "wait_for_inputs",
]  # fmt: skip

# For loads, before `wait_for_inputs`, of what an earlier kernel wrote and the one before this has waited for: from L2,
# since a multiprocessor's own cache may still hold what was there in the layer before.
EARLY = tl.constexpr(".cg")
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Of Triton's own, which kernels can call, too, one call takes as long as half a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Options to add to each launch on this device: the kernel's constant PDL, and `launch_pdl` where it is
    supported.
    """
    if device.type == "cuda" and compute_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


_preferring: set[int] = set()  # functions whose carveout is set


def prefer_shared_memory(launched: CompiledKernel | None) -> None:
    """Let a kernel run with the largest carveout of shared memory from its next launch on, though it needs little.

    A multiprocessor changes its carveout only when it is idle. So while a kernel with a small one runs, the next kernel
    could not start if it needs more, which is what dependent launch is for. The L1 cache becomes small, which slows
    kernels with many loads in flight down. `launched`: what a launch returned.
    """
    function = launched.function if isinstance(launched, CompiledKernel) else None
    if function is not None and function not in _preferring:
        _preferring.add(function)
        with contextlib.suppress(OSError):  # not NVIDIA's driver
            ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, 100)


@triton.jit
def prefetch(pointer, num_bytes):
    """Prefetch contiguous bytes, address and number multiples of 16, into L2. Needs Hopper or later."""
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
        "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [pointer.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_lines(pointers):
    """Prefetch the lines of 128 bytes at pointers into L2."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
