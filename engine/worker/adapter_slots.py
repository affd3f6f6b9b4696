"""LoRA adapters on a rank: in host memory, read by a thread, and in the device's slots, from which steps use them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import kernels
from engine.core.engine_request import Adapter
from engine.models.adapters import AdapterLayout, LoadedAdapter
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.lora import adapter_version
from engine.models.spec import ModelSpec
from engine.worker.device import Device, Event
from engine.worker.options import AdapterOptions
from kernels.data.layout import ADAPTER, RowState

DUMMY = Adapter("", "", "")  # that dummy requests have


@dataclass(slots=True)
class _Held:
    """An adapter in host memory, or one that a thread is reading."""

    ready: Future[LoadedAdapter]
    copied: Event | None = None  # the device has read it, as far as it was to


class AdapterSlots:
    """The adapters of a model. The engine decides which are in memory and in slots; all ranks do the same.

    Everything but the reading runs in the thread that launches steps. A slot is overwritten in the device's queue,
    after the steps that have used it.
    """

    def __init__(
        self, model: Decoder, spec: ModelSpec, options: AdapterOptions, dtype: torch.dtype, device: Device
    ) -> None:
        self._options, self._device = options, device
        self.layout = AdapterLayout(model, spec, options.max_rank, dtype)
        num_slots, where = options.num_slots, device.torch_device
        self._values = torch.empty(num_slots, self.layout.num_values, dtype=dtype, device=where)
        self._floats = torch.empty(num_slots, self.layout.num_floats, dtype=torch.float32, device=where)
        self.layout.attach(self._values, self._floats)
        self._slots: dict[str, int] = {}  # version of an adapter → its slot
        self._held: dict[str, _Held] = {}
        self._spare: deque[_Held] = deque()  # dropped adapters, whose memory can be used again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes

    def slot_of(self, adapter: Adapter | None) -> int:
        """Return the slot of a request's adapter, which is in one; -1: it has none. Dummy runs use any slot."""
        if adapter is None:
            return -1
        return 0 if adapter is DUMMY else self._slots[adapter.version]

    def tokens(
        self, packed: Tensor, segment: int, num_seqs: int, num_tokens: int, state: RowState
    ) -> kernels.AdapterTokens:
        """Return the slots of a packed step's tokens, computed on the device. See `kernels.data.layout`."""
        slots = state.records[packed[:num_seqs].long(), ADAPTER] - 1
        if num_tokens != num_seqs:
            ends = packed[segment + 1 : segment + num_seqs + 1]
            index = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
            slots = slots[torch.searchsorted(ends, index, right=True).clamp(max=num_seqs - 1)]
        return kernels.AdapterTokens(slots.int(), self._options.num_slots)

    def load(self, adapter: Adapter) -> Future[LoadedAdapter]:
        """Begin to read an adapter into host memory. The result is a `ModelError` if it cannot be used."""
        if (held := self._held.get(adapter.version)) is not None:
            return held.ready
        ready = self._thread.submit(self._read, adapter, self._spare.popleft() if self._spare else None)
        self._held[adapter.version] = _Held(ready)
        return ready

    def _allocated(self) -> LoadedAdapter:
        pinned, device = self._device.pinned, self._device.torch_device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # else it is the first GPU's
            return LoadedAdapter(
                pinned(self.layout.num_values, dtype=self._values.dtype),
                pinned(self.layout.num_floats, dtype=torch.float32),
            )

    @torch.inference_mode()
    def _read(self, adapter: Adapter, spare: _Held | None) -> LoadedAdapter:
        """Read an adapter into new memory, or that of a dropped one once the device has read it."""
        if spare is not None and spare.copied is not None:
            spare.copied.synchronize()
        folder = Path(adapter.path)
        if adapter_version(folder) != adapter.version:
            raise ModelError(f"{folder}: its files have changed since the adapter was loaded; load it again")
        into = self._allocated() if spare is None else spare.ready.result()
        self.layout.read(folder, into)
        return into

    def drop(self, adapter: Adapter) -> None:
        """Forget an adapter in host memory. Unknown ones are ignored; one that is in a slot stays there."""
        held = self._held.pop(adapter.version, None)
        if held is not None:
            held.ready.cancel()
            if held.ready.done() and not held.ready.cancelled() and held.ready.exception() is None:
                self._spare.append(held)

    @torch.inference_mode()
    def place(self, adapter: Adapter, slot: int) -> None:
        """Queue the copy of an adapter in host memory to a slot that no unfinished request uses."""
        held = self._held[adapter.version]
        loaded = held.ready.result()
        self._slots = {version: at for version, at in self._slots.items() if at != slot}
        self.layout.place(loaded, slot, self._values, self._floats)
        held.copied = self._device.record_event()
        self._slots[adapter.version] = slot

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
