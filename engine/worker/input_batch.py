"""Device rows and the one packed buffer a step sends. Knows which request holds which row, never why it was scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import Admission, SchedulerOutput
from engine.core.pooling_params import PoolingParams
from engine.core.sampling_params import SamplingParams
from engine.worker.token_history import TokenHistory
from kernels.step import RowState

RING = 3  # packed buffers in turn: the step before the last has been read back before a buffer is written again


@dataclass(slots=True)
class Row:
    """The CPU's side of a row."""

    index: int
    token_ids: np.ndarray  # int32: the tokens known at admission
    num_prompt_tokens: int
    num_blocks: int  # entries of its block table in use
    sampling: SamplingParams
    special: bool  # the sampling kernel alone cannot sample it
    constrained: bool  # a grammar says what may come next
    min_context: int  # the kernel alone cannot sample it either in a context shorter than this
    slot: int  # in the token history; -1: it needs none
    pooling: PoolingParams | None  # its prompt's embedding is wanted, and no token
    allowed: Tensor | None = None  # [V] bool on the device: its `allowed_token_ids`, once they were needed


@dataclass(slots=True)
class PackedStep:
    """A step as it lies in the packed buffer; see `kernels.step` for the layout."""

    packed: Tensor  # int32, on the CPU (pinned where the device is a GPU)
    segment: int
    num_seqs: int  # with padding
    num_tokens: int  # with padding
    num_decodes: int
    rows: list[Row]  # of the scheduled requests, in order, without padding
    greedy: bool  # every sequence is greedy
    query_lens: list[int]
    context_lens: list[int]


@dataclass(slots=True)
class InputBatch:
    """Owns the rows: `num_rows` for requests, and one more, the last, for padding."""

    num_rows: int
    max_blocks: int
    max_len: int  # of a sequence, in tokens
    device: torch.device
    pin_memory: bool
    state: RowState = field(init=False)
    history: TokenHistory = field(init=False)
    rows: dict[str, Row] = field(init=False, default_factory=dict)
    num_special: int = field(init=False, default=0)  # rows that are special, for a while at least
    num_scored: int = field(init=False, default=0)  # rows that want log-probabilities of their prompt
    num_pooled: int = field(init=False, default=0)  # rows that want an embedding
    _free: list[int] = field(init=False)
    _ring: list[Tensor] = field(init=False)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.state = RowState.allocate(self.num_rows + 1, self.max_blocks, self.device)
        self.history = TokenHistory(self.num_rows, self.max_len, self.device)
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._ring = [torch.empty(0, dtype=torch.int32) for _ in range(RING)]

    def apply(self, output: SchedulerOutput) -> None:
        """Free the rows of removed requests and give rows to admitted ones."""
        for request_id in output.removed:
            row = self.rows.pop(request_id, None)
            if row is not None:
                self._free.append(row.index)
                self.num_special -= row.special or row.constrained or row.min_context > 0
                self.num_scored -= row.sampling.prompt_logprobs is not None
                self.num_pooled -= row.pooling is not None
                if row.slot >= 0:
                    self.history.release(row.slot)
        if output.admitted:
            self._admit(output.admitted)

    def _admit(self, admitted: list[Admission]) -> None:
        indices = []
        for a in admitted:
            index = self._free.pop()
            indices.append(index)
            tokens, p = np.array(a.token_ids, dtype=np.int32), a.sampling
            min_context = a.num_prompt_tokens + p.min_tokens if p.min_tokens else 0
            slot = self.history.take(tokens) if p.looks_back else -1
            constrained = p.structured_outputs is not None
            row = Row(index, tokens, a.num_prompt_tokens, 0, p, p.is_special, constrained, min_context, slot, a.pooling)
            self.num_special += row.special or constrained or min_context > 0
            self.num_scored += p.prompt_logprobs is not None
            self.num_pooled += a.pooling is not None
            self.rows[a.request_id] = row
        at = torch.tensor(indices)
        params = [a.sampling for a in admitted]
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

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU, on the device; nothing waits."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.pin_memory else tensor

    def pack(self, output: SchedulerOutput, padded_seqs: int = 0) -> PackedStep:
        """Write the step into the next packed buffer, padded to `padded_seqs` one-token sequences when that is not 0."""
        scheduled = output.scheduled
        real, padding = len(scheduled), max(padded_seqs - len(scheduled), 0)
        num_seqs, num_tokens = real + padding, output.num_tokens + padding
        segment = _round_up(num_seqs + 1)
        admissions = {a.request_id: a.block_ids for a in output.admitted}

        rows = [self.rows[s.request_id] for s in scheduled]
        query_lens = [s.num_tokens for s in scheduled]
        context_lens = [s.start + s.num_tokens for s in scheduled]
        tokens = np.full(num_tokens, -1, dtype=np.int32)
        updates: list[int] = []
        update_start, update_at = [0], []
        position = 0
        for s, row in zip(scheduled, rows, strict=True):
            known = len(row.token_ids)
            if s.start < known:  # tokens beyond the known ones are the row's newest, on the device
                tokens[position : position + s.num_tokens] = row.token_ids[s.start : s.start + s.num_tokens]
            position += s.num_tokens
            update_at.append(row.num_blocks)
            new_blocks = admissions.get(s.request_id, s.new_block_ids) if admissions else s.new_block_ids
            if new_blocks:
                updates += new_blocks
                row.num_blocks += len(new_blocks)
            update_start.append(len(updates))

        size = 5 * segment + num_tokens + max(len(updates), 1)
        packed = self._buffer(size)
        view = packed.numpy()
        head = view[: 5 * segment].reshape(5, segment)
        head[0, :real] = [row.index for row in rows]
        head[0, real:] = self.num_rows
        head[1, :real] = context_lens
        head[1, real:] = 0
        head[2, 0] = 0
        head[2, 1 : real + 1] = np.cumsum(query_lens)
        head[2, real + 1 : num_seqs + 1] = output.num_tokens + np.arange(1, padding + 1)
        head[3, : real + 1] = update_start
        head[3, real + 1 :] = len(updates)
        head[4, :real] = update_at
        tokens[output.num_tokens :] = 0
        view[5 * segment : 5 * segment + num_tokens] = tokens
        view[5 * segment + num_tokens : 5 * segment + num_tokens + len(updates)] = updates
        return PackedStep(
            packed[:size], segment, num_seqs, num_tokens, output.num_decodes + padding, rows,
            all(row.sampling.temperature == 0 for row in rows), query_lens, context_lens,
        )  # fmt: skip

    def _buffer(self, size: int) -> Tensor:
        self._turn = (self._turn + 1) % RING
        buffer = self._ring[self._turn]
        if len(buffer) < size:
            buffer = torch.empty(max(size, 2 * len(buffer), 4096), dtype=torch.int32, pin_memory=self.pin_memory)
            self._ring[self._turn] = buffer
        return buffer


def _round_up(n: int, multiple: int = 4) -> int:
    return -(-n // multiple) * multiple
