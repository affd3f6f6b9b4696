"""Device rows and the one packed buffer a step sends. Knows which request holds which row, never why it was scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import NewRequest, ScheduledBatch, SchedulerOutput
from engine.core.pooling_params import PoolingParams
from engine.core.sampling_params import SamplingParams
from kernels.step import RowState

RING = 3  # packed buffers in turn: the step before the last has been read back before a buffer is written again


@dataclass(slots=True)
class Row:
    """The CPU's side of a row."""

    index: int
    token_ids: np.ndarray  # int32: the tokens known at admission
    num_prompt_tokens: int
    sampling: SamplingParams
    pooling: PoolingParams | None  # its prompt's embedding is wanted, and no token


class Members:
    """What stays the same in all steps of the same shares."""

    def __init__(self, shares: ScheduledBatch, rows: dict[str, Row]) -> None:
        self.batch = shares
        self.rows = [rows[request_id] for request_id in shares.request_ids]
        self.indices = np.array([row.index for row in self.rows], dtype=np.int64)  # [n] of n shares
        self.query_lens = np.array(shares.num_tokens, dtype=np.int32)  # [n]
        self.query_start = np.zeros(len(shares) + 1, dtype=np.int32)  # [n + 1]
        np.add.accumulate(self.query_lens, out=self.query_start[1:])
        self.places = {request_id: i for i, request_id in enumerate(shares.request_ids)}
        self.greedy = all(row.sampling.temperature == 0 for row in self.rows)


@dataclass(slots=True)
class PackedStep:
    """A step as it lies in the packed buffer; see `kernels.step` for the layout."""

    packed: Tensor  # int32, on the CPU (pinned where the device is a GPU)
    segment: int
    num_seqs: int  # with padding
    num_tokens: int  # with padding
    num_decodes: int  # with padding
    members: Members  # without padding
    context_lens: np.ndarray  # [n] int32, without padding


@dataclass(slots=True)
class InputBatch:
    """Owns the rows: `num_rows` for requests, and one more, the last, for padding."""

    num_rows: int
    max_blocks: int
    max_len: int  # of a sequence, in tokens
    device: torch.device
    pin_memory: bool
    state: RowState = field(init=False)
    rows: dict[str, Row] = field(init=False, default_factory=dict)
    num_scored: int = field(init=False, default=0)  # rows that want log-probabilities of their prompt
    num_pooled: int = field(init=False, default=0)  # rows that want an embedding
    _num_computed: np.ndarray = field(init=False)  # [num_rows] int32: tokens of each row that launched steps compute
    _num_known: np.ndarray = field(init=False)  # [num_rows] int32: tokens of each row known at admission
    _num_blocks: np.ndarray = field(init=False)  # [num_rows] int32: entries of each row's block table in use
    _members: Members | None = field(init=False, default=None)  # of the last step
    _free: list[int] = field(init=False)
    _ring: list[tuple[Tensor, np.ndarray]] = field(init=False)  # a tensor, and the same memory
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.state = RowState.allocate(self.num_rows + 1, self.max_blocks, self.device)
        self._num_computed, self._num_known, self._num_blocks = np.zeros((3, self.num_rows), dtype=np.int32)
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._ring = [self._new_buffer(4096) for _ in range(RING)]

    def apply(self, output: SchedulerOutput) -> tuple[list[Row], list[Row]]:
        """Free the rows of removed requests, then give rows to new ones; the rows of both."""
        removed = []
        for request_id in output.removed:
            row = self.rows.pop(request_id, None)
            if row is not None:
                removed.append(row)
                self._free.append(row.index)
                self.num_scored -= row.sampling.prompt_logprobs is not None
                self.num_pooled -= row.pooling is not None
        return removed, self._admit(output.new_requests) if output.new_requests else []

    def _admit(self, admitted: list[NewRequest]) -> list[Row]:
        rows = []
        for a in admitted:
            index = self._free.pop()
            tokens, p = np.array(a.token_ids, dtype=np.int32), a.request.sampling
            row = Row(index, tokens, a.num_prompt_tokens, p, a.request.pooling)
            rows.append(row)
            self._num_computed[index], self._num_known[index] = a.num_computed_tokens, len(tokens)
            self._num_blocks[index] = 0
            self.num_scored += p.prompt_logprobs is not None
            self.num_pooled += a.request.pooling is not None
            self.rows[a.request_id] = row
        at = torch.tensor([row.index for row in rows])
        params = [a.request.sampling for a in admitted]
        columns = {
            "temperature": [p.temperature for p in params],
            "top_p": [p.top_p for p in params],
            "min_p": [p.min_p for p in params],
            "top_k": [max(p.top_k, 0) for p in params],
            "seed": [a.seed for a in admitted],
        }
        at = self.to_device(at)
        for name, values in columns.items():
            target: Tensor = getattr(self.state, name)
            target[at] = self.to_device(torch.tensor(values, dtype=target.dtype))
        return rows

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU, on the device; nothing waits."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.pin_memory else tensor

    def pack(self, output: SchedulerOutput, padded_seqs: int = 0) -> PackedStep:
        """Write the step into the next packed buffer, padded to `padded_seqs` one-token sequences when that is not 0."""
        members = self.members(output.batch)
        at, real, tokens_end = members.indices, len(members.rows), output.batch.total_num_tokens
        padding = max(padded_seqs - real, 0)
        num_seqs, num_tokens = real + padding, tokens_end + padding
        segment = segment_of(num_seqs)
        starts = self._num_computed[at]
        context_lens = starts + members.query_lens
        self._num_computed[at] = context_lens
        updates, num_updates = self._block_updates(output, members)

        size = 5 * segment + num_tokens + max(len(updates), 1)
        packed, view = self._buffer(size)
        rows, contexts, query_start, update_start, update_at = view[: 5 * segment].reshape(5, segment)
        rows[:real], rows[real:] = at, self.num_rows
        contexts[:real], contexts[real:] = context_lens, 0
        query_start[: real + 1] = members.query_start
        query_start[real + 1 : num_seqs + 1] = np.arange(tokens_end + 1, num_tokens + 1)
        update_start[:] = 0
        if updates:
            np.add.accumulate(num_updates, out=update_start[1 : real + 1])
            update_start[real + 1 :] = len(updates)
            update_at[:real] = self._num_blocks[at]
            self._num_blocks[at] += num_updates
        tokens = view[5 * segment : size]
        tokens[:tokens_end], tokens[tokens_end:num_tokens] = -1, 0
        for i in (starts < self._num_known[at]).nonzero()[0]:  # all but these compute their row's newest token
            first, known = members.query_start[i], members.rows[i].token_ids[starts[i] : context_lens[i]]
            tokens[first : first + len(known)] = known
        tokens[num_tokens : num_tokens + len(updates)] = updates
        num_decodes = output.batch.num_decodes + padding
        return PackedStep(packed[:size], segment, num_seqs, num_tokens, num_decodes, members, context_lens)

    def _block_updates(self, output: SchedulerOutput, members: Members) -> tuple[list[int], np.ndarray]:
        """The blocks to append to block tables, in the order of the shares, and how many for each share [n] int32."""
        new_blocks = output.new_block_ids
        if output.new_requests:
            new_blocks = new_blocks | {a.request_id: a.block_ids for a in output.new_requests}
        updates: list[int] = []
        num_updates = np.zeros(len(output.batch), dtype=np.int32)
        if new_blocks:
            for i, block_ids in sorted((members.places[request_id], new) for request_id, new in new_blocks.items()):
                num_updates[i] = len(block_ids)
                updates += block_ids
        return updates, num_updates

    def num_computed(self, row: Row) -> int:
        """Tokens that the steps packed so far compute."""
        return int(self._num_computed[row.index])

    def defer(self, packed: PackedStep, places: list[int]) -> None:
        """These sequences of the last step compute its last token once more in the next one."""
        self._num_computed[packed.members.indices[places]] -= 1

    def members(self, shares: ScheduledBatch) -> Members:
        """What is known of a step's shares beside where they stand."""
        if self._members is None or self._members.batch is not shares:
            self._members = Members(shares, self.rows)
        return self._members

    def _buffer(self, size: int) -> tuple[Tensor, np.ndarray]:
        self._turn = (self._turn + 1) % RING
        length = len(self._ring[self._turn][1])
        if length < size:
            self._ring[self._turn] = self._new_buffer(max(size, 2 * length))
        return self._ring[self._turn]

    def _new_buffer(self, size: int) -> tuple[Tensor, np.ndarray]:
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=self.pin_memory)
        return buffer, buffer.numpy()


def segment_of(num_seqs: int) -> int:
    """The length of a segment in the packed buffer of so many sequences: whole 16-byte words."""
    return -(-(num_seqs + 1) // 4) * 4
