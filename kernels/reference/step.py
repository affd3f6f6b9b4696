"""Step tensors, unpacked from a step's packed buffer, and the work map of decode attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.data.layout import MIN_P, SHIFT_BITS, TEMPERATURE, TOP_K, TOP_P, RowState, StepTensors
from kernels.data.plan import MIN_MEMBERS, MIN_SHARED, DecodePlan


def prepare_step(
    packed: Tensor,
    segment: int,
    num_seqs: int,
    num_tokens: int,
    block_size: int,
    state: RowState,
    out: StepTensors,
    repeats: bool = False,
) -> None:
    """Unpack a step: append the block updates to block tables, advance each row by its tokens, and fill the entries of
    `num_seqs` sequences, their samples and `num_tokens` tokens of `out`. See `kernels.data.layout`, also for `repeats`.
    """
    num_groups, num_rows = state.block_tables.shape[:2]
    tokens_at = (2 + 2 * num_groups) * segment
    head = packed[:tokens_at].view(-1, segment)[:, : num_seqs + 1].long()
    rows, query_start = head[0, :-1], head[1]
    token_ids = packed[tokens_at : tokens_at + num_tokens].long()
    updates = packed[tokens_at + num_tokens :]

    lens = query_start.diff()
    real = rows < num_rows - 1
    computed = state.num_computed[rows]
    advances = real
    if repeats:
        at = torch.arange(num_seqs)
        is_first = torch.cat([real.new_ones(min(num_seqs, 1)), rows[1:] != rows[:-1]])
        computed = computed + at - torch.where(is_first, at, 0).cummax(0).values
        is_last = torch.cat([is_first[1:], is_first.new_ones(min(num_seqs, 1))])
        advances = real & is_first & is_last
    context_lens = torch.where(real, computed + lens, 0)
    state.num_computed[rows[advances]] = context_lens[advances]

    seq = torch.repeat_interleave(lens)
    positions = torch.where(real, computed, 0)[seq] + torch.arange(num_tokens) - query_start[seq]
    for group, table in enumerate(state.block_tables):
        update_start, update_at = head[2 + 2 * group], head[3 + 2 * group]
        owner = torch.repeat_interleave(update_start.diff())
        index = torch.arange(int(update_start[0]), int(update_start[-1]))
        table[rows[owner], index - update_start[owner] + update_at[owner]] = updates[index]
        blocks = table[rows[seq], positions // block_size].long()
        slots = torch.where(real[seq], blocks * block_size + positions % block_size, -1)
        out.slot_mapping[group, :num_tokens] = slots

    newest = state.last_token[rows[seq]].clamp(min=0)  # below 0: the sampler found a fault
    out.input_ids[:num_tokens] = torch.where(token_ids >= 0, token_ids, newest)
    shifts = torch.where(real, state.records[rows, TOP_K] >> SHIFT_BITS, 0)
    out.positions[:num_tokens] = (positions + shifts[seq]).int()
    out.context_lens[:num_seqs] = context_lens.int()

    samples = out.samples
    samples.token_index[:num_seqs] = query_start[1:] - 1
    samples.next_position[:num_seqs] = context_lens
    samples.rows[:num_seqs] = rows
    samples.seed[:num_seqs] = state.seed[rows]
    samples.temperature[:num_seqs] = state.floats(TEMPERATURE)[rows]
    samples.top_p[:num_seqs] = state.floats(TOP_P)[rows]
    samples.min_p[:num_seqs] = state.floats(MIN_P)[rows]
    samples.top_k[:num_seqs] = (state.records[rows, TOP_K] & ((1 << SHIFT_BITS) - 1)).int()


def embedding(table: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """table [V, n], ids [T] int64 -> rows of the table [T, n].

    The table has the rows of the ids [first, first + V); other ids give zeros.
    """
    rows = ids - first
    elsewhere = (rows < 0) | (rows >= len(table))
    return F.embedding(rows.masked_fill_(elsewhere, 0), table).masked_fill_(elsewhere.unsqueeze(1), 0)


def plan_prefix(context_lens: Tensor, rows: Tensor, block_tables: Tensor, page: int, plan: DecodePlan) -> None:
    """Write the prefixes that sequences have in common into `plan.prefix`, before `plan_decode`.

    context_lens, rows [B] int32: of a step's decoding sequences; block_tables [R, max_blocks] int32: of blocks of
    `page` tokens. Sequences are in a group if the same block holds their token `MIN_SHARED`. Of groups of `MIN_MEMBERS`
    and more, the common prefix is the longest of whole blocks, without any sequence's newest token.
    """
    prefix, tables = plan.prefix, block_tables[rows.long()].tolist()
    assert prefix is not None
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(context_lens.tolist()):
        if length > MIN_SHARED:
            groups.setdefault(tables[i][(MIN_SHARED - 1) // page], []).append(i)
    prefix.starts.zero_()
    prefix.members.fill_(-1)
    width, tile = prefix.members.shape[1], 0
    for group in groups.values():
        if len(group) < MIN_MEMBERS:
            continue
        most = (min(context_lens[group].tolist()) - 1) // page
        first = tables[group[0]]
        equal = (next((j for j in range(most) if tables[i][j] != first[j]), most) for i in group)
        prefix.starts[group] = min(equal) * page // plan.tile * plan.tile
        for begin in range(0, len(group), width):
            some = group[begin : begin + width]
            prefix.members[tile, : len(some)] = torch.tensor(some)
            tile += 1


def plan_decode(context_lens: Tensor, rows: Tensor, plan: DecodePlan) -> None:
    """Write the work map of a step's decoding sequences into `plan`: context_lens, rows [B] int32. See `DecodePlan`.

    On a GPU at least one kernel that was launched without programmatic dependent launch must stand between this and the
    first attention: attention reads the map, the lengths, the rows and the block tables ahead of the kernel before it.
    """
    num_programs = len(plan.work)
    lens, spans = context_lens.long(), torch.ones_like(context_lens)
    if plan.queries > 1:
        spans = _spans(context_lens, rows, plan.queries)
        plan.spans[: len(spans)] = spans
        lens = torch.where(spans > 0, lens, 0)
    if plan.sparse is not None:
        each = [plan.sparse.num_tiles(n, plan.tile, plan.group) if n else 0 for n in lens.tolist()]
        tiles = torch.tensor(each) * plan.num_kv_heads
    else:
        first_tile = (lens - plan.window).clamp(min=0) // plan.tile if plan.window else 0
        ends = torch.where(lens > 0, lens + spans - 1, 0)  # of the last query's context
        if plan.prefix is not None:
            first_tile = plan.prefix.starts[: len(lens)].long() // plan.tile
        tiles = ((ends + plan.tile - 1) // plan.tile - first_tile) * plan.num_kv_heads
    ends = tiles.cumsum(0)
    total = int(tiles.sum())
    per_program = max(-(-total // num_programs), plan.min_tiles)
    first = torch.arange(num_programs) * per_program
    seq = torch.searchsorted(ends, first, right=True)
    last = seq.clamp(max=len(rows) - 1)
    columns = (
        (total - first).clamp(min=0, max=per_program), torch.full_like(first, per_program), last,
        first - torch.cat([ends.new_zeros(1), ends])[seq], context_lens[last], rows[last],
        spans[last],
    )  # fmt: skip
    used = columns if plan.queries > 1 else columns[:-1]
    plan.work[:, : len(used)] = torch.stack([c.int() for c in used], 1)


def _spans(context_lens: Tensor, rows: Tensor, queries: int) -> Tensor:
    """See `DecodePlan.spans`: [B] int32. A span ends before each multiple of `queries`."""
    lens, of_rows, spans = context_lens.tolist(), rows.tolist(), [0] * len(rows)
    first = 0
    for i, (length, row) in enumerate(zip(lens, of_rows, strict=True)):
        if i % queries == 0 or row != of_rows[i - 1] or length != lens[i - 1] + 1 or not lens[i - 1]:
            first = i
        spans[first] += length > 0
    return torch.tensor(spans, dtype=torch.int32, device=rows.device)
