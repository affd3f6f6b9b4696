"""Recurrent layers with a matrix as state, by the CPU's own kernel: one call for a layer of a step, so that steps can
be captured.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import library
from kernels.data.state import DeltaStates, StateContext

DELTA, STATE_SPACE, CHANNELS = range(3)  # `Kind` in scan.cpp
MOST_TOKENS = 256  # of a block: each sees those before it one by one


class _Struct(ctypes.Structure):
    """`Scan` in scan.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "strength", "step", "rate", "bias", "skip")),
        *((name, ctypes.c_void_p) for name in ("before", "keys", "updates", "decays", "out")),
        *((name, ctypes.c_void_p) for name in ("tables", "rows", "query_start", "context_lens")),
        *((name, ctypes.c_int64) for name in ("seqs", "tokens", "x_stride", "strength_stride", "step_stride")),
        *((name, ctypes.c_int64) for name in ("query_at", "keys_at", "values_at", "num_rows", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("block_size", "key_heads", "heads", "key_dim", "value_dim")),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("kind", "is_bf16", "rounds_states")),
    )


@dataclass(frozen=True, slots=True)
class Gates:
    """Inputs of a layer beside queries, keys and values: strengths of updates, and sizes of steps."""

    kind: int
    step: Tensor  # [T, heads], or of channels [T, heads · key_dim]
    rate: Tensor  # [heads] float32
    bias: Tensor  # as a row of `step`, float32
    strength: Tensor | None = None  # [T, heads]; None of state-space layers
    skip: Tensor | None = None  # [heads] float32, of state-space layers
    limits: tuple[float, float] = (0.0, math.inf)  # of step sizes

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.strength, self.step, self.rate, self.bias, self.skip


def native_scan(
    x: Tensor, columns: tuple[int, int, int], gates: Gates, states: DeltaStates, context: StateContext
) -> Tensor | None:
    """Compute `delta_rule`, `mamba2` or `kda` in C++; None: there is no kernel for these tensors.

    x [T, n]; columns: the first of its queries, keys and values.
    """
    native, c = library(), context
    if native is None or not _is_native(x, gates, states, context):
        return None
    num_heads, key_dim, value_dim = states.before.shape[1:]
    out = x.new_empty(len(x), num_heads, value_dim)
    strength, step = gates.strength, gates.step
    parts = states.before, states.keys, states.updates, states.decays
    tensors = (x, *gates.tensors, *parts, out, c.block_tables, c.rows, c.query_start, c.context_lens)
    struct = _Struct(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        len(c.rows), len(x), x.stride(0), 0 if strength is None else strength.stride(0), step.stride(0), *columns,
        *c.block_tables.shape, c.block_size, states.keys.shape[2], num_heads, key_dim, value_dim, *gates.limits,
        gates.kind, x.dtype == torch.bfloat16, states.before.dtype == torch.bfloat16,
    )  # fmt: skip
    native.call("quire_scan", struct, tensors)
    return out


def _is_native(x: Tensor, gates: Gates, states: DeltaStates, context: StateContext) -> bool:
    c, inputs = context, [each for each in (x, gates.strength, gates.step) if each is not None]
    floats = [each for each in (gates.rate, gates.bias, gates.skip, states.updates, states.decays) if each is not None]
    whole = (*floats, states.before, states.keys, c.block_tables, c.rows, c.query_start, c.context_lens)
    return (
        c.block_size <= MOST_TOKENS
        and x.dtype in (torch.float32, torch.bfloat16)
        and states.before.dtype in (torch.float32, torch.bfloat16)
        and states.keys.dtype == x.dtype
        and all(each.dtype == x.dtype and each.stride(1) == 1 for each in inputs)
        and all(each.dtype == torch.float32 for each in floats)
        and all(each.dtype == torch.int32 for each in (c.block_tables, c.rows, c.query_start, c.context_lens))
        and all(each.is_contiguous() for each in whole)
    )
