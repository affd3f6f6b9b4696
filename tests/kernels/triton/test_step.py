"""The step's preparation kernel against the reference implementation, and against what the layout promises."""

import pytest
import torch

from kernels import reference
from kernels.layout import RowState, StepTensors
from kernels.triton import prepare

BLOCK = 4


def packed_step(rows, query_lens, context_lens, updates, token_ids):
    """Build the packed buffer of `kernels.layout` by hand; returns (packed, segment)."""
    n = len(rows)
    segment = -(-(n + 1) // 4) * 4
    head = torch.zeros(5, segment, dtype=torch.int32)
    head[0, :n] = torch.tensor(rows)
    head[1, :n] = torch.tensor(context_lens)
    head[2, 1 : n + 1] = torch.tensor(query_lens).cumsum(0)
    head[3, 1 : n + 1] = torch.tensor([len(blocks) for _, blocks in updates]).cumsum(0)
    head[4, :n] = torch.tensor([at for at, _ in updates])
    flat = [b for _, blocks in updates for b in blocks]
    return torch.cat([head.flatten(), torch.tensor(token_ids + flat, dtype=torch.int32)]), segment


@pytest.fixture(params=["reference", "triton"])
def prepare_step(request):
    return (reference if request.param == "reference" else prepare).prepare_step


def test_step_tensors(prepare_step):
    state = RowState.allocate(5, 80, torch.device("cpu"))
    state.last_token[:] = torch.tensor([50, 51, 52, 53, 54])
    state.temperature[:] = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
    state.seed[:] = torch.arange(5) + 2**40
    state.block_tables[1, :2] = torch.tensor([7, 8], dtype=torch.int32)
    long = 300
    blocks = list(range(100, 100 + long // BLOCK))
    packed, segment = packed_step(
        rows=[1, 4, 3, 0],
        query_lens=[1, 1, 3, long],
        context_lens=[
            9,
            0,
            5,
            long,
        ],  # a decode into a new block, a padding row, a chunk after a prefix hit, a long one
        updates=[(2, [9]), (0, []), (0, [20, 21]), (0, blocks)],
        token_ids=[-1, 0, 11, 12, 13, *range(long)],
    )
    out = StepTensors.allocate(6, 1000, torch.device("cpu"))
    prepare_step(packed, segment, 4, 5 + long, BLOCK, state, out)
    assert out.input_ids[: 5 + long].tolist() == [51, 0, 11, 12, 13, *range(long)]
    assert out.positions[: 5 + long].tolist() == [8, 0, 2, 3, 4, *range(long)]
    slots = [9 * BLOCK, -1, 20 * BLOCK + 2, 20 * BLOCK + 3, 21 * BLOCK]
    slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(long)]
    assert out.slot_mapping[: 5 + long].tolist() == slots
    assert out.last_index[:4].tolist() == [0, 1, 4, 4 + long]
    assert out.rows[:4].tolist() == [1, 4, 3, 0]
    assert out.next_position[:4].tolist() == [9, 0, 5, long]
    assert out.seed[:4].tolist() == [2**40 + 1, 2**40 + 4, 2**40 + 3, 2**40]
    assert out.temperature[:4].tolist() == pytest.approx([0.1, 0.4, 0.3, 0.0])
    assert state.block_tables[1, :4].tolist() == [7, 8, 9, 0]
    assert state.block_tables[3, :3].tolist() == [20, 21, 0]
    assert state.block_tables[0, : len(blocks)].tolist() == blocks
