"""Deterministic forms of recurrent layers on a CPU: one token after the other, each as it is decoded.

The kernel in C++ gives a token the same bytes in any step, unless states are rounded between blocks. Else a prompt's
tokens run over two blocks of their own, alternately, from which those that are held are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import Tensor

from kernels.cpu import kda as chunked_kda
from kernels.cpu import mamba2 as chunked_mamba2
from kernels.cpu import recurrent
from kernels.cpu.recurrent import Sequence, sequences
from kernels.data.state import DeltaStates, StateContext

P = ParamSpec("P")

# Computes the token at a place of the step with these states, as the only one of a step.
OneToken: TypeAlias = Callable[[slice, DeltaStates, StateContext], Tensor]


def _token_by_token(
    layer: Callable[P, Tensor], native: Callable[P, Tensor | None], num_inputs: int
) -> Callable[P, Tensor]:
    """Return a recurrent layer that computes one token at a time, where its kernel `native` is not to be used.

    Its first `num_inputs` arguments [T, ...] have a row for each token, the last two are states and context.
    """

    @functools.wraps(layer)
    def compute(*args: P.args, **options: P.kwargs) -> Tensor:
        every: tuple[Any, ...] = args
        is_exact = every[-2].before.dtype == torch.float32
        if is_exact and (found := native(*args, **options)) is not None:
            return found
        inputs, others, (states, context) = every[:num_inputs], every[num_inputs:-2], every[-2:]
        untyped: Callable[..., Tensor] = layer

        def one(at: slice, own: DeltaStates, its: StateContext) -> Tensor:
            return untyped(*(each[at].clone() for each in inputs), *others, own, its, **options)

        out = inputs[0].new_zeros(len(inputs[0]), *states.updates.shape[2:])
        return _each_token(one, out, states, context)

    return compute


delta_rule = _token_by_token(recurrent.delta_rule, recurrent.native_delta_rule, 2)
kda = _token_by_token(chunked_kda.kda, chunked_kda.native_kda, 3)
mamba2 = _token_by_token(chunked_mamba2.mamba2, chunked_mamba2.native_mamba2, 2)


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
