"""CUDA graphs of the decode step, for each padded batch size."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial

from torch import Tensor

from engine.models.progress import Progress
from engine.worker.device import Device, Graph


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, steps of 8 to 64, 16 to 256, 64 to 512, 128 to 1024; `max_num_seqs` is one of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 64), *range(512, 1025, 128)]
    return sorted({s for s in sizes if s < max_num_seqs} | {min(max_num_seqs, 1024)})


class DecodeGraphs:
    """`decode(packed, size)`, which gives logits and tokens, and `filtered(logits, tokens)`, captured for each of the sizes.

    Owns the static buffer that the graphs read packed steps from.
    """

    def __init__(
        self,
        device: Device,
        decode: Callable[[Tensor, int], tuple[Tensor, Tensor]],
        filtered: Callable[[Tensor, Tensor], None],
        buffer: Tensor,
        sizes: list[int],
        progress: Progress,
    ) -> None:
        self._sizes, self._buffer = sizes, buffer
        self._graphs: dict[int, tuple[Graph, Graph]] = {}
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}
        shared: Graph | None = None
        for done, size in enumerate(sizes[::-1]):
            progress("capturing", done, len(sizes))
            filtered(*decode(buffer, size))  # compile and choose algorithms outside the capture
            first, self._outputs[size] = device.capture(partial(decode, buffer, size), shared)
            shared = shared or first
            second, _ = device.capture(partial(filtered, *self._outputs[size]), shared)
            self._graphs[size] = first, second
        progress("capturing", len(sizes), len(sizes))

    def padded_size(self, num_seqs: int) -> int:
        """The captured size that `num_seqs` sequences run at; 0 when there is none."""
        at = bisect.bisect_left(self._sizes, num_seqs)
        return self._sizes[at] if at < len(self._sizes) else 0

    def fits(self, packed: Tensor) -> bool:
        """Whether a packed step goes into the buffer: one that appends very many blocks at once does not."""
        return len(packed) <= len(self._buffer)

    def run(self, size: int, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Queue the step, packed for a captured size; its (logits, tokens) stay the graph's own."""
        self._buffer[: len(packed)].copy_(packed, non_blocking=True)
        self._graphs[size][0].replay()
        return self._outputs[size]

    def run_filtered(self, size: int) -> None:
        """Queue what follows the last step, which was of this size, for its filtered and masked sequences."""
        self._graphs[size][1].replay()
