"""The operations that a decoder is made of: tensors in, tensors out. Knows nothing above them.

Each has a Triton kernel for GPUs and a torch twin of the same signature in `kernels.reference`, where the docstrings
are. The first argument's device picks. Triton is imported by the first call on a GPU: a machine without one needs none.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

from kernels import reference
from kernels.plan import FEW_SEQS as FEW_SEQS
from kernels.plan import DecodePlan as DecodePlan
from kernels.plan import make_prefill_tiles as make_prefill_tiles
from kernels.plan import prefill_tile_queries as prefill_tile_queries
from kernels.reference import Part as Part

P = ParamSpec("P")
R = TypeVar("R")


def _by_device(twin: Callable[P, R], module: str) -> Callable[P, R]:
    """`twin` for tensors on the CPU; for those on a GPU the function of that name in `kernels.<module>`."""
    kernel: Callable[P, R] | None = None

    @functools.wraps(twin)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal kernel
        if not args[0].is_cuda:  # type: ignore[attr-defined]
            return twin(*args, **kwargs)
        if kernel is None:
            kernel = getattr(importlib.import_module(f"kernels.{module}"), twin.__name__)
        return kernel(*args, **kwargs)

    return operation


rms_norm = _by_device(reference.rms_norm, "norm")
add_rms_norm = _by_device(reference.add_rms_norm, "norm")
silu_and_mul = _by_device(reference.silu_and_mul, "activation")
pack_weight = reference.pack_weight
linear = _by_device(reference.linear, "matmul")
linear_add = _by_device(reference.linear_add, "matmul")
norm_linear = _by_device(reference.norm_linear, "matmul")
norm_swiglu = _by_device(reference.norm_swiglu, "matmul")
rope_and_store = _by_device(reference.rope_and_store, "rotary")
store_kv = _by_device(reference.store_kv, "kv_cache")
paged_attention_decode = _by_device(reference.paged_attention_decode, "attention_decode")
paged_attention_prefill = _by_device(reference.paged_attention_prefill, "attention_prefill")
mask_logits = _by_device(reference.mask_logits, "sampling")
sample = _by_device(reference.sample, "sampling")
sampling_thresholds = _by_device(reference.sampling_thresholds, "thresholds")
random_bits = reference.random_bits
token_logprobs = reference.token_logprobs
prepare_step = _by_device(reference.prepare_step, "prepare")
plan_decode = _by_device(reference.plan_decode, "attention_decode")


def compiling_only() -> AbstractContextManager[None]:
    """See `kernels.launch.compiling_only`. Needs Triton."""
    context: AbstractContextManager[None] = importlib.import_module("kernels.launch").compiling_only()
    return context
