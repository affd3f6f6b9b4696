"""The delta rule and state-space layers over states in blocks, in Triton. See `kernels.reference`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels.data.capability import shared_memory
from kernels.data.state import DeltaStates, StateContext, StateSpace
from kernels.gpu.launch import cdiv, next_power_of_2
from kernels.triton import fixed_scan
from kernels.triton.chunk_states import solve_kernel
from kernels.triton.scan_decode import decode_kernel
from kernels.triton.state_pass import keep_kernel, pass_kernel, read_kernel

CHUNK = 64
DECODE_STATE = 8192  # numbers of a state in a program that decodes
DECODE_WARPS = 4
DECODE_HEADS, DECODE_STAGES = 1, 2  # heads of such a program, one after the other; pipeline depth of their loads
DECODE_OPTIONS: dict[str, Any] = {}  # of the compiler, such as `maxnreg`
SOLVE = {"BLOCK_V": 64, "num_warps": 4, "num_stages": 1}
STATES = {"num_warps": 4}
STAGES, WIDE_STAGES = 2, 1  # of a loop that loads 16 bits a number, and 32 with little shared memory
WIDE_BYTES = 200 << 10  # of shared memory, from which float32 takes STAGES
# Prompts with fewer channels of keys go token after token. With 16 channels in float32, and with 32 in bfloat16 in a
# step of 8,192 tokens, a chunk's kernels ended with an illegal memory access on an H200 (Triton 3.6). No published
# model has so few.
MIN_KEY = 64
OUTPUTS = {"num_warps": 8, "num_stages": 1}
STATES_V, OUTPUTS_V = 32, 64  # value channels of a program
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # of factors of products
WIDE = "tf32x3"  # precision of products of float32 activations
NARROW, EXACT = "tf32", "tf32"  # of 16 bits, and of the equations of their updates
EQUATIONS = "float32"  # type of these equations' factors; float16 is as exact and half as large
RARE = "ieee"  # of the states that blocks keep, which are few
KEEP = {"BLOCK_V": 32, "num_warps": 8, "num_stages": 1}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's inputs of a step: of the delta rule, or of a state-space layer, which has `skip`."""

    inputs: Tensor  # [T, W]
    gates: Tensor
    rate: Tensor
    bias: Tensor
    skip: Tensor | None
    limits: tuple[float, float]
    states: DeltaStates

    def __post_init__(self) -> None:
        s = self.states
        for each in (s.before, s.keys, s.updates, s.decays):
            assert each.is_contiguous()
        assert s.keys.dtype == self.inputs.dtype
        assert self.inputs.stride(1) == self.gates.stride(1) == 1

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants of all kernels."""
        (num_keys, key_dim), (num_values, value_dim) = self.states.keys.shape[2:], self.states.updates.shape[2:]
        return {
            "NUM_KEYS": num_keys, "NUM_VALUES": num_values, "DK": key_dim, "DV": value_dim,
            "DELTA": self.skip is None, "BLOCK_K": max(next_power_of_2(key_dim), 16),
        }  # fmt: skip

    def run(self, context: StateContext) -> Tensor:
        """Return the outputs [T, Hv, Dv], and store the states."""
        num_decodes = len(context.rows) if context.only_decodes else context.num_decodes
        out = self.inputs.new_empty(len(self.inputs), *self.states.updates.shape[2:])
        if num_decodes:
            self._decode(context, num_decodes, out)
        if num_decodes < len(context.rows):
            self._prefill(context, num_decodes, out)
        return out

    def _decode(self, context: StateContext, num_decodes: int, out: Tensor) -> None:
        c, s, sizes = context, self.states, self.sizes
        block_v = max(DECODE_STATE // sizes["BLOCK_K"], 16)
        block_v = min(block_v, max(next_power_of_2(sizes["DV"]), 16))
        heads = math.gcd(DECODE_HEADS, sizes["NUM_VALUES"])
        decode_kernel[(sizes["NUM_VALUES"] // heads, cdiv(sizes["DV"], block_v), num_decodes)](
            self.inputs, self.gates, self.rate, self.bias, self.rate if self.skip is None else self.skip,
            s.before, s.keys, s.updates, s.decays, out,
            c.block_tables, c.rows, c.query_start, c.context_lens, len(c.block_tables), *self.limits,
            self.inputs.stride(0), self.gates.stride(0), c.block_tables.stride(0),
            **sizes, SIZE=c.block_size, BLOCK_T=max(next_power_of_2(c.block_size), 16), BLOCK_V=block_v,
            HEADS=heads, STAGES=DECODE_STAGES, num_warps=DECODE_WARPS, **DECODE_OPTIONS,
        )  # fmt: skip

    def _prefill(self, context: StateContext, num_decodes: int, out: Tensor) -> None:
        c, s, sizes, x = context, self.states, self.sizes, self.inputs
        num_heads, key_dim, value_dim = sizes["NUM_VALUES"], sizes["DK"], sizes["DV"]
        num_chunks, is_delta, wide = cdiv(len(x), CHUNK), self.skip is None, x.dtype == torch.float32
        num_seqs = len(c.rows) - num_decodes
        num_padded, of_v = num_chunks * CHUNK, max(next_power_of_2(value_dim), 16)
        skip, operands = self.rate if self.skip is None else self.skip, WIDE if wide else NARROW
        sizes |= {"CHUNK": CHUNK, "TYPE": TYPES[x.dtype], "PRECISION": operands}
        scalars = x.new_empty(5, num_heads, num_padded, dtype=torch.float32)
        seen = x.new_empty(num_chunks, num_heads, CHUNK, CHUNK)
        weights = x.new_empty(len(x) if is_delta else 0, num_heads, key_dim)
        solved = x.new_empty(len(x), num_heads, value_dim)
        starts = x.new_empty(num_chunks + num_seqs, num_heads, key_dim, value_dim)
        assert c.sequence_of is not None
        solve_kernel[(num_chunks, num_heads)](
            x, self.gates, self.rate, self.bias, c.rows, c.query_start, c.sequence_of, len(c.block_tables), len(x),
            num_padded, scalars, seen, weights, solved, *self.limits, x.stride(0), self.gates.stride(0),
            **sizes, EXACT=WIDE if wide else EXACT, EQUATIONS=tl.float32 if wide else getattr(tl, EQUATIONS), **SOLVE,
        )  # fmt: skip
        sizes |= {"SIZE": c.block_size, "BLOCK_T": max(next_power_of_2(c.block_size), 16)}
        block_v = min(of_v, STATES_V)
        stages = WIDE_STAGES if wide and shared_memory(x.device) < WIDE_BYTES else STAGES
        entries, rare = next_power_of_2(cdiv(CHUNK, c.block_size)), WIDE if wide else RARE
        pass_kernel[(num_heads, cdiv(value_dim, block_v), num_seqs)](
            x, scalars, weights, solved, starts, s.before, s.keys, s.updates, s.decays,
            c.block_tables, c.rows, c.query_start, c.context_lens, len(c.block_tables), num_decodes, num_padded,
            x.stride(0), c.block_tables.stride(0),
            **sizes, BLOCK_V=block_v, ENTRIES=entries, RARE=rare, STAGES=stages, **STATES,
        )  # fmt: skip
        own = {k: v for k, v in sizes.items() if k not in ("TYPE", "PRECISION")}
        keep_kernel[(num_chunks, num_heads)](
            x, scalars, solved, s.before, s.keys, s.updates, s.decays,
            c.block_tables, c.rows, c.query_start, c.context_lens, c.sequence_of,
            len(c.block_tables), num_decodes, len(x), num_padded, x.stride(0), c.block_tables.stride(0),
            **own, ENTRIES=entries, RARE=WIDE, **KEEP,
        )  # fmt: skip
        own = {k: v for k, v in sizes.items() if k not in ("BLOCK_T", "SIZE")}
        block_v = min(of_v, OUTPUTS_V)
        read_kernel[(num_chunks, num_heads, cdiv(value_dim, block_v))](
            x, skip, scalars, seen, solved, starts, out, c.rows, c.query_start, c.sequence_of,
            len(c.block_tables), num_decodes, len(x), num_padded, x.stride(0), **own, BLOCK_V=block_v, **OUTPUTS,
        )  # fmt: skip


def _goes_by_tokens(states: DeltaStates, context: StateContext) -> bool:
    return states.keys.shape[3] < MIN_KEY and not context.only_decodes


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.delta_rule`."""
    if _goes_by_tokens(states, context):
        return fixed_scan.delta_rule(qkv, gates, rate, bias, states, context)
    return _Layer(qkv, gates, rate, bias, None, (0.0, math.inf), states).run(context)


def mamba2(xbc: Tensor, steps: Tensor, layer: StateSpace, states: DeltaStates, context: StateContext) -> Tensor:
    """See `kernels.reference.mamba2`."""
    if _goes_by_tokens(states, context):
        return fixed_scan.mamba2(xbc, steps, layer, states, context)
    return _Layer(xbc, steps, *layer, states).run(context)
