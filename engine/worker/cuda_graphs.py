"""CUDA graphs of decode steps, by padded batch size, and of small steps with prefill, by padded number of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.core.batch import SchedulerOutput
from engine.models.files import Progress
from engine.worker.device import Device, Graph


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes to capture: 1, 2, 4, steps of 8 to 64, 16 to 256, 64 to 512, 128 to 1024, and `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 64), *range(512, 1025, 128)]
    return sorted({s for s in sizes if s < max_num_seqs} | {min(max_num_seqs, 1024)})


# Token counts of steps with prefill to capture. In larger steps the GPU takes longer than launching its kernels.
PREFILL_SIZES = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


class DecodeGraphs:
    """Graphs of `decode(packed, size)` and, for its results, of `filtered(own_logits, tokens)`, for each size.

    A pipeline stage before the last one has no `filtered`, and its `decode` returns hidden states [size, hidden] alone.
    Owns the static buffer from which the graphs read packed steps.
    """

    def __init__(
        self,
        device: Device,
        decode: Callable[[Tensor, int], tuple[Tensor, ...]],
        filtered: Callable[..., None] | None,
        buffer: Tensor,
        sizes: list[int],
        progress: Progress,
    ) -> None:
        self._sizes, self._buffer = sizes, buffer
        self._graphs: dict[int, Graph] = {}
        self._filtered: dict[int, Graph] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        shared: Graph | None = None
        for done, size in enumerate(sizes[::-1]):
            progress("capturing", done, len(sizes))
            outputs = decode(buffer, size)  # compile and select algorithms before the capture
            if filtered is not None:
                filtered(*outputs)
            self._graphs[size], self._outputs[size] = device.capture(partial(decode, buffer, size), shared)
            shared = shared or self._graphs[size]
            if filtered is not None:
                self._filtered[size], _ = device.capture(partial(filtered, *self._outputs[size]), shared)
        progress("capturing", len(sizes), len(sizes))

    def padded_size(self, num_seqs: int) -> int:
        """Return the captured size for `num_seqs` sequences, 0 if there is none."""
        at = bisect.bisect_left(self._sizes, num_seqs)
        return self._sizes[at] if at < len(self._sizes) else 0

    def fits(self, packed: Tensor) -> bool:
        """Whether a packed step fits the buffer: a step that appends very many blocks does not."""
        return len(packed) <= len(self._buffer)

    def run(self, size: int, packed: Tensor) -> tuple[Tensor, ...]:
        """Queue a step that is packed for a captured size. The results of `decode`, which are returned, belong to the graph."""
        self._buffer[: len(packed)].copy_(packed, non_blocking=True)
        self._graphs[size].replay()
        return self._outputs[size]

    def run_filtered(self, size: int) -> None:
        """Queue the `filtered` pass after the last step, which had this size."""
        self._filtered[size].replay()


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The shape of a captured step with prefill. Smaller steps are padded."""

    num_tokens: int
    num_seqs: int  # incl. two for padding: the second last has all padding tokens, the last has none
    num_decodes: int  # among this many first sequences, those with one token may decode
    num_tiles: Mapping[int, int]  # of prefill attention, by queries per tile

    @classmethod
    def of_size(cls, num_tokens: int, max_num_seqs: int, decodes: bool, tile_queries: set[int]) -> PrefillShape:
        seqs = min(num_tokens, max_num_seqs)
        more = min(num_tokens // 8, 32)  # partially filled tiles
        tiles = {queries: -(-num_tokens // queries) + more for queries in tile_queries}
        return cls(num_tokens, seqs + 2, seqs if decodes else 0, tiles)

    def holds(self, num_decodes: int, prefill_lens: Sequence[int]) -> bool:
        """Whether a step with these decodes and prefill chunks fits, given that it has at most `num_tokens` tokens."""
        return (
            num_decodes + len(prefill_lens) <= self.num_seqs - 2
            and num_decodes <= self.num_decodes
            and all(sum(-(-n // queries) for n in prefill_lens) <= most for queries, most in self.num_tiles.items())
        )


class PrefillGraphs:
    """Graphs of `forward(packed, shape, tiles)`, which returns hidden states, for each shape. `shapes`: smallest first.

    Owns the static buffers that the graphs read: packed steps, and tiles of prefill attention by queries per tile.
    """

    def __init__(
        self,
        device: Device,
        forward: Callable[[Tensor, PrefillShape, dict[int, Tensor]], Tensor],
        buffer: Tensor,
        shapes: list[PrefillShape],
        progress: Progress,
    ) -> None:
        self._device, self._shapes, self._buffer = device, shapes, buffer
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}
        largest, shared = shapes[-1], None
        self._tiles = {
            queries: torch.zeros(count, 2, dtype=torch.int32, device=buffer.device)
            for queries, count in largest.num_tiles.items()
        }
        for done, shape in enumerate(shapes[::-1]):
            progress("capturing", done, len(shapes))
            for queries in self._tiles:
                self._write_tiles(shape, queries, [])
            tiles = {queries: tiles[: shape.num_tiles[queries]] for queries, tiles in self._tiles.items()}
            work = partial(forward, buffer, shape, tiles)
            work()  # compile and select algorithms before the capture
            graph, hidden = device.capture(work, shared)
            shared = shared or graph
            self._graphs[shape.num_tokens] = graph, hidden
        progress("capturing", len(shapes), len(shapes))

    def shape_for(self, output: SchedulerOutput) -> PrefillShape | None:
        """Return the next larger shape if it holds the step, else None."""
        batch = output.batch
        at = bisect.bisect_left(self._shapes, batch.total_num_tokens, key=lambda shape: shape.num_tokens)
        if at == len(self._shapes) or not self._shapes[at].holds(
            batch.num_decodes, batch.num_tokens[batch.num_decodes :]
        ):
            return None
        return self._shapes[at]

    def fits(self, packed: Tensor) -> bool:
        """Whether a packed step fits the buffer: a step that appends very many blocks does not."""
        return len(packed) <= len(self._buffer)

    def run(
        self, shape: PrefillShape, packed: Tensor, num_decodes: int, query_lens: list[int], context_lens: list[int]
    ) -> Tensor:
        """Queue a step packed for a shape. The result, hidden states [num_tokens, hidden], belongs to the graph."""
        self._buffer[: len(packed)].copy_(packed, non_blocking=True)
        for queries in self._tiles:
            tiles = kernels.make_prefill_tiles(query_lens[num_decodes:], context_lens[num_decodes:], queries)
            self._write_tiles(shape, queries, [(num_decodes + sequence, first) for sequence, first in tiles])
        graph, hidden = self._graphs[shape.num_tokens]
        graph.replay()
        return hidden

    def _write_tiles(self, shape: PrefillShape, queries: int, tiles: list[tuple[int, int]]) -> None:
        """Write the tiles. Padding tiles are of the last sequence, which has no tokens and writes nothing."""
        padding = [(shape.num_seqs - 1, 0)] * (shape.num_tiles[queries] - len(tiles))
        made = torch.tensor(tiles + padding, dtype=torch.int32)
        self._tiles[queries][: len(made)].copy_(self._device.upload(made))
