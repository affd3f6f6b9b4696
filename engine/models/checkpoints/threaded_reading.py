"""Reads the tensors of safetensors files onto a GPU.

Pages of a mapped file would be copied by one thread at a time. Here several threads read pieces of a file into pinned
memory, from which the GPU copies them. Neighbouring tensors are one read, so that small ones cost little.
"""

from __future__ import annotations

import json
import os
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from engine.models.checkpoints.base import DTYPES

NUM_THREADS = 8
PIECE_BYTES = 16 << 20  # that a thread reads at once
REGION_BYTES = 256 << 20  # of tensors in one read, unless one alone has more
REGIONS_AHEAD = 2  # that are being read while tensors of another are used


class TensorRange(NamedTuple):
    """The bytes of a tensor in a file."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # byte offsets in the file
    stop: int


def tensor_ranges(file: BinaryIO) -> dict[str, TensorRange]:
    """Return the ranges of a file's tensors by name, as its header says. The file must be valid, and at its start."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: TensorRange(name, entry["dtype"], tuple(entry["shape"]), *(8 + size + at for at in entry["data_offsets"]))
        for name, entry in header.items()
    }


def is_readable(tensor: TensorRange) -> bool:
    """Return True if `read_tensors` can read a tensor without memory to read it into."""
    return tensor.dtype in DTYPES and tensor.stop - tensor.start <= REGION_BYTES


def regions(tensors: Sequence[TensorRange]) -> Iterator[list[TensorRange]]:
    """Group the tensors of a file by regions, in the order of the file. One read fetches a region."""
    region: list[TensorRange] = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if region and (tensor.start != region[-1].stop or tensor.stop - region[0].start > REGION_BYTES):
            yield region
            region = []
        region.append(tensor)
    if region:
        yield region


def read_tensors(
    file: BinaryIO, tensors: Sequence[TensorRange], device: torch.device, into: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Return the name and the value on `device` of each tensor, valid until the next one is asked for.

    `into`: memory of larger tensors, which are read straight into it. Raises `EOFError` if the file ends too early.
    """
    with _Threads(file.fileno(), device) as threads:
        ahead: deque[_Region] = deque()
        for region in regions(tensors):
            ahead.append(threads.start(region, into.get(region[0].name)))
            if len(ahead) > REGIONS_AHEAD:
                yield from ahead.popleft().values()
        while ahead:
            yield from ahead.popleft().values()


class _Region:
    """Tensors that lie side by side, and their bytes, which threads are reading."""

    def __init__(self, tensors: list[TensorRange], data: Tensor, pieces: list[Future[None]]) -> None:
        self.tensors, self.data, self.pieces = tensors, data, pieces

    def values(self) -> Iterator[tuple[str, Tensor]]:
        for piece in self.pieces:
            piece.result()
        for tensor in self.tensors:
            data = self.data[tensor.start - self.tensors[0].start : tensor.stop - self.tensors[0].start]
            dtype = DTYPES[tensor.dtype]
            if data.storage_offset() % dtype.itemsize:
                data = data.clone()
            yield tensor.name, data.view(dtype).view(tensor.shape)


class _Threads:
    """Threads that read pieces of an open file, each into pinned memory and from there to the device."""

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self.descriptor, self.device = descriptor, device
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            self._buffers.put(torch.empty(0, dtype=torch.uint8))  # until a thread needs it

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, tensors: list[TensorRange], into: Tensor | None) -> _Region:
        start, stop = tensors[0].start, tensors[-1].stop
        if into is None:
            data = torch.empty(stop - start, dtype=torch.uint8, device=self.device)
        else:
            data = into.view(-1).view(torch.uint8)
        # Its memory may still be read by what was queued before.
        free = torch.cuda.current_stream(self.device).record_event() if data.is_cuda else None
        pieces = range(start, stop, PIECE_BYTES)
        parts = data.split(PIECE_BYTES) if len(data) else ()
        return _Region(
            tensors, data, [self._pool.submit(self._read, *each, free) for each in zip(pieces, parts, strict=True)]
        )

    def _read(self, start: int, out: Tensor, free: torch.cuda.Event | None) -> None:
        """Fill `out` with bytes from `start` on, after `free`. Raises `EOFError`."""
        buffer = self._buffers.get()
        # Else pinned memory would belong to the first GPU, also in a process that uses another.
        with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
            try:
                if len(buffer) < len(out):
                    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=out.is_cuda)
                part = buffer[: len(out)]
                self._read_into(part.numpy(), start)
                if free is None:
                    out.copy_(part)
                else:
                    stream = torch.cuda.Stream()
                    with torch.cuda.stream(stream):
                        stream.wait_event(free)
                        out.copy_(part, non_blocking=True)
                    stream.synchronize()
            finally:
                self._buffers.put(buffer)

    def _read_into(self, memory: Any, start: int) -> None:
        """Fill a NumPy array of bytes. Raises `EOFError`."""
        done = 0
        while done < len(memory):
            count = os.preadv(self.descriptor, [memory[done:]], start + done)
            if not count:
                raise EOFError
            done += count
