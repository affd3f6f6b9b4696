"""How kernels are launched: compiled side by side beforehand, and each before the one ahead of it is done.

Programmatic dependent launch (Hopper and later): a kernel starts while the one before it still runs. A kernel launched
with `launch_pdl=True` calls `launch_dependents` as soon as the next kernel may start taking free multiprocessors, and
`wait_for_inputs` before its first access to memory that an earlier kernel wrote, or that an earlier kernel may still read:
the wait ends when every kernel before it is done. Both are allowed, and do nothing, elsewhere in a stream of kernels
launched without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents as launch_dependents
from triton.language.extra.cuda import gdc_wait as wait_for_inputs
from triton.runtime.jit import JITFunction

__all__ = ["compiling_only", "launch_dependents", "pdl_options", "prefetch", "wait_for_inputs"]

MAX_COMPILE_THREADS = 16


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Kernels that are launched in here are compiled, side by side, and do not run; at the end all of them are ready.

    What they would have written stays as it is. A kernel that does not compile says so when it is launched again. For
    the start of a program: no other thread may launch anything meanwhile.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    num_threads = min(os.cpu_count() or 1, MAX_COMPILE_THREADS)
    try:
        with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            yield
    finally:
        JITFunction.run = run


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """What a launch on this device adds: the kernel's PDL constant, and the launch attribute where there is one."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def prefetch(pointer, num_bytes):
    """Ask for contiguous bytes (address and number multiples of 16) to be brought into L2; needs Hopper or later."""
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
        "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [pointer.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
