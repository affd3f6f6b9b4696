"""CUDA graphs of decode steps, by padded batch size, and of small steps with prefill, by padded number of tokens."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from engine.models.files import Progress
from engine.worker.attention.group_attention import CapturedPrefills
from engine.worker.decode_step import DecodeStep
from engine.worker.device import Device, Graph
from engine.worker.executor import Computed, Padding, StepRequest
from engine.worker.forward_pass import ForwardPass, StepSize
from engine.worker.input_batch import PackedStep
from engine.worker.options import RunnerOptions


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes to capture: 1, 2, 4, steps of 8 to 64, 16 to 256, 64 to 512, 128 to 1024, and `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 64), *range(512, 1025, 128)]
    return sorted({s for s in sizes if s < max_num_seqs} | {min(max_num_seqs, 1024)})


def prefix_sizes(sizes: Sequence[int]) -> list[int]:
    """Return those of the sizes to capture for steps with a common prefix: 2^n, from 8 on, and the largest."""
    return [size for size in sizes if size >= 8 and (size & (size - 1) == 0 or size == sizes[-1])]


MEASURED = 3  # replays that are measured

# Token counts of steps with prefill to capture. In larger steps the GPU takes longer than launching its kernels.
PREFILL_SIZES = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


class DecodeGraphs:
    """Graphs of decode steps, and on the last stage of their filtered sampling, for each size.

    Owns the static buffer from which the graphs read packed steps.
    """

    def __init__(
        self,
        device: Device,
        work: DecodeStep,
        buffer: Tensor,
        sizes: list[int],
        progress: Progress,
        has_adapters: bool = False,
        splits_drafts: bool = False,
        has_common_prefix: bool = False,
    ) -> None:
        """`has_adapters`: for steps in which some sequences use LoRA adapters, else for those without. `splits_drafts`:
        see `RunnerOptions`. `has_common_prefix`: only for steps in which some decodes have one.
        """
        self._has_adapters, self._splits_drafts = has_adapters, splits_drafts
        self._has_common_prefix = has_common_prefix
        self._device, self._work, self._buffer, self._sizes = device, work, buffer, sizes
        self._graphs: dict[int, Graph] = {}
        self._filtered: dict[int, Graph] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        shared: Graph | None = None
        for done, size in enumerate(sizes[::-1]):
            progress("capturing", done, len(sizes))
            run = partial(work.run, buffer, size, has_adapters, has_common_prefix)
            outputs = run()  # compile and select algorithms before the capture
            if work.is_last:
                work.sample_filtered(*outputs)
            self._graphs[size], self._outputs[size] = device.capture(run, shared)
            shared = shared or self._graphs[size]
            if work.is_last:
                filtered = partial(work.sample_filtered, *self._outputs[size])
                self._filtered[size], _ = device.capture(filtered, shared)
        progress("capturing", len(sizes), len(sizes))

    @property
    def max_words(self) -> int:
        return len(self._buffer)

    def fits(self, step: StepRequest) -> Padding | None:
        """Return the captured size for a step that only decodes, with drafts if they are sequences."""
        splits = self._splits_drafts and not step.only_decodes and step.samples_every_token
        if step.needs_every_token or not (step.only_decodes or splits) or step.has_adapters != self._has_adapters:
            return None
        if self._has_common_prefix and not step.batch.has_common_prefix:
            return None
        at = bisect.bisect_left(self._sizes, step.batch.total_num_tokens)
        return Padding(self._sizes[at], splits=splits) if at < len(self._sizes) else None

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        """Queue a step that is packed for a captured size. The results belong to the graph."""
        self._buffer[: len(packed.packed)].copy_(packed.packed, non_blocking=True)
        self._graphs[packed.num_seqs].replay()
        outputs = self._outputs[packed.num_seqs]
        if not self._work.is_last:
            return Computed(hidden=outputs[0], is_graph=True)
        own_logits, tokens = outputs
        logits = GraphLogits(self._work, own_logits, self._filtered[packed.num_seqs])
        return Computed(logits=logits, tokens=tokens, is_graph=True)

    def seconds(self, packed: Tensor, size: int) -> float:
        """Measure the device's time for a packed step of a captured size, sampling included."""
        self._buffer[: len(packed)].copy_(packed)
        graph = self._graphs[size]
        graph.replay()
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(MEASURED):
            graph.replay()
        self._device.synchronize()
        return (time.perf_counter() - start) / MEASURED


class GraphLogits(NamedTuple):
    """The logits that a decode graph has left."""

    work: DecodeStep
    own_logits: Tensor  # [size, n]: of this rank's tokens
    filtered: Graph

    def gathered(self) -> Tensor:
        return self.work.gathered(self.own_logits)

    def sample_filtered(self, tokens: Tensor) -> Tensor:
        """Replay the graph of filtered sampling, which writes the graph's own `tokens`."""
        self.filtered.replay()
        return self.work.all_logits(len(tokens))


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The shape of a captured step with prefill. Smaller steps are padded."""

    num_tokens: int
    num_seqs: int  # incl. two for padding: the second last has all padding tokens, the last has none
    num_decodes: int  # among this many first sequences, those with one token may decode
    num_tiles: Mapping[int, int]  # of prefill attention, by queries per tile

    @classmethod
    def of_size(cls, num_tokens: int, max_num_seqs: int, decodes: bool, tile_queries: Iterable[int]) -> PrefillShape:
        """`decodes`: whether some sequences may decode. `tile_queries`: of the tiles of all cache groups."""
        seqs = min(num_tokens, max_num_seqs)
        more = min(num_tokens // 8, 32)  # partially filled tiles
        tiles = {queries: -(-num_tokens // queries) + more for queries in tile_queries}
        return cls(num_tokens, seqs + 2, seqs if decodes else 0, tiles)

    def holds(self, num_decodes: int, prefill_lens: Sequence[int]) -> bool:
        """Return whether a step with these decodes and prefill chunks of at most `num_tokens` tokens fits."""
        return (
            num_decodes + len(prefill_lens) <= self.num_seqs - 2
            and num_decodes <= self.num_decodes
            and all(sum(-(-n // queries) for n in prefill_lens) <= most for queries, most in self.num_tiles.items())
        )


def prefill_shapes(forward: ForwardPass, options: RunnerOptions) -> list[PrefillShape]:
    """Return the shapes of steps with prefill that are worth a graph, smallest first."""
    most = min(options.max_num_batched_tokens, options.max_model_len)
    decodes = all(each.decodes_beside_captured_prefills for each in forward.attentions)
    tile_queries = {each.tile_queries for each in forward.attentions} - {0}
    sizes = (size for size in PREFILL_SIZES if size <= most)
    return [PrefillShape.of_size(size, options.max_num_seqs, decodes, tile_queries) for size in sizes]


class PrefillGraphs:
    """Graphs of the forward pass of steps with prefill, for each shape.

    Owns the static buffers that the graphs read: packed steps, and tiles of prefill attention by queries per tile.
    """

    def __init__(
        self,
        device: Device,
        forward: ForwardPass,
        buffer: Tensor,
        shapes: list[PrefillShape],
        progress: Progress,
        has_adapters: bool = False,
    ) -> None:
        """`shapes`: smallest first. `has_adapters`: as that of `DecodeGraphs`."""
        self._has_adapters = has_adapters
        self._device, self._forward, self._shapes, self._buffer = device, forward, shapes, buffer
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
            work = partial(self._run_shape, shape)
            work()  # compile and select algorithms before the capture
            graph, hidden = device.capture(work, shared)
            shared = shared or graph
            self._graphs[shape.num_tokens] = graph, hidden
        progress("capturing", len(shapes), len(shapes))

    @torch.inference_mode()
    def _run_shape(self, shape: PrefillShape) -> Tensor:
        """Return the hidden states [T, hidden] of the step in the buffer."""
        tiles = {queries: tiles[: shape.num_tiles[queries]] for queries, tiles in self._tiles.items()}
        size = StepSize(shape.num_seqs, shape.num_tokens, shape.num_decodes, True, self._has_adapters)
        return self._forward.run(self._buffer, size, CapturedPrefills(tiles))

    @property
    def max_words(self) -> int:
        return len(self._buffer)

    def fits(self, step: StepRequest) -> Padding | None:
        """Return the next larger shape's size if it holds the step."""
        if step.only_decodes or step.counts_experts or step.has_adapters != self._has_adapters:
            return None
        shape = self._shape(step.batch.total_num_tokens)
        prefill_lens = step.batch.num_tokens[step.batch.num_decodes :]
        if shape is None or not shape.holds(step.batch.num_decodes, prefill_lens):
            return None
        return Padding(shape.num_seqs, shape.num_tokens)

    def _shape(self, num_tokens: int) -> PrefillShape | None:
        """Return the smallest shape with so many tokens or more."""
        at = bisect.bisect_left(self._shapes, num_tokens, key=lambda shape: shape.num_tokens)
        return self._shapes[at] if at < len(self._shapes) else None

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        """Queue a step packed for a shape. The hidden states of a stage before the last one belong to the graph."""
        batch, shape = step.batch, self._shape(packed.num_tokens)
        assert shape is not None
        self._buffer[: len(packed.packed)].copy_(packed.packed, non_blocking=True)
        n, context_lens = batch.num_decodes, packed.context_lens.tolist()
        for queries in self._tiles:
            tiles = kernels.make_prefill_tiles(batch.num_tokens[n:], context_lens[n:], queries)
            self._write_tiles(shape, queries, [(n + sequence, first) for sequence, first in tiles])
        graph, hidden = self._graphs[shape.num_tokens]
        graph.replay()
        if not self._forward.model.stage.is_last:
            return Computed(hidden=hidden)
        indices = self._forward.last_tokens(step, packed)
        return Computed(hidden=hidden[: batch.total_num_tokens] if indices is None else hidden[indices])

    def _write_tiles(self, shape: PrefillShape, queries: int, tiles: list[tuple[int, int]]) -> None:
        """Write the tiles. Padding tiles are of the last sequence, which has no tokens and writes nothing."""
        padding = [(shape.num_seqs - 1, 0)] * (shape.num_tiles[queries] - len(tiles))
        made = torch.tensor(tiles + padding, dtype=torch.int32)
        self._tiles[queries][: len(made)].copy_(self._device.upload(made))
