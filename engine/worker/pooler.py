"""Pools the hidden states of prompts, across chunks and steps, into embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import SchedulerOutput
from engine.core.params.pooling import OF_TOKENS
from engine.models.pooling_head import PoolingHead
from engine.worker.input_batch import InputBatch, PackedStep, Row


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings being copied from the device, of the requests at `indices` of the batch."""

    indices: list[int]
    num_rows: list[int]  # of each request: 1, or with an output for each token its tokens
    num_dimensions: list[int]
    vectors: Tensor  # [all rows, size] float32 on the CPU, filled when the step is done

    def read(self) -> dict[int, bytes]:
        """Return index → float32 values, empty if they are not finite. Call it when the step is done."""
        rows = np.split(self.vectors.numpy(), np.cumsum(self.num_rows)[:-1])
        found = {index: rows[i][:, : self.num_dimensions[i]] for i, index in enumerate(self.indices)}
        return {index: values.tobytes() if np.isfinite(values).all() else b"" for index, values in found.items()}


class Pooler:
    """Keeps a sum of hidden states for each device row. Allocated by the first request that asks for mean pooling."""

    def __init__(
        self,
        batch: InputBatch,
        norm: Callable[[Tensor], Tensor],
        hidden_size: int,
        head: PoolingHead | None = None,
    ) -> None:
        """`norm`: the model's final norm. `head`: computes outputs from pooled hidden states."""
        self._batch, self._norm, self._hidden_size, self._head = batch, norm, hidden_size, head
        self._size = hidden_size if head is None else head.num_outputs
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
        if indices and _pooling(all_rows[indices[0]]) == OF_TOKENS:  # as all requests of such a model
            return self._of_tokens(list(indices), lengths, hidden)
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
            at = np.where([_pooling(all_rows[i]) == "cls" for i in last], ends[last] - lengths[last], ends[last] - 1)
            parts.append(self._norm(hidden[self._ints(at)]).float())
        if means:
            rows, counts = self._ints(members.row_indices[means]), self._ints(packed.context_lens[means])
            parts.append(self._sums[rows] / counts.unsqueeze(1))
        vectors = torch.cat(parts)
        if self._head is not None:
            vectors = self._head(vectors)
        return self._finish(last + means, [all_rows[i] for i in last + means], vectors)

    def _of_tokens(self, indices: list[int], lengths: np.ndarray, hidden: Tensor) -> Embeddings:
        """Return an output for each token of all requests of a step, whose prompts are whole."""
        vectors = self._norm(hidden[: int(lengths.sum())]).float()
        vectors = vectors if self._head is None else self._head(vectors)
        sizes = [self._size] * len(indices)
        return Embeddings(indices, lengths[indices].tolist(), sizes, vectors.to("cpu", non_blocking=True))

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
        """Cut vectors [n, size] to the requested dimensions, normalise them and start copying them to the CPU."""
        params = [row.pooling for row in rows if row.pooling is not None]
        num_dimensions = [p.dimensions or self._size for p in params]
        sizes, normalize = self._columns(num_dimensions, [p.normalize for p in params])
        beyond = torch.arange(self._size, device=vectors.device) >= sizes.unsqueeze(1)
        vectors.masked_fill_(beyond, 0)
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_(min=1e-12)
        vectors /= lengths.masked_fill_(normalize.unsqueeze(1) == 0, 1)
        return Embeddings(indices, [1] * len(indices), num_dimensions, vectors.to("cpu", non_blocking=True))

    def _ints(self, values: np.ndarray) -> Tensor:
        return self._batch.device.upload(torch.from_numpy(values.astype(np.int64)))

    def _columns(self, *columns: Sequence[int]) -> tuple[Tensor, ...]:
        return self._ints(np.array(columns)).unbind()


def _pooling(row: Row) -> str:
    return "" if row.pooling is None else row.pooling.pooling


def _means(row: Row) -> bool:
    return _pooling(row) == "mean"
