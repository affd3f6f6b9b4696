"""Token histories on the device, for requests with processors that need them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.worker.device import Device

DTYPE = torch.int32


def history_bytes(num_slots: int, max_len: int) -> int:
    """Return the memory of a history with `num_slots` slots of `max_len` tokens."""
    return num_slots * max_len * DTYPE.itemsize


class TokenHistory:
    """A slot for each request that needs one: its tokens by position, including the newest, known only to the device.

    The first such request allocates `history_bytes`, which the memory plan leaves free.
    """

    def __init__(self, num_slots: int, max_len: int, device: Device) -> None:
        self._num_slots, self._max_len, self._device = num_slots, max_len, device
        self._free: list[int] = []
        self.tokens = torch.empty(0, max_len, dtype=DTYPE, device=device.torch_device)  # [slots, max_len]

    def take(self, token_ids: np.ndarray) -> int:
        """Allocate a slot and fill it with these tokens."""
        if not len(self.tokens):
            self.tokens = self._device.zeros(self._num_slots, self._max_len, dtype=DTYPE)
            self._free = list(range(self._num_slots - 1, -1, -1))
        slot = self._free.pop()
        self.put(slot, 0, token_ids)
        return slot

    def put(self, slot: int, position: int, token_ids: np.ndarray) -> None:
        """Store successive tokens from a position on."""
        self.tokens[slot, position : position + len(token_ids)] = self._device.upload(torch.from_numpy(token_ids))

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def read(self, slots: Tensor, num_tokens: int) -> Tensor:
        """Return the first `num_tokens` tokens of slots [n] int64: [n, num_tokens] int64."""
        return self.tokens[slots, :num_tokens].long()

    def recent(self, slots: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
        """Return the last `num_tokens` of `lengths` tokens: slots, lengths [n] int64 → [n, num_tokens] int32."""
        at = lengths.unsqueeze(1) + torch.arange(-num_tokens, 0, device=lengths.device)
        return self.tokens[slots.unsqueeze(1), at.clamp(min=0)]

    def append(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Store tokens at positions; slots, positions, token_ids [n] int64."""
        self.tokens[slots, positions] = token_ids.int()
