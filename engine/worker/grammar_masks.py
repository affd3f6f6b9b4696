"""What grammars allow, on its way to the device. Knows rows of bits; no grammar, no request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class GrammarMasks:
    """Rows of a bit for each token, the lowest first: filled on the CPU, read on the device.

    There is one set of them. Whoever fills it has read the step before, so the device is done with what that one had.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        shape = num_rows, -(-vocab_size // 32)
        self._host = torch.empty(shape, dtype=torch.int32, pin_memory=on_gpu)
        self.on_device = torch.empty(shape, dtype=torch.int32, device=device) if on_gpu else self._host
        self.on_device.fill_(-1)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def rows(self, n: int) -> np.ndarray:
        """The first rows [n, (vocabulary + 31) // 32] int32, to be filled."""
        return self._host[:n].numpy()

    def to_device(self, n: int) -> Tensor:
        """The first rows as they are now. They travel beside what the device computes."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self.on_device[:n].copy_(self._host[:n], non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
        return self.on_device[:n]
