"""The packed step unpacked on the device, in Triton: one program for each sequence. The layout is in
`kernels.data.layout`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.data import layout
from kernels.data.layout import RowState, StepTensors
from kernels.gpu.launch import launch_dependents, pdl_options, wait_for_inputs

NUM_COMPUTED, LAST_TOKEN = tl.constexpr(layout.NUM_COMPUTED), tl.constexpr(layout.LAST_TOKEN)
SEED, TOP_K = tl.constexpr(layout.SEED), tl.constexpr(layout.TOP_K)
TEMPERATURE, TOP_P, MIN_P = tl.constexpr(layout.TEMPERATURE), tl.constexpr(layout.TOP_P), tl.constexpr(layout.MIN_P)
NUM_COLUMNS, SHIFT_BITS = tl.constexpr(layout.NUM_COLUMNS), tl.constexpr(layout.SHIFT_BITS)
MAX_REPEATS = tl.constexpr(layout.MAX_REPEATS)


@triton.jit
def _load_float(record, column):
    return tl.load(record + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["segment", "num_tokens", "num_rows"])
def _prepare_kernel(
    packed, segment, num_tokens, num_rows,
    records, block_tables, stride_group, stride_row, stride_slots,
    input_ids, positions, slot_mapping, token_index, out_rows, context_lens,
    out_temperature, out_top_p, out_min_p, out_top_k, out_seed, next_position,
    NUM_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, REPEATS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    i = tl.program_id(0)
    row = tl.load(packed + i).to(tl.int64)
    start = tl.load(packed + segment + i)
    end = tl.load(packed + segment + i + 1)
    record = records + row * NUM_COLUMNS
    newest = tl.maximum(tl.load(record + LAST_TOKEN), 0)  # below 0: the sampler found a fault
    is_real = row < num_rows - 1
    first_position = tl.where(is_real, tl.load(record + NUM_COMPUTED), 0).to(tl.int32)
    advances = is_real
    if REPEATS:
        before = i - 1 - tl.arange(0, MAX_REPEATS)
        same = tl.load(packed + before, mask=before >= 0, other=-1) == row
        num_before = tl.sum(same.to(tl.int32), axis=0)
        first_position += tl.where(is_real, num_before, 0)
        # After the last sequence there is padding, which is not of a real row.
        advances = is_real & (num_before == 0) & (tl.load(packed + i + 1) != row)
    context_len = tl.where(is_real, first_position + end - start, 0)
    top_k = tl.load(record + TOP_K)
    shift = tl.where(is_real, top_k >> SHIFT_BITS, 0).to(tl.int32)
    offs = tl.arange(0, CHUNK)
    token_ids = packed + (2 + 2 * NUM_GROUPS) * segment

    for group in tl.static_range(NUM_GROUPS):
        update_start = tl.load(packed + (2 + 2 * group) * segment + i)
        update_end = tl.load(packed + (2 + 2 * group) * segment + i + 1)
        update_at = tl.load(packed + (3 + 2 * group) * segment + i)
        table = block_tables + group * stride_group + row * stride_row
        for at in range(update_start, update_end, CHUNK):
            mask = at + offs < update_end
            new = tl.load(token_ids + num_tokens + at + offs, mask=mask)
            tl.store(table + update_at + (at - update_start) + offs, new, mask=mask)
    tl.debug_barrier()  # other threads of this program read the tables and the record below, and write the record

    for at in range(start, end, CHUNK):
        token = at + offs
        mask = token < end
        position = first_position + token - start
        known = tl.load(token_ids + token, mask=mask, other=0).to(tl.int64)
        tl.store(input_ids + token, tl.where(known >= 0, known, newest), mask=mask)
        tl.store(positions + token, position + shift, mask=mask)
        for group in tl.static_range(NUM_GROUPS):
            table = block_tables + group * stride_group + row * stride_row
            block = tl.load(table + position // BLOCK_SIZE, mask=mask & is_real, other=0).to(tl.int64)
            slot = tl.where(is_real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(slot_mapping + group * stride_slots + token, slot, mask=mask)

    tl.store(record + NUM_COMPUTED, context_len.to(tl.int64), mask=advances)
    tl.store(context_lens + i, context_len)
    tl.store(token_index + i, (end - 1).to(tl.int64))
    tl.store(next_position + i, context_len.to(tl.int64))
    tl.store(out_rows + i, row)
    tl.store(out_temperature + i, _load_float(record, TEMPERATURE))
    tl.store(out_top_p + i, _load_float(record, TOP_P))
    tl.store(out_min_p + i, _load_float(record, MIN_P))
    tl.store(out_top_k + i, top_k.to(tl.int32))
    tl.store(out_seed + i, tl.load(record + SEED))


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
    """See `kernels.reference.prepare_step`."""
    num_groups, num_rows = state.block_tables.shape[:2]
    samples = out.samples
    _prepare_kernel[(num_seqs,)](
        packed, segment, num_tokens, num_rows,
        state.records, state.block_tables, *state.block_tables.stride()[:2], out.slot_mapping.stride(0),
        out.input_ids, out.positions, out.slot_mapping, samples.token_index, samples.rows, out.context_lens,
        samples.temperature, samples.top_p, samples.min_p, samples.top_k, samples.seed, samples.next_position,
        NUM_GROUPS=num_groups, BLOCK_SIZE=block_size, CHUNK=256, REPEATS=repeats, num_warps=4,
        **pdl_options(packed.device),
    )  # fmt: skip
