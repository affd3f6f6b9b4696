"""Weights sent over a process group of two, such as from a training process to an engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

PIECE_BYTES = 256 << 20  # sent at a time
SECONDS = 300.0  # to wait for the other side
BACKENDS = ("nccl", "gloo")
SENDER, RECEIVER = 0, 1
DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class _Connection:
    """A process group of two, beside all others of this process."""

    def __init__(self, address: str, rank: int, seconds: float) -> None:
        parts = urlsplit(address)
        if parts.scheme not in BACKENDS or parts.hostname is None or parts.port is None:
            raise ValueError(f"an address is nccl://HOST:PORT or gloo://HOST:PORT, got {address!r}")
        timeout = timedelta(seconds=seconds)
        # The sender listens.
        self.store = TCPStore(parts.hostname, parts.port, 2, is_master=rank == SENDER, timeout=timeout)
        self._peer = 1 - rank
        if parts.scheme == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(self.store, rank, 2, options)
        else:
            self.device = torch.device("cpu")
            self._group = dist.ProcessGroupGloo(self.store, rank, 2, timeout)

    def send(self, piece: Tensor) -> None:
        self._group.send([piece], self._peer, 0).wait()

    def receive(self, piece: Tensor) -> None:
        self._group.recv([piece], self._peer, 0).wait()


def send_weights(tensors: Mapping[str, Tensor], address: str, seconds: float = SECONDS) -> None:
    """Send tensors, by the checkpoint's names, to an engine whose weights are replaced by those from this address:
    `LLM.update_weights(address)`, or a server's `POST /v1/weights?path=ADDRESS`, called meanwhile.

    `address`: "nccl://HOST:PORT", from the current GPU to another one, or "gloo://HOST:PORT", over the CPU's memory;
    this side listens there. Returns once all is received. Raises `RuntimeError` if the other side does not come within
    so many seconds, or ends. For networks whose machines are all trusted: every client that connects gets the weights.
    """
    connection = _Connection(address, SENDER, seconds)
    names = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    connection.store.set("tensors", json.dumps(names))
    for tensor in tensors.values():
        for piece in _pieces(tensor.detach().contiguous()):
            connection.send(piece.to(connection.device))
    connection.store.wait(["received"], timedelta(seconds=seconds))


def receive_weights(address: str, seconds: float = SECONDS) -> dict[str, Tensor]:
    """Return the tensors that `send_weights` sends, in the CPU's memory. Raises `RuntimeError` if none come, and
    `ValueError` for a dtype that is not known here.
    """
    connection = _Connection(address, RECEIVER, seconds)
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=connection.device)
    received = {}
    for name, dtype, shape in json.loads(connection.store.get("tensors")):
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} has the dtype {dtype}, which this version of PyTorch does not know")
        received[name] = torch.empty(shape, dtype=DTYPES[dtype])
        for piece in _pieces(received[name]):
            connection.receive(buffer[: len(piece)])
            piece.copy_(buffer[: len(piece)])
    connection.store.set("received", "")
    return received


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Return views of a contiguous tensor's bytes."""
    return list(tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES)) if tensor.numel() else []


def main(address: str, folder: str) -> None:
    """Write what comes from the address to a folder. Ends with the reason if nothing does."""
    from safetensors.torch import save_file

    try:
        save_file(receive_weights(address), Path(folder, "model.safetensors"))
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error).partition("\n")[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
