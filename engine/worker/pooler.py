"""Pools the hidden states of prompts, across chunks and steps, into embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import SchedulerOutput
from engine.worker.input_batch import InputBatch, PackedStep, Row


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings being copied from the device, of the requests at `indices` of the batch."""

    indices: list[int]
    num_dimensions: list[int]
    vectors: Tensor  # [n, hidden] float32 on the CPU, filled when the step is done

    def read(self) -> dict[int, bytes]:
        """Return index → float32 values, empty if they are not finite. Call it when the step is done."""
        rows = self.vectors.numpy()
        found = {index: rows[i, : self.num_dimensions[i]] for i, index in enumerate(self.indices)}
        return {index: values.tobytes() if np.isfinite(values).all() else b"" for index, values in found.items()}


class Pooler:
    """Keeps a sum of hidden states for each device row. Allocated by the first request that asks for mean pooling."""

    def __init__(self, batch: InputBatch, norm: Callable[[Tensor], Tensor], hidden_size: int) -> None:
        """`norm`: the model's final norm."""
        self._batch, self._norm, self._hidden_size = batch, norm, hidden_size
        self._sums = torch.zeros(0, hidden_size, device=batch.device.torch_device)  # [rows, hidden] float32

    def indices(self, output: SchedulerOutput) -> list[int]:
        """Return the indices of pooling requests in the step's batch."""
        if not self._batch.num_pooled:
            return []
        rows = self._batch.rows
        return [i for i, request_id in enumerate(output.batch.request_ids) if rows[request_id].pooling is not None]

    def pool(self, packed: PackedStep, indices: Sequence[int], hidden: Tensor) -> Embeddings | None:
        """Return the embeddings that this step completes, None if there are none.

        indices: from `indices`. hidden [T, hidden]: hidden states of the step's tokens, before the final norm.
        """
        members, all_rows = packed.members, packed.members.rows
        ends, lengths = members.query_start[1:], members.query_lens
        averaged = [i for i in indices if _means(all_rows[i])]
        if averaged:
            first = packed.context_lens[averaged] == lengths[averaged]
            self._add(hidden, ends[averaged], lengths[averaged], members.row_indices[averaged], first)
        complete = [i for i in indices if i not in members.batch.partial]
        if not complete:
            return None
        last = [i for i in complete if not _means(all_rows[i])]
        means = [i for i in complete if _means(all_rows[i])]
        parts = []
        if last:
            parts.append(self._norm(hidden[self._ints(ends[last] - 1)]).float())
        if means:
            rows, counts = self._ints(members.row_indices[means]), self._ints(packed.context_lens[means])
            parts.append(self._sums[rows] / counts.unsqueeze(1))
        return self._finish(last + means, [all_rows[i] for i in last + means], torch.cat(parts))

    def _add(self, hidden: Tensor, ends: np.ndarray, lengths: np.ndarray, rows: np.ndarray, first: np.ndarray) -> None:
        """Add each sequence's hidden states to its row's sum, in a fixed order. `first`: chunks that start a sum."""
        if not len(self._sums):
            self._sums = torch.zeros(self._batch.num_rows, self._hidden_size, device=hidden.device)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.repeat(ends - offsets[1:], lengths) + np.arange(offsets[-1])
        on_device = self._ints(np.concatenate([tokens, offsets, rows, first]))
        at, bounds, row, begins = on_device.split([len(tokens), len(offsets), len(rows), len(first)])
        states = self._norm(hidden[at]).float()
        sums = torch.segment_reduce(states, "sum", offsets=bounds, axis=0, unsafe=True)  # unsafe: bounds unchecked
        sums += self._sums[row].masked_fill_(begins.bool().unsqueeze(1), 0)
        self._sums.index_copy_(0, row, sums)

    def _finish(self, indices: list[int], rows: list[Row], vectors: Tensor) -> Embeddings:
        """Cut vectors [n, hidden] to the requested dimensions, normalise them and start copying them to the CPU."""
        params = [row.pooling for row in rows if row.pooling is not None]
        num_dimensions = [p.dimensions or self._hidden_size for p in params]
        sizes, normalize = self._columns(num_dimensions, [p.normalize for p in params])
        beyond = torch.arange(self._hidden_size, device=vectors.device) >= sizes.unsqueeze(1)
        vectors.masked_fill_(beyond, 0)
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_(min=1e-12)
        vectors /= lengths.masked_fill_(normalize.unsqueeze(1) == 0, 1)
        return Embeddings(indices, num_dimensions, vectors.to("cpu", non_blocking=True))

    def _ints(self, values: np.ndarray) -> Tensor:
        return self._batch.device.upload(torch.from_numpy(values.astype(np.int64)))

    def _columns(self, *columns: Sequence[int]) -> tuple[Tensor, ...]:
        return self._ints(np.array(columns)).unbind()


def _means(row: Row) -> bool:
    return row.pooling is not None and row.pooling.pooling == "mean"
