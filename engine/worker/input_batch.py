"""Device rows of requests, and the packed buffer that each step sends to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import NewRequest, ScheduledBatch, SchedulerOutput
from engine.core.engine_request import Adapter, ImageInput
from engine.core.params.pooling import PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.worker.device import Device
from engine.worker.options import RING
from kernels.data import layout
from kernels.data.layout import RowState, StepTensors

MOST_RECENT = 8  # batches


@dataclass(slots=True)
class Row:
    """The CPU's record of a device row."""

    index: int
    token_ids: np.ndarray  # int32: the tokens known when the request got the row
    num_prompt_tokens: int
    sampling: SamplingParams
    pooling: PoolingParams | None  # the request wants an embedding and no tokens
    adapter: int = -1  # slot of its LoRA adapter; -1: none
    images: tuple[ImageInput, ...] = ()  # in its prompt
    is_unknown: bool = False  # to the drafter on the device, which rested while some of its tokens were computed


class Members:
    """Data derived from a `ScheduledBatch` of n requests, the same in all steps with that batch."""

    def __init__(self, batch: ScheduledBatch, rows: dict[str, Row]) -> None:
        self.batch = batch
        self.rows = [rows[request_id] for request_id in batch.request_ids]
        self.samples = BatchSamples(batch, self.rows)
        self.row_indices = np.array([row.index for row in self.rows], dtype=np.int64)  # [n]
        self.query_lens = np.array(batch.num_tokens, dtype=np.int32)  # [n]
        self.query_start = np.zeros(len(batch) + 1, dtype=np.int32)  # [n + 1]
        np.add.accumulate(self.query_lens, out=self.query_start[1:])
        self.indices = {request_id: i for i, request_id in enumerate(batch.request_ids)}
        self.greedy = all(row.sampling.temperature == 0 for row in self.rows)
        self.has_adapters = any(row.adapter >= 0 for row in self.rows)
        self.has_images = any(row.images for row in self.rows)


class BatchSamples:
    """The samples of a batch: the token after the last one of each request, and after each one before its drafts.

    A sample is an index from 0 to S. Those of a request follow each other, in the order of their positions. Samples of
    unfinished chunks are not wanted. Without drafts, S is the number of requests.
    """

    def __init__(self, batch: ScheduledBatch, rows: list[Row]) -> None:
        """`rows`: of each request."""
        self.num_requests, self.has_drafts = len(rows), bool(batch.num_drafts)
        self.rows = rows  # [S]
        self.unwanted = batch.partial  # samples, in ascending order
        if self.has_drafts:
            counts = np.array(batch.num_drafts) + 1
            ends = counts.cumsum()
            requests = np.arange(len(rows)).repeat(counts)
            from_end = ends[requests] - 1 - np.arange(ends[-1])
            token_index = np.cumsum(batch.num_tokens)[requests] - 1 - from_end
            self.first = [0, *ends.tolist()]  # [n + 1]: each request's first sample, and the end
            self.requests: list[int] = requests.tolist()  # [S]: index of each sample's request
            self.token_index: list[int] = token_index.tolist()  # [S]: the token before the sample, in the step
            self.drafts = token_index[1:][requests[1:] == requests[:-1]]  # each draft's index in the step
            self.rows = [rows[i] for i in self.requests]
            self.unwanted = [self.first[i] for i in batch.partial]  # an unfinished chunk has no drafts
            # [3, S]: request, how many of its tokens follow the one before the sample, and the index of that one
            self.columns = torch.from_numpy(np.stack((requests, from_end, token_index)))
            self.all_drafted = 0 not in batch.num_drafts
            self._columns = self.columns.numpy().astype(np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def request_of(self, sample: int) -> int:
        """Return the index in the batch of a sample's request."""
        return self.requests[sample] if self.has_drafts else sample

    def of_request(self, index: int) -> range:
        """Return the samples of a request, given its index in the batch."""
        return range(self.first[index], self.first[index + 1]) if self.has_drafts else range(index, index + 1)

    @cached_property
    def undrafted(self) -> Tensor:
        """The rows of requests without drafts, in a batch that has some, and their samples: [2, m] int64."""
        samples = [self.first[i] for i in range(self.num_requests) if len(self.of_request(i)) == 1]
        return torch.tensor([[self.rows[sample].index for sample in samples], samples])

    def positions(self, context_lens: np.ndarray) -> np.ndarray:
        """Return the positions of the tokens to sample, [S] int32, given the requests' context lengths [n] int32."""
        if not self.has_drafts:
            return context_lens
        requests, from_end, _ = self._columns
        positions: np.ndarray = context_lens[requests] - from_end
        return positions


@dataclass(slots=True)
class PackedStep:
    """A step in the packed buffer; see `kernels.data.layout`."""

    packed: Tensor  # int32, on the CPU (pinned if the device is a GPU)
    segment: int
    num_seqs: int  # with padding; of a split step, whose sequences are its tokens, these
    num_tokens: int  # with padding
    num_decodes: int  # with padding
    members: Members  # without padding
    context_lens: np.ndarray  # [n] int32: of requests, without padding
    positions: np.ndarray  # [S] int32: of the tokens to sample, without padding


class InputBatch:
    """Owns the device rows: `num_rows` for requests, and a last one for padding.

    The device's record of a row determines its length. The CPU counts along, to know which tokens to send and how long
    the longest context is.
    """

    def __init__(
        self,
        num_rows: int,
        num_groups: int,
        max_blocks: int,
        device: Device,
        num_buffers: int = RING,
        max_drafts: int = 0,
    ) -> None:
        """`max_blocks`: entries of a block table. `num_buffers`: for packed steps, see `RunnerOptions`. `max_drafts`:
        of all requests in a step.
        """
        self.slot_of: Callable[[Adapter | None], int] = lambda adapter: -1  # see `AdapterSlots.slot_of`
        self.shift_of: Callable[[Sequence[ImageInput]], int] = lambda images: 0  # see `ImageReader.shift_of`
        self.num_rows, self.num_groups, self.device = num_rows, num_groups, device
        self.max_samples = num_rows + max_drafts
        self.state = RowState.allocate(num_rows + 1, num_groups, max_blocks, device.torch_device)
        # The same memory on a CPU, where PyTorch would take longer for a few numbers.
        self._records = None if device.is_accelerator else self.state.records.numpy()
        self.rows: dict[str, Row] = {}
        self.num_scored = 0  # rows with requested log-probabilities of the prompt
        self.num_pooled = 0  # rows of pooling requests
        # For each row: tokens computed by the steps packed so far, and tokens known when a request got the row.
        self._num_computed = np.zeros(num_rows, dtype=np.int32)
        self._num_known = np.zeros(num_rows, dtype=np.int32)
        self._num_blocks = np.zeros((num_groups, num_rows), dtype=np.int32)  # used entries of the block tables
        self._members: dict[int, Members] = {}  # of recent batches, by their `id`
        self._free = list(range(num_rows - 1, -1, -1))
        self._ring = [self._new_buffer(4096) for _ in range(num_buffers)]
        self._newest = 0  # index in the ring

    def apply(self, output: SchedulerOutput) -> tuple[list[Row], list[Row]]:
        """Free the rows of removed requests, then assign rows to new requests. Returns both lists of rows."""
        if output.removed or output.new_requests:
            self._members.clear()
        removed = []
        for request_id in output.removed:
            row = self.rows.pop(request_id, None)
            if row is not None:
                removed.append(row)
                self._free.append(row.index)
                self.num_scored -= row.sampling.prompt_logprobs is not None
                self.num_pooled -= row.pooling is not None
        return removed, self._admit(output.new_requests) if output.new_requests else []

    def _admit(self, new_requests: list[NewRequest]) -> list[Row]:
        rows = []
        records = np.zeros((len(new_requests), layout.NUM_COLUMNS), dtype=np.int64)
        floats = records.view(np.float32)[:, ::2]  # see `RowState.floats`
        for new, record, values in zip(new_requests, records, floats, strict=True):
            sampling, index = new.request.sampling, self._free.pop()
            tokens = np.array(new.token_ids, dtype=np.int32)
            adapter, images = self.slot_of(new.request.adapter), new.request.images
            row = Row(index, tokens, new.num_prompt_tokens, sampling, new.request.pooling, adapter, images)
            rows.append(row)
            self.rows[new.request_id] = row
            self._num_computed[index], self._num_known[index] = new.num_computed_tokens, len(tokens)
            self._num_blocks[:, index] = 0
            self.num_scored += sampling.prompt_logprobs is not None
            self.num_pooled += new.request.pooling is not None
            record[layout.NUM_COMPUTED], record[layout.SEED] = new.num_computed_tokens, new.seed
            shift = self.shift_of(images) << layout.SHIFT_BITS
            record[layout.TOP_K], record[layout.ADAPTER] = shift | max(sampling.top_k, 0), row.adapter + 1
            values[layout.TEMPERATURE], values[layout.TOP_P] = sampling.temperature, sampling.top_p
            values[layout.MIN_P] = sampling.min_p
        at = self.device.upload(torch.tensor([row.index for row in rows]))
        self.state.records[at] = self.device.upload(torch.from_numpy(records))
        return rows

    def clear(self) -> None:
        """Free all rows."""
        self.rows.clear()
        self.num_scored = self.num_pooled = 0
        self._members.clear()
        self._free = list(range(self.num_rows - 1, -1, -1))

    def pack(
        self, output: SchedulerOutput, padded_seqs: int = 0, padded_tokens: int = 0, splits: bool = False
    ) -> PackedStep:
        """Write the step into the next packed buffer, padded to `padded_seqs` sequences; 0: no padding.

        Each padding sequence has one token. With `padded_tokens`, the first padding sequence instead has all tokens
        that are missing to that number, and the others have none. `splits`: each token is a sequence, and successive
        ones of a row are its newest token and its drafts; see `kernels.data.layout`.
        """
        members = self.members(output.batch)
        at, real, tokens_end = members.row_indices, len(members.rows), output.batch.total_num_tokens
        repeats = members.query_lens if splits else None  # sequences of each request; None: one
        if splits:
            real = tokens_end
        padding = max(padded_seqs - real, 0)
        num_seqs, num_tokens = real + padding, padded_tokens or tokens_end + padding
        segment = segment_of(num_seqs)
        starts = self._num_computed[at]
        context_lens = starts + members.query_lens
        self._num_computed[at] = context_lens
        updates, num_updates = self._block_updates(output, members, repeats)

        head = (2 + 2 * self.num_groups) * segment
        size = head + num_tokens + max(len(updates), 1)  # as `packed_size` says
        packed, view = self._buffer(size)
        rows, query_start, *of_groups = view[:head].reshape(-1, segment)
        rows[:real], rows[real:] = at if repeats is None else at.repeat(repeats), self.num_rows
        query_start[: real + 1] = members.query_start if repeats is None else np.arange(real + 1)
        query_start[real + 1 : num_seqs + 1] = (
            num_tokens if padded_tokens else np.arange(tokens_end + 1, num_tokens + 1)
        )
        self._pack_updates(of_groups, at, num_updates, repeats)
        tokens = view[head:size]
        tokens[:tokens_end], tokens[tokens_end:num_tokens] = -1, 0
        for i in (starts < self._num_known[at]).nonzero()[0]:  # all but these compute their row's newest token
            first, known = members.query_start[i], members.rows[i].token_ids[starts[i] : context_lens[i]]
            tokens[first : first + len(known)] = known
        if output.drafts:
            in_order = (output.drafts.get(request_id, ()) for request_id in output.batch.request_ids)
            tokens[members.samples.drafts] = list(chain.from_iterable(in_order))
        tokens[num_tokens : num_tokens + len(updates)] = updates
        num_decodes = (real if splits else output.batch.num_decodes) + (0 if padded_tokens else padding)
        positions = members.samples.positions(context_lens)
        return PackedStep(packed[:size], segment, num_seqs, num_tokens, num_decodes, members, context_lens, positions)

    def packed_size(
        self, output: SchedulerOutput, padded_seqs: int = 0, padded_tokens: int = 0, splits: bool = False
    ) -> int:
        """Return the length that the packed step has with this padding, in words of 4 bytes."""
        real = output.batch.total_num_tokens if splits else len(output.batch)
        num_seqs = max(padded_seqs, real)
        num_tokens = padded_tokens or output.batch.total_num_tokens + num_seqs - real
        num_updates = 0
        if output.new_block_ids or output.new_requests:
            tables = output.new_block_ids | {new.request_id: new.block_ids for new in output.new_requests}
            times = {name: 1 + len(drafts) for name, drafts in output.drafts.items()} if splits else {}
            num_updates = sum(times.get(name, 1) * sum(map(len, of_groups)) for name, of_groups in tables.items())
        return (2 + 2 * self.num_groups) * segment_of(num_seqs) + num_tokens + max(num_updates, 1)

    def _block_updates(
        self, output: SchedulerOutput, members: Members, repeats: np.ndarray | None
    ) -> tuple[list[int], np.ndarray | None]:
        """Return the blocks to append to block tables, group after group, each in batch order, and their counts.

        The counts, [G, n] int32, are per group and request; None if there are no new blocks. `repeats` [n]: how many
        sequences append a request's blocks, each all of them; None: one.
        """
        new_blocks = output.new_block_ids
        if output.new_requests:
            new_blocks = new_blocks | {new.request_id: new.block_ids for new in output.new_requests}
        if not new_blocks:
            return [], None
        updates: list[int] = []
        num_updates = np.zeros((self.num_groups, len(output.batch)), dtype=np.int32)
        in_order = sorted((members.indices[request_id], tables) for request_id, tables in new_blocks.items())
        for group, counts in enumerate(num_updates):
            for i, tables in in_order:
                counts[i] = len(tables[group])
                updates += tables[group] if repeats is None else tables[group] * int(repeats[i])
        return updates, num_updates

    def _pack_updates(
        self, segments: list[np.ndarray], at: np.ndarray, num_updates: np.ndarray | None, repeats: np.ndarray | None
    ) -> None:
        """Write `update_start` and `update_at` of each group, for rows `at` [n]. `repeats`: see `_block_updates`."""
        if num_updates is None:
            for update_start in segments[::2]:
                update_start[:] = 0
            return
        real, end = len(at) if repeats is None else int(repeats.sum()), 0
        for group, counts in enumerate(num_updates):
            update_start, update_at = segments[2 * group], segments[2 * group + 1]
            update_start[0] = end
            np.add.accumulate(counts if repeats is None else counts.repeat(repeats), out=update_start[1 : real + 1])
            update_start[1 : real + 1] += end
            end = update_start[real]
            update_start[real + 1 :] = end
            first = self._num_blocks[group, at]
            update_at[:real] = first if repeats is None else first.repeat(repeats)
            self._num_blocks[group, at] += counts

    def rewind(self, rewinds: dict[str, tuple[int, int]]) -> None:
        """Set rows to the outcome of their drafts: request id → number of computed tokens, and newest token."""
        assert (layout.NUM_COMPUTED, layout.LAST_TOKEN) == (0, 1)
        values = np.array([(self.rows[request_id].index, *outcome) for request_id, outcome in rewinds.items()])
        self._num_computed[values[:, 0]] = values[:, 1]
        if self._records is not None:
            self._records[values[:, 0], :2] = values[:, 1:]
            return
        on_device = self.device.upload(torch.from_numpy(values))
        self.state.records[on_device[:, 0], :2] = on_device[:, 1:]

    def expand_samples(self, packed: PackedStep, step: StepTensors, with_params: bool) -> None:
        """Spread what the step has for the last token of each sequence over all samples of a step with drafts.

        `with_params`: not only the rows.
        """
        samples, own = step.samples, packed.members.samples
        n = len(own)
        requests, from_end, token_index = self.device.upload(own.columns)
        samples.rows[:n] = samples.rows[requests]
        samples.token_index[:n] = token_index
        samples.next_position[:n] = samples.next_position[requests] - from_end
        if with_params:
            for column in (samples.seed, samples.temperature, samples.top_p, samples.min_p, samples.top_k):
                column[:n] = column[requests]

    def set_newest(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Take the new tokens of these requests, at least one each, which another rank sampled."""
        known = [(self.rows[name].index, tokens[-1]) for name, tokens in token_ids.items() if name in self.rows]
        if known:
            rows, tokens = self.device.upload(torch.tensor(known)).T
            self.state.last_token[rows] = tokens.to(self.state.last_token.dtype)

    def num_computed(self, row: Row) -> int:
        """Return how many of the row's tokens the steps packed so far compute."""
        return int(self._num_computed[row.index])

    def num_blocks(self, packed: PackedStep) -> np.ndarray:
        """Return the number of entries in the block tables of a step's requests: [G, n] int32."""
        found: np.ndarray = self._num_blocks[:, packed.members.row_indices]
        return found

    def defer(self, packed: PackedStep, step: StepTensors, indices: list[int]) -> None:
        """Let requests without drafts for which the last step sampled nothing compute its last token again in the next
        step.
        """
        self._num_computed[packed.members.row_indices[indices]] -= 1
        samples, own = step.samples, packed.members.samples
        at = self.device.upload(torch.tensor([own.of_request(i).start for i in indices]))
        rows, newest = samples.rows[at], step.input_ids[samples.token_index[at]]
        self.state.last_token.scatter_(0, rows, newest)
        self.state.num_computed.scatter_(0, rows, samples.next_position[at] - 1)

    def members(self, batch: ScheduledBatch) -> Members:
        """Return the data derived from a batch, cached for successive steps."""
        found = self._members.get(id(batch))
        if found is None:
            if len(self._members) == MOST_RECENT:
                self._members.clear()
            found = self._members[id(batch)] = Members(batch, self.rows)
        return found

    def _buffer(self, size: int) -> tuple[Tensor, np.ndarray]:
        self._newest = (self._newest + 1) % len(self._ring)
        length = len(self._ring[self._newest][1])
        if length < size:
            self._ring[self._newest] = self._new_buffer(max(size, 2 * length))
        return self._ring[self._newest]

    def _new_buffer(self, size: int) -> tuple[Tensor, np.ndarray]:
        """Allocate a tensor, and return it with a NumPy view of its memory."""
        buffer = self.device.pinned(size, dtype=torch.int32)
        return buffer, buffer.numpy()


def segment_of(num_seqs: int) -> int:
    """Return the length of a segment in the packed buffer for `num_seqs` sequences, in whole 16-byte words."""
    return -(-(num_seqs + 1) // 4) * 4
