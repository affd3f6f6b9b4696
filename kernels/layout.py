"""What lies where in memory: the device rows, the one packed buffer that a step sends, the tensors that are made of both.

The packed buffer is int32. S is a segment's length (at least the number of sequences + 1), G the number of cache groups,
T the number of tokens:

    [0, S)      rows            the device row of each sequence; the last row is for padding
    [S, 2S)     query_start     its first token in the step; one more entry closes the last
    then, for each cache group
    [.., +S)    update_start    its first entry in the block updates; one more entry closes the last
    [.., +S)    update_at       where in its block table the updates go
    then        token_ids       T of them; -1: the row's newest token, which only the device knows
    then        updates         block ids appended to block tables
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Columns of a row's record. Floats are stored as the bits of a float32.
NUM_COMPUTED, LAST_TOKEN, SEED, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(7)
NUM_COLUMNS = 8  # a record is 64 bytes


@dataclass(frozen=True, slots=True)
class RowState:
    """What the device remembers of each of R rows from step to step. The last row is for padding."""

    records: Tensor  # [R, NUM_COLUMNS] int64
    block_tables: Tensor  # [G, R, max_blocks] int32

    @classmethod
    def allocate(cls, num_rows: int, num_groups: int, max_blocks: int, device: torch.device) -> RowState:
        records = torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int64, device=device)
        return cls(records, torch.zeros(num_groups, num_rows, max_blocks, dtype=torch.int32, device=device))

    @property
    def num_computed(self) -> Tensor:
        """[R] int64, a view: tokens whose KV the steps launched so far compute."""
        return self.records[:, NUM_COMPUTED]

    @property
    def last_token(self) -> Tensor:
        """[R] int64, a view: the newest token, whose KV is not computed yet."""
        return self.records[:, LAST_TOKEN]

    @property
    def seed(self) -> Tensor:
        """[R] int64, a view."""
        return self.records[:, SEED]

    def floats(self, column: int) -> Tensor:
        """[R] float32, a view of a column that holds the bits of floats."""
        return self.records.view(torch.float32)[:, 2 * column]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What one step computes from. Tokens: the first three; sequences: the rest."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [G, T] int64: where each token's K and V go in each cache group; -1: nowhere
    last_index: Tensor  # [B] int64: each sequence's last token in the step
    rows: Tensor  # [B] int64
    context_lens: Tensor  # [B] int32: tokens in the context, the step's included; 0: a padding row
    temperature: Tensor  # [B] float32
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    top_k: Tensor  # [B] int32
    seed: Tensor  # [B] int64
    next_position: Tensor  # [B] int64: the position of the token to be sampled

    @classmethod
    def allocate(cls, num_seqs: int, num_tokens: int, num_groups: int, device: torch.device) -> StepTensors:
        def zeros(n: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return cls(
            zeros(num_tokens, i64), zeros(num_tokens, i32),
            torch.zeros(num_groups, num_tokens, dtype=i64, device=device),
            zeros(num_seqs, i64), zeros(num_seqs, i64), zeros(num_seqs, i32), zeros(num_seqs, f32), zeros(num_seqs, f32),
            zeros(num_seqs, f32), zeros(num_seqs, i32), zeros(num_seqs, i64), zeros(num_seqs, i64),
        )  # fmt: skip
