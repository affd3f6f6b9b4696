"""What a step computes from, unpacked from its packed buffer, and the work map of decode attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import RowState, StepTensors
from kernels.plan import DecodePlan


def prepare_step(
    packed: Tensor, segment: int, num_seqs: int, num_tokens: int, block_size: int, state: RowState, out: StepTensors
) -> None:
    """Apply the block updates to `state` and fill the first `num_seqs` / `num_tokens` entries of `out`. See `kernels.layout`."""
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


def plan_decode(context_lens: Tensor, rows: Tensor, plan: DecodePlan) -> None:
    """Write the work map of a step's decoding sequences into `plan`: context_lens, rows [B] int32. See `DecodePlan`.

    On a GPU at least one kernel that was launched without programmatic dependent launch must stand between this and the
    first attention: attention reads the map, the lengths, the rows and the block tables ahead of the kernel before it.
    """
    num_programs = len(plan.work)
    lens = context_lens.long()
    first_tile = (lens - plan.window).clamp(min=0) // plan.tile if plan.window else 0
    tiles = ((lens + plan.tile - 1) // plan.tile - first_tile) * plan.num_kv_heads
    ends = tiles.cumsum(0)
    total = int(tiles.sum())
    per_program = max(-(-total // num_programs), plan.min_tiles)
    first = torch.arange(num_programs) * per_program
    seq = torch.searchsorted(ends, first, right=True)
    last = seq.clamp(max=len(rows) - 1)
    columns = (
        (total - first).clamp(min=0, max=per_program), torch.full_like(first, per_program), last,
        first - torch.cat([ends.new_zeros(1), ends])[seq], context_lens[last], rows[last],
    )  # fmt: skip
    plan.work[:, : len(columns)] = torch.stack([c.int() for c in columns], 1)
