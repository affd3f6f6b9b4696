"""Memory layout of a step: device rows, the packed buffer that a step sends, and the tensors computed from both.

The packed buffer is int32. S is the length of a segment (at least the number of sequences + 1), G the number of cache
groups, T the number of tokens:

    [0, S)      rows            device row of each sequence; the last row is for padding
    [S, 2S)     query_start     first token of each sequence in the step, and the end of the last sequence
    then, for each cache group
    [.., +S)    update_start    first entry of each sequence in the block updates, and the end of the last one
    [.., +S)    update_at       position in the block table where the updates go
    then        token_ids       T entries; -1: the row's newest token, which only the device knows
    then        updates         block ids to append to block tables

In a step with `repeats`, successive sequences of one token each may be of the same row: its newest token, then its
drafts, at successive positions. Such a row's number of computed tokens stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_REPEATS = 32  # sequences of a row after its first one
# Columns of a row's record. Floats are stored as the bits of a float32.
NUM_COMPUTED, LAST_TOKEN, SEED, TOP_K, TEMPERATURE, TOP_P, MIN_P, ADAPTER = range(8)  # ADAPTER: slot + 1; 0: none
NUM_COLUMNS = 8  # a record is 64 bytes
# The higher half of TOP_K is the row's shift: what its positions have more than its indices, since an image takes fewer
# positions than tokens.
SHIFT_BITS = 32


@dataclass(frozen=True, slots=True)
class RowState:
    """State of each of R rows that the device keeps between steps. The last row is for padding."""

    records: Tensor  # [R, NUM_COLUMNS] int64
    block_tables: Tensor  # [G, R, max_blocks] int32

    @classmethod
    def allocate(cls, num_rows: int, num_groups: int, max_blocks: int, device: torch.device) -> RowState:
        records = torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int64, device=device)
        return cls(records, torch.zeros(num_groups, num_rows, max_blocks, dtype=torch.int32, device=device))

    @property
    def num_computed(self) -> Tensor:
        """[R] int64, a view: number of tokens whose KV is computed by the steps launched so far."""
        return self.records[:, NUM_COMPUTED]

    @property
    def last_token(self) -> Tensor:
        """[R] int64, a view: the newest token, whose KV has not been computed."""
        return self.records[:, LAST_TOKEN]

    @property
    def seed(self) -> Tensor:
        """[R] int64, a view."""
        return self.records[:, SEED]

    def floats(self, column: int) -> Tensor:
        """[R] float32, a view of a column with the bits of floats."""
        return self.records.view(torch.float32)[:, 2 * column]


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens to sample, each after a token of the step.

    `kernels.prepare_step` fills one for each sequence, after its last token: S = B. A step with drafts spreads them
    over more, see `InputBatch.expand_samples`.
    """

    token_index: Tensor  # [S] int64: the token before it, in the step
    next_position: Tensor  # [S] int64: position of the token to sample; 0: of a padding row
    rows: Tensor  # [S] int64: device row
    seed: Tensor  # [S] int64
    temperature: Tensor  # [S] float32
    top_p: Tensor  # [S] float32
    min_p: Tensor  # [S] float32
    top_k: Tensor  # [S] int32

    @classmethod
    def allocate(cls, num_samples: int, device: torch.device) -> Samples:
        i64, f32 = torch.int64, torch.float32
        dtypes = (i64, i64, i64, i64, f32, f32, f32, torch.int32)
        return cls(*(torch.zeros(num_samples, dtype=dtype, device=device) for dtype in dtypes))


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of one step with T tokens and B sequences."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [G, T] int64: slot of each token's K and V in each cache group; -1: not stored
    context_lens: Tensor  # [B] int32: context length including the step's tokens; 0: a padding row
    samples: Samples

    @classmethod
    def allocate(
        cls, num_seqs: int, num_tokens: int, num_groups: int, device: torch.device, num_samples: int = 0
    ) -> StepTensors:
        """`num_samples`: if more than `num_seqs`."""
        return cls(
            torch.zeros(num_tokens, dtype=torch.int64, device=device),
            torch.zeros(num_tokens, dtype=torch.int32, device=device),
            torch.zeros(num_groups, num_tokens, dtype=torch.int64, device=device),
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
            Samples.allocate(max(num_samples, num_seqs), device),
        )
