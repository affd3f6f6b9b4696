"""The states of a step's sequences, as recurrent layers find them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateContext:
    """A step of recurrent layers: B sequences, T tokens.

    A sequence's tokens continue from the state in the block of the token before them. Entry i of a block table is the
    block of the tokens from i · block_size on: it holds the state before the first of these, and what each of them has
    changed. Tokens with an entry below 0 are not stored. All states are read before any is written, and the block that
    a sequence continues from is written only by this sequence.
    """

    block_tables: Tensor  # [R, max_blocks] int32: of each device row; the last row is for padding
    rows: Tensor  # [B] int32
    query_start: Tensor  # [B + 1] int32: sequence i has the tokens [query_start[i], query_start[i + 1])
    context_lens: Tensor  # [B] int32: number of tokens including the step's; arbitrary in padding rows
    sequence_of: Tensor | None  # [T] int32: the sequence of each token, the last one where none has it; None on CPUs
    block_size: int
    only_decodes: bool = False  # each sequence has exactly one token
    num_decodes: int = 0  # each of these first sequences has exactly one token: that of its index

    @classmethod
    def of_step(
        cls,
        block_tables: Tensor,
        rows: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        num_tokens: int,
        block_size: int,
        *,
        only_decodes: bool = False,
        num_decodes: int = 0,
        finds_sequences: bool = True,
    ) -> StateContext:
        """Create the context of a step with T = `num_tokens`, on the device of its tensors, without waiting for it.

        finds_sequences: find `sequence_of`, which kernels of CPUs do not read.
        """
        if not finds_sequences:
            return cls(block_tables, rows, query_start, context_lens, None, block_size, only_decodes, num_decodes)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
        sequence_of = tokens
        if not only_decodes:
            sequence_of = torch.searchsorted(query_start[1:-1].contiguous(), tokens, right=True, out_int32=True)
        sequences = block_tables, rows, query_start, context_lens, sequence_of
        return cls(*sequences, block_size, only_decodes, num_decodes)


class StateSpace(NamedTuple):
    """Parameters of a state-space layer of H heads, see `kernels.reference.mamba2`."""

    rate: Tensor  # [H] float32
    bias: Tensor  # [H] float32
    skip: Tensor  # [H] float32
    limits: tuple[float, float]  # of step sizes


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """Blocks of the gated delta rule's states, of Hk key heads and Hv value heads.

    The state after a token of a block is e^c S + Σ e^(c - c') k δᵀ: S is the state before the block, c the sum of the
    token's and all earlier g of the block, and the sum is over these tokens' keys k, updates δ and sums c'.
    """

    before: Tensor  # [num_blocks, Hv, Dk, Dv] float32, or rounded to 16 bits: S
    keys: Tensor  # [num_blocks, block_size, Hk, Dk], in the dtype of activations: k times any length
    updates: Tensor  # [num_blocks, block_size, Hv, Dv] float32: δ
    decays: Tensor  # [num_blocks, block_size, Hv] float32: c; or of channels [num_blocks, block_size, Hv, Dk]
