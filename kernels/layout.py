"""From the one packed buffer that a step sends to the device, to the tensors that the model and the sampler read.

The packed buffer is int32. S is a segment's length (at least the number of sequences + 1), T the number of tokens:

    [0, S)      rows            the device row of each sequence
    [S, 2S)     context_lens    tokens in its context, this step's included; 0: a padding row
    [2S, 3S)    query_start     its first token in the step; one more entry closes the last
    [3S, 4S)    update_start    its first entry in the block updates; one more entry closes the last
    [4S, 5S)    update_at       where in its block table the updates go
    [5S, 5S+T)  token_ids       -1: the row's newest token, which only the device has
    then        updates         block ids appended to block tables
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowState:
    """What the device remembers of each row from step to step. The last row is the padding row."""

    block_tables: Tensor  # [R, max_blocks] int32
    last_token: Tensor  # [R] int64
    temperature: Tensor  # [R] float32
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    top_k: Tensor  # [R] int32
    seed: Tensor  # [R] int64

    @classmethod
    def allocate(cls, num_rows: int, max_blocks: int, device: torch.device) -> RowState:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            block_tables=zeros(num_rows, max_blocks, dtype=torch.int32),
            last_token=zeros(num_rows, dtype=torch.int64),
            temperature=zeros(num_rows, dtype=torch.float32),
            top_p=torch.ones(num_rows, dtype=torch.float32, device=device),
            min_p=zeros(num_rows, dtype=torch.float32),
            top_k=zeros(num_rows, dtype=torch.int32),
            seed=zeros(num_rows, dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What one step computes from. Tokens: the first three; sequences: the rest."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int64
    last_index: Tensor  # [B] int64: each sequence's last token in the step
    rows: Tensor  # [B] int64
    temperature: Tensor  # [B] float32
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    top_k: Tensor  # [B] int32
    seed: Tensor  # [B] int64
    next_position: Tensor  # [B] int64: the position of the token to be sampled

    @classmethod
    def allocate(cls, num_seqs: int, num_tokens: int, device: torch.device) -> StepTensors:
        def zeros(n: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return cls(
            zeros(num_tokens, i64), zeros(num_tokens, i32), zeros(num_tokens, i64),
            zeros(num_seqs, i64), zeros(num_seqs, i64), zeros(num_seqs, f32), zeros(num_seqs, f32), zeros(num_seqs, f32),
            zeros(num_seqs, i32), zeros(num_seqs, i64), zeros(num_seqs, i64),
        )  # fmt: skip
