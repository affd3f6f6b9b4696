"""Deterministic forms of recurrent layers on a CPU: one token after the other, each as it is decoded.

A prompt's tokens run over two blocks of their own, alternately, from which those that are held are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.cpu import kda as chunked_kda
from kernels.cpu import mamba2 as chunked_mamba2
from kernels.cpu import recurrent
from kernels.cpu.recurrent import Sequence, sequences
from kernels.data.state import DeltaStates, StateContext

# Computes the token at a place of the step with these states, as the only one of a step.
OneToken: TypeAlias = Callable[[slice, DeltaStates, StateContext], Tensor]


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.delta_rule`."""

    def one(at: slice, own: DeltaStates, its: StateContext) -> Tensor:
        return recurrent.delta_rule(qkv[at].clone(), gates[at].clone(), rate, bias, own, its)

    return _each_token(one, qkv.new_zeros(len(qkv), *states.updates.shape[2:]), states, context)


def kda(
    qkv: Tensor, beta: Tensor, forget: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    """See `kernels.reference.kda`."""

    def one(at: slice, own: DeltaStates, its: StateContext) -> Tensor:
        return chunked_kda.kda(qkv[at].clone(), beta[at].clone(), forget[at].clone(), rate, bias, own, its)

    return _each_token(one, qkv.new_zeros(len(qkv), *states.updates.shape[2:]), states, context)


def mamba2(
    xbc: Tensor,
    steps: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    limits: tuple[float, float],
    states: DeltaStates,
    context: StateContext,
) -> Tensor:
    """See `kernels.reference.mamba2`."""

    def one(at: slice, own: DeltaStates, its: StateContext) -> Tensor:
        return chunked_mamba2.mamba2(xbc[at].clone(), steps[at].clone(), rate, bias, skip, limits, own, its)

    return _each_token(one, xbc.new_zeros(len(xbc), *states.updates.shape[2:]), states, context)


def _each_token(one: OneToken, out: Tensor, states: DeltaStates, context: StateContext) -> Tensor:
    """Compute all tokens of a step into `out`, and store their states."""
    for sequence in sequences(context, len(out)):
        part, size = sequence.part, context.block_size
        if part.stop - part.start == 1:
            table = torch.tensor([sequence.table, sequence.table], dtype=torch.int32)
            out[part] = one(part, states, _context(table, sequence.end, size))
        else:
            _run(one, out, states, sequence, size)
    return out


def _run(one: OneToken, out: Tensor, states: DeltaStates, sequence: Sequence, size: int) -> None:
    """Compute the tokens of a sequence that has several."""
    part, first, end, table = sequence
    parts = states.before, states.keys, states.updates, states.decays
    own = DeltaStates(*(each.new_zeros(2, *each.shape[1:]) for each in parts))
    turns = (torch.arange(len(table), dtype=torch.int32) % 2).repeat(2, 1)
    if first:
        last = (first - 1) // size
        for mine, each in zip((own.before, own.keys, own.updates, own.decays), parts, strict=True):
            mine[last % 2] = each[table[last]]
    for position in range(first, end):
        at = slice(part.start + position - first, part.start + position - first + 1)
        out[at] = one(at, own, _context(turns, position + 1, size))
        index, slot = divmod(position, size)
        if (block := table[index]) < 0:
            continue
        if slot == 0:
            states.before[block] = own.before[index % 2]
        for mine, each in zip((own.keys, own.updates, own.decays), parts[1:], strict=True):
            each[block, slot] = mine[index % 2, slot]


def _context(tables: Tensor, end: int, size: int) -> StateContext:
    """Return the context of a step with one token, the last of `end`. tables: of its row, and one for padding."""
    zero, start = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    return StateContext(tables, zero, start, torch.tensor([end], dtype=torch.int32), None, size, only_decodes=True)
