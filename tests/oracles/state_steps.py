"""Random steps of recurrent layers: sequences in chunks, over states in blocks of which few are held."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.core.kv.cache_groups import kept_blocks
from kernels import DeltaStates, StateContext
from tests.oracles.recurrent import Heads

# Block size, whether all steps decode, heads and dtype of a layer; names of these.
CASES = [
    (16, False, (2, 4, 16, 16), torch.float32),
    (16, True, (1, 3, 32, 48), torch.float32),
    (4, False, (2, 2, 24, 16), torch.float32),
    (32, False, (1, 2, 16, 32), torch.bfloat16),
    (128, False, (1, 1, 16, 16), torch.float32),
]
CASE_NAMES = ["plain", "decodes, three heads", "small blocks, odd heads", "large blocks, bfloat16", "blocks of 128"]


class StateSteps:
    """Sequences of random lengths whose tokens are computed in random chunks, several sequences in a step.

    Each step's tokens are those at `indices` of all tokens of all sequences, one sequence after the other, those with
    one token first. Some newest tokens are computed again, as after a deferral.
    """

    def __init__(self, seed: int, lengths: list[int], block_size: int, *, only_decodes: bool = False) -> None:
        self.draw, self.lengths, self.block_size = random.Random(seed), lengths, block_size
        self.only_decodes = only_decodes
        self.max_blocks = -(-max(lengths) // block_size)
        self.num_rows = len(lengths) + 2
        self.row_of = self.draw.sample(range(self.num_rows - 1), len(lengths))
        self.num_blocks = 4 * len(lengths) + 1
        self.free = self.draw.sample(range(self.num_blocks), self.num_blocks)
        self.tables = torch.full((self.num_rows, self.max_blocks), -1, dtype=torch.int32)
        self.num_computed = [0] * len(lengths)
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]

    def steps(self, device: str = "cpu") -> Iterator[tuple[torch.Tensor, StateContext]]:
        """Yield each step's `indices` [T] and context. A padding sequence ends each step, with tokens of index -1."""
        while any(done < length for done, length in zip(self.num_computed, self.lengths, strict=True)):
            parts: list[tuple[int, int, int]] = []  # sequences with their first and last position
            rows: list[int] = []
            starts, lens = [0], list[int]()
            indices: list[int] = []
            for i, length in enumerate(self.lengths):
                first = self.num_computed[i]
                if first and self.draw.random() < 0.2:  # the newest token again
                    first -= 1
                most = 1 if self.only_decodes else self.draw.choice([0, 1, 1, 2, 5, 17, 40, 130])
                end = min(first + most, length)
                if end == first:
                    continue
                self._hold(i, first, end)
                self.num_computed[i] = end
                parts.append((i, first, end))
            if not parts:
                continue
            parts.sort(key=lambda part: part[2] - part[1] > 1)
            num_decodes = sum(end - first == 1 for _, first, end in parts)
            for i, first, end in parts:
                rows.append(self.row_of[i])
                indices += range(self.starts[i] + first, self.starts[i] + end)
                starts.append(len(indices))
                lens.append(end)
            padding = 1 if self.only_decodes else self.draw.choice([0, 1, 3])
            rows.append(self.num_rows - 1)
            lens.append(1)
            indices += [-1] * padding
            starts.append(len(indices))
            context = self._context(rows, starts, lens, device, num_decodes)
            yield torch.tensor(indices, device=device), context

    def whole(self) -> list[tuple[torch.Tensor, StateContext]]:
        """Return the only step that computes the only sequence."""
        [length] = self.lengths
        self._hold(0, 0, length)
        return [(torch.arange(length), self._context(self.row_of, [0, length], [length], "cpu", 0))]

    def states(
        self,
        heads: Heads,
        dtype: torch.dtype = torch.float32,
        *,
        before: torch.dtype = torch.float32,
        of_channels: bool = False,
    ) -> DeltaStates:
        """Return unwritten states, with decays of heads or of channels."""
        num_keys, num_values, key_dim, value_dim = heads

        def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((self.num_blocks, *shape), torch.nan, dtype=dtype)

        decays = (num_values, key_dim) if of_channels else (num_values,)
        return DeltaStates(
            unwritten(num_values, key_dim, value_dim, dtype=before),
            unwritten(self.block_size, num_keys, key_dim, dtype=dtype),
            unwritten(self.block_size, num_values, value_dim),
            unwritten(self.block_size, *decays),
        )

    def compare(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], expected: Tensor, tolerance: float
    ) -> float:
        """Compare each step's compute(*inputs, context) with what is expected of all tokens. Returns the largest
        difference.
        """
        largest = 0.0
        for indices, context in self.steps():
            real = indices >= 0
            out = compute(*(torch.where(real[:, None], each[indices.clamp(min=0)], 0.5) for each in inputs), context)
            assert out.isfinite().all()
            got, want = out[real].double(), expected[indices[real]]
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
            largest = max(largest, float((got - want).abs().max()))
        return largest

    def collect(self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], device: str = "cpu") -> Tensor:
        """Return what compute(*inputs, context) gives in all steps for each token: [all tokens, ...]. A token that is
        computed again must get the same bytes.
        """
        found: Tensor | None = None
        for indices, context in self.steps(device):
            real = indices >= 0
            out = compute(*(torch.where(real[:, None], each[indices.clamp(min=0)], 0.5) for each in inputs), context)
            if found is None:
                found = out.new_full((sum(self.lengths), *out.shape[1:]), torch.nan)
            before = found[indices[real]]
            assert (before.isnan() | (before == out[real])).all()
            found[indices[real]] = out[real]
        assert found is not None
        return found

    def _context(
        self, rows: list[int], starts: list[int], lens: list[int], device: str, num_decodes: int
    ) -> StateContext:
        new = partial(torch.tensor, dtype=torch.int32, device=device)
        sequences = self.tables.to(device), new(rows), new(starts), new(lens)
        return StateContext.of_step(
            *sequences, starts[-1], self.block_size, only_decodes=self.only_decodes, num_decodes=num_decodes
        )

    def _hold(self, i: int, first: int, end: int) -> None:
        """Hold the blocks that a scheduler would, and no other."""
        table, size = self.tables[self.row_of[i]], self.block_size
        kept = kept_blocks(first, end, size, caches=self.draw.random() < 0.5)
        needed = {(first - 1) // size} if first else set()
        for index in range(self.max_blocks):
            block = int(table[index])
            if block >= 0 and index not in kept | needed and index < first // size:
                self.free.insert(0, block)
                table[index] = -1
            elif block < 0 and index in kept:
                table[index] = self.free.pop()
