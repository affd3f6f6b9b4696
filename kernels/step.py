"""From the one packed buffer that a step sends to the device, to the tensors that the model and the sampler read.

The packed buffer is int32. S is a segment's length (at least the number of sequences + 1), T the number of tokens:

    [0, S)      rows            the device row of each sequence
    [S, 2S)     context_lens    tokens in its context, this step's included; 0: a padding row
    [2S, 3S)    query_start     its first token in the step; one more entry closes the last
    [3S, 4S)    update_start    its first entry in the block updates; one more entry closes the last
    [4S, 5S)    update_at       where in its block table the updates go
    [5S, 5S+T)  token_ids       -1: the row's newest token, which only the device knows
    then        updates         block ids appended to block tables
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
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


def prepare_step(
    packed: Tensor, segment: int, num_seqs: int, num_tokens: int, block_size: int, state: RowState, out: StepTensors
) -> None:
    """Apply the block updates to `state` and fill the first `num_seqs` / `num_tokens` entries of `out`."""
    run = _prepare_triton if packed.is_cuda else _prepare_reference
    run(packed, segment, num_seqs, num_tokens, block_size, state, out)


def _prepare_reference(
    packed: Tensor, segment: int, num_seqs: int, num_tokens: int, block_size: int, state: RowState, out: StepTensors
) -> None:
    segments = packed[: 5 * segment].view(5, segment)
    rows, context_lens, query_start, update_start, update_at = (s[: num_seqs + 1].long() for s in segments)
    rows, context_lens, update_at = rows[:-1], context_lens[:-1], update_at[:-1]
    token_ids = packed[5 * segment : 5 * segment + num_tokens].long()
    updates = packed[5 * segment + num_tokens :]

    counts = update_start.diff()
    owner = torch.repeat_interleave(counts)
    index = torch.arange(len(owner)) - update_start[owner] + update_at[owner]
    state.block_tables[rows[owner], index] = updates[: len(owner)]

    lens = query_start.diff()
    seq = torch.repeat_interleave(lens)
    positions = torch.arange(num_tokens) - query_start[seq] + (context_lens - lens)[seq]
    blocks = state.block_tables[rows[seq], positions // block_size].long()
    real = context_lens[seq] > 0
    out.input_ids[:num_tokens] = torch.where(token_ids >= 0, token_ids, state.last_token[rows[seq]])
    out.positions[:num_tokens] = positions.clamp(min=0).int()
    out.slot_mapping[:num_tokens] = torch.where(real, blocks * block_size + positions % block_size, -1)
    out.last_index[:num_seqs] = query_start[1:] - 1
    out.rows[:num_seqs] = rows
    out.next_position[:num_seqs] = context_lens
    for name in ("temperature", "top_p", "min_p", "top_k", "seed"):
        getattr(out, name)[:num_seqs] = getattr(state, name)[rows]


@triton.jit(do_not_specialize=["segment", "num_tokens"])
def _prepare_kernel(
    packed, segment, num_tokens,
    block_tables, last_token, temperature, top_p, min_p, top_k, seed, stride_table,
    input_ids, positions, slot_mapping, last_index, out_rows, out_temperature, out_top_p, out_min_p, out_top_k, out_seed,
    next_position,
    BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(packed + i).to(tl.int64)
    context_len = tl.load(packed + segment + i)
    start = tl.load(packed + 2 * segment + i)
    end = tl.load(packed + 2 * segment + i + 1)
    update_start = tl.load(packed + 3 * segment + i)
    update_end = tl.load(packed + 3 * segment + i + 1)
    update_at = tl.load(packed + 4 * segment + i)
    table = block_tables + row * stride_table
    newest = tl.load(last_token + row)
    offs = tl.arange(0, CHUNK)

    updates = packed + 5 * segment + num_tokens
    for at in range(update_start, update_end, CHUNK):
        mask = at + offs < update_end
        tl.store(table + update_at + (at - update_start) + offs, tl.load(updates + at + offs, mask=mask), mask=mask)
    tl.debug_barrier()  # the table is read below by other threads of this program

    first_position = context_len - (end - start)
    for at in range(start, end, CHUNK):
        token = at + offs
        mask = token < end
        position = tl.maximum(first_position + token - start, 0)
        known = tl.load(packed + 5 * segment + token, mask=mask, other=0).to(tl.int64)
        block = tl.load(table + position // BLOCK_SIZE, mask=mask & (context_len > 0), other=0).to(tl.int64)
        slot = tl.where(context_len > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(input_ids + token, tl.where(known >= 0, known, newest), mask=mask)
        tl.store(positions + token, position, mask=mask)
        tl.store(slot_mapping + token, slot, mask=mask)

    tl.store(last_index + i, (end - 1).to(tl.int64))
    tl.store(out_rows + i, row)
    tl.store(next_position + i, context_len.to(tl.int64))
    tl.store(out_temperature + i, tl.load(temperature + row))
    tl.store(out_top_p + i, tl.load(top_p + row))
    tl.store(out_min_p + i, tl.load(min_p + row))
    tl.store(out_top_k + i, tl.load(top_k + row))
    tl.store(out_seed + i, tl.load(seed + row))


def _prepare_triton(
    packed: Tensor, segment: int, num_seqs: int, num_tokens: int, block_size: int, state: RowState, out: StepTensors
) -> None:
    _prepare_kernel[(num_seqs,)](
        packed, segment, num_tokens,
        state.block_tables, state.last_token, state.temperature, state.top_p, state.min_p, state.top_k, state.seed,
        state.block_tables.stride(0),
        out.input_ids, out.positions, out.slot_mapping, out.last_index, out.rows, out.temperature, out.top_p, out.min_p,
        out.top_k, out.seed, out.next_position,
        BLOCK_SIZE=block_size, CHUNK=256, num_warps=4,
    )  # fmt: skip
