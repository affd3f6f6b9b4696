"""The step's preparation, as reference implementation and as kernel, against what the layout promises."""

from typing import Any

import pytest
import torch

import kernels
from kernels import reference
from kernels.cpu import step
from kernels.data import layout
from kernels.data.layout import RowState, StepTensors
from kernels.triton import prepare

BLOCK = 4


def packed_step(rows: Any, query_lens: Any, updates: Any, token_ids: Any) -> Any:
    """Build the packed buffer of `kernels.data.layout` by hand; returns (packed, segment).

    updates: for each cache group, for each sequence, where its new blocks go and their ids.
    """
    n = len(rows)
    segment = -(-(n + 1) // 4) * 4
    head = torch.zeros(2 + 2 * len(updates), segment, dtype=torch.int32)
    head[0, :n] = torch.tensor(rows)
    head[1, 1 : n + 1] = torch.tensor(query_lens).cumsum(0)
    flat = []  # type: ignore[var-annotated]
    for group, of_group in enumerate(updates):
        head[2 + 2 * group, : n + 1] = torch.tensor([0, *(len(blocks) for _, blocks in of_group)]).cumsum(0) + len(flat)
        head[3 + 2 * group, :n] = torch.tensor([at for at, _ in of_group])
        flat += [b for _, blocks in of_group for b in blocks]
    return torch.cat([head.flatten(), torch.tensor(token_ids + flat, dtype=torch.int32)]), segment


@pytest.fixture(params=[reference, prepare, step], ids=["reference", "triton", "cpu"])
def prepare_step(request: pytest.FixtureRequest) -> Any:
    return request.param.prepare_step


LONG = 300
BLOCKS = list(range(100, 100 + LONG // BLOCK))


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_step_tensors(prepare_step: Any, num_groups: int) -> None:
    state = RowState.allocate(5, num_groups, 80, torch.device("cpu"))
    state.num_computed[:] = torch.tensor([0, 8, 70, 2, 0])
    state.last_token[:] = torch.tensor([50, 51, 52, 53, 54])
    state.floats(layout.TEMPERATURE)[:] = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
    state.floats(layout.TOP_P)[:] = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6])
    state.floats(layout.MIN_P)[:] = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.1])
    state.records[:, layout.TOP_K] = torch.tensor([5, 4, 3, 2, 1])
    state.seed[:] = torch.arange(5) + 2**40
    for group in range(num_groups):
        state.block_tables[group, 1, :2] = torch.tensor([7, 8], dtype=torch.int32) + 1000 * group
    # A decode into a new block, a padding row, a chunk after a prefix hit, a long one.
    updates = [
        [(2, [9 + 1000 * g]), (0, []), (0, [20 + 1000 * g, 21 + 1000 * g]), (0, [b + 1000 * g for b in BLOCKS])]
        for g in range(num_groups)
    ]
    packed, segment = packed_step([1, 4, 3, 0], [1, 1, 3, LONG], updates, [-1, 0, 11, 12, 13, *range(LONG)])
    out = StepTensors.allocate(6, 1000, num_groups, torch.device("cpu"))
    prepare_step(packed, segment, 4, 5 + LONG, BLOCK, state, out)
    assert out.input_ids[: 5 + LONG].tolist() == [51, 0, 11, 12, 13, *range(LONG)]
    assert out.positions[: 5 + LONG].tolist() == [8, 0, 2, 3, 4, *range(LONG)]
    for group in range(num_groups):
        first = 1000 * group
        slots = [(9 + first) * BLOCK, -1, (20 + first) * BLOCK + 2, (20 + first) * BLOCK + 3, (21 + first) * BLOCK]
        slots += [(BLOCKS[p // BLOCK] + first) * BLOCK + p % BLOCK for p in range(LONG)]
        assert out.slot_mapping[group, : 5 + LONG].tolist() == slots
        assert state.block_tables[group, 1, :4].tolist() == [7 + first, 8 + first, 9 + first, 0]
        assert state.block_tables[group, 3, :3].tolist() == [20 + first, 21 + first, 0]
        assert state.block_tables[group, 0, : len(BLOCKS)].tolist() == [b + first for b in BLOCKS]
    samples = out.samples
    assert out.context_lens[:4].tolist() == samples.next_position[:4].tolist() == [9, 0, 5, LONG]
    assert samples.token_index[:4].tolist() == [0, 1, 4, 4 + LONG]
    assert samples.rows[:4].tolist() == [1, 4, 3, 0]
    assert samples.seed[:4].tolist() == [2**40 + 1, 2**40 + 4, 2**40 + 3, 2**40]
    assert samples.temperature[:4].tolist() == pytest.approx([0.1, 0.4, 0.3, 0.0])
    assert samples.top_p[:4].tolist() == pytest.approx([0.9, 0.6, 0.7, 1.0])
    assert samples.min_p[:4].tolist() == pytest.approx([0.4, 0.1, 0.2, 0.5])
    assert samples.top_k[:4].tolist() == [4, 1, 2, 5]
    assert state.num_computed.tolist() == [LONG, 9, 70, 5, 0], "rows of the step advance, all others and padding do not"


def test_rows_advance_from_step_to_step(prepare_step: Any) -> None:
    state, out = RowState.allocate(3, 1, 8, torch.device("cpu")), StepTensors.allocate(2, 8, 1, torch.device("cpu"))
    updates = [[(0, [5, 6]), (0, [3])]]
    for length, tokens in ((5, [1, 2, 3, 4, 5]), (1, [-1])):
        packed, segment = packed_step([1, 0], [length, 1], updates, [*tokens, 9])
        prepare_step(packed, segment, 2, length + 1, BLOCK, state, out)
        updates = [[(0, []), (0, [])]]
    assert out.context_lens[:2].tolist() == [6, 2]
    assert out.positions[:2].tolist() == [5, 1]
    assert out.slot_mapping[0, :2].tolist() == [6 * BLOCK + 1, 3 * BLOCK + 1]
    assert state.num_computed.tolist() == [2, 6, 0]


def test_a_fault_in_place_of_the_newest_token_is_no_token_id(prepare_step: Any) -> None:
    state, out = RowState.allocate(3, 1, 8, torch.device("cpu")), StepTensors.allocate(2, 8, 1, torch.device("cpu"))
    state.last_token[:] = torch.tensor([kernels.NOT_FINITE, kernels.NOTHING_ALLOWED, 7])
    packed, segment = packed_step([0, 1], [1, 1], [[(0, [5]), (0, [3])]], [-1, -1])
    prepare_step(packed, segment, 2, 2, BLOCK, state, out)
    assert out.input_ids[:2].tolist() == [0, 0], "what it computes is dropped, but must be in the vocabulary"


@pytest.mark.parametrize("num_groups", [1, 2])
def test_successive_sequences_of_a_row_are_its_successive_tokens(prepare_step: Any, num_groups: int) -> None:
    state, out = (
        RowState.allocate(4, num_groups, 8, torch.device("cpu")),
        StepTensors.allocate(40, 40, num_groups, torch.device("cpu")),
    )
    state.num_computed[:] = torch.tensor([6, 2, 9, 0])
    state.last_token[:] = torch.tensor([50, 51, 52, 53])
    state.records[:, layout.TOP_K] = torch.tensor([5, 4, 3, 2])
    for group in range(num_groups):
        state.block_tables[group, 0, :2] = torch.tensor([1, 2], dtype=torch.int32) + 100 * group
        state.block_tables[group, 1, :1] = 3 + 100 * group
        state.block_tables[group, 2, :3] = torch.tensor([4, 5, 6], dtype=torch.int32) + 100 * group
    # Row 0 with three drafts, the last of which is in a new block; row 2 with none; row 1 with one; padding.
    rows = [0, 0, 0, 0, 2, 1, 1, 3, 3]
    updates = [[(2, [7 + 100 * g])] * 4 + [(0, [])] * 5 for g in range(num_groups)]
    packed, segment = packed_step(rows, [1] * 9, updates, [-1, 11, 12, 13, -1, -1, 21, 0, 0])
    packed[9:segment] = 3
    prepare_step(packed, segment, 9, 9, BLOCK, state, out, repeats=True)
    assert out.input_ids[:9].tolist() == [50, 11, 12, 13, 52, 51, 21, 0, 0]
    assert out.positions[:7].tolist() == [6, 7, 8, 9, 9, 2, 3]
    assert out.context_lens[:9].tolist() == [7, 8, 9, 10, 10, 3, 4, 0, 0]
    assert out.samples.next_position[:7].tolist() == [7, 8, 9, 10, 10, 3, 4]
    assert out.samples.token_index[:9].tolist() == list(range(9))
    assert out.samples.rows[:9].tolist() == rows
    assert out.samples.top_k[:7].tolist() == [5, 5, 5, 5, 3, 4, 4]
    for group in range(num_groups):
        blocks = [b + 100 * group for b in (2, 2, 7, 7, 6, 3, 3)]
        offsets = [2, 3, 0, 1, 1, 2, 3]
        expected = [block * BLOCK + offset for block, offset in zip(blocks, offsets, strict=True)]
        assert out.slot_mapping[group, :9].tolist() == [*expected, -1, -1]
        assert state.block_tables[group, 0, 2] == 7 + 100 * group
    assert state.num_computed.tolist() == [6, 2, 10, 0], "rows with drafts wait until it is known how many are right"


def test_a_row_may_have_as_many_sequences_as_there_may_be_drafts(prepare_step: Any) -> None:
    n = layout.MAX_REPEATS + 1
    state, out = RowState.allocate(2, 1, 16, torch.device("cpu")), StepTensors.allocate(40, 40, 1, torch.device("cpu"))
    packed, segment = packed_step([0] * n, [1] * n, [[(0, list(range(16)))] * n], [-1] * n)
    packed[n:segment] = 1
    prepare_step(packed, segment, n, n, BLOCK, state, out, repeats=True)
    assert out.positions[:n].tolist() == list(range(n))
