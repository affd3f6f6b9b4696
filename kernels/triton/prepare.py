"""The packed step unpacked on the device, in Triton: one program for each sequence. The layout is in `kernels.layout`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import RowState, StepTensors
from kernels.triton.launch import launch_dependents, pdl_options, wait_for_inputs


@triton.jit(do_not_specialize=["segment", "num_tokens"])
def _prepare_kernel(
    packed, segment, num_tokens,
    block_tables, last_token, temperature, top_p, min_p, top_k, seed, stride_table,
    input_ids, positions, slot_mapping, last_index, out_rows, out_temperature, out_top_p, out_min_p, out_top_k, out_seed,
    next_position,
    BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
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


def prepare_step(
    packed: Tensor, segment: int, num_seqs: int, num_tokens: int, block_size: int, state: RowState, out: StepTensors
) -> None:
    """See `kernels.reference.prepare_step`."""
    _prepare_kernel[(num_seqs,)](
        packed, segment, num_tokens,
        state.block_tables, state.last_token, state.temperature, state.top_p, state.min_p, state.top_k, state.seed,
        state.block_tables.stride(0),
        out.input_ids, out.positions, out.slot_mapping, out.last_index, out.rows, out.temperature, out.top_p, out.min_p,
        out.top_k, out.seed, out.next_position,
        BLOCK_SIZE=block_size, CHUNK=256, num_warps=4, **pdl_options(packed.device),
    )  # fmt: skip
