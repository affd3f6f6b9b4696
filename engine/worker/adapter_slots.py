"""LoRA adapters on a rank: in host memory, read by a thread, and in the device's slots, from which steps use them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
from kernels.data.layout import RowState

# Pinned at start: allocating it while steps run would delay them by a tenth of a second.
PINNED_BYTES = 4 << 30
PART_BYTES = 32 << 20  # less than a millisecond's copy
DUMMY = Adapter("", "", "")  # that dummy requests have


@dataclass(slots=True)
class _Held:
    """An adapter in host memory, or one that a thread is reading."""

    memory: _Memory
    ready: Future[None]


@dataclass(slots=True)
class _Memory:
    """Host memory for an adapter."""

    content: LoadedAdapter
    copied: Event | None = None  # the device has read the content, as far as it was to


class AdapterSlots:
    """The adapters of a model. The engine decides which are in memory and in slots; all ranks do the same.

    Everything but the reading runs in the thread that launches steps. A slot is overwritten in the device's queue,
    after the steps that have used it.
    """

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        options: AdapterOptions,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self._options, self._device = options, device
        self.layout = AdapterLayout(model, spec, options.max_rank, dtype, options.experts, options.max_tokens)
        num_slots, where = options.num_slots, device.torch_device
        self._values = torch.empty(num_slots, self.layout.num_values, dtype=dtype, device=where)
        self._floats = torch.empty(num_slots, self.layout.num_floats, dtype=torch.float32, device=where)
        self.layout.attach(self._values, self._floats)
        # The slots of the newest step's tokens, which its graph writes; on a CPU `tokens` sets them. None: only layers
        # within the step read them.
        self._newest: Tensor | None = None
        self._has_head = model.lm_head.has_adapters
        self._slots: dict[str, int] = {}  # version of an adapter → its slot
        self._held: dict[str, _Held] = {}
        num_pinned = min(options.num_loaded, PINNED_BYTES // max(self.slot_bytes, 1) + 1)
        self._spare = deque(_Memory(self._allocated(device.pinned)) for _ in range(num_pinned))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes

    @property
    def num_parts(self) -> int:
        """In how many parts adapters are copied to their slots, one before each step, so that no step waits long."""
        return max(-(-self.slot_bytes // PART_BYTES), 1)

    def slot_of(self, adapter: Adapter | None) -> int:
        """Return the slot of a request's adapter, which is in one; -1: it has none. Dummy runs use any slot."""
        if adapter is None:
            return -1
        return 0 if adapter is DUMMY else self._slots[adapter.version]

    def tokens(
        self, packed: Tensor, segment: int, num_seqs: int, num_tokens: int, state: RowState
    ) -> kernels.AdapterTokens:
        """Return the slots of a packed step's tokens, computed on the device. See `kernels.data.layout`."""
        slots = kernels.adapter_slots(packed, segment, num_seqs, num_tokens, state)
        if self._newest is not None:
            if self._device.is_accelerator:
                slots = self._newest[:num_tokens].copy_(slots)
            else:
                self._newest = slots
        return kernels.AdapterTokens(slots, self._options.num_slots)

    def reserve_tokens(self, count: int) -> None:
        """Reserve memory for the slots of a step's tokens, at most `count`, if adapters may change the output head."""
        if self._has_head:
            self._newest = torch.full((count,), -1, dtype=torch.int32, device=self._values.device)

    def of_newest(self, tokens: slice | Tensor) -> kernels.AdapterTokens | None:
        """Return the adapters of some tokens of the newest step, for the output head. None: no adapter changes it."""
        return None if self._newest is None else kernels.AdapterTokens(self._newest[tokens], self._options.num_slots)

    def load(self, adapter: Adapter) -> Future[None]:
        """Begin to read an adapter into host memory. The result is a `ModelError` if it cannot be used."""
        if (held := self._held.get(adapter.version)) is not None:
            return held.ready
        memory = self._spare.popleft() if self._spare else _Memory(self._allocated(torch.empty))
        ready = self._thread.submit(self._read, adapter, memory)
        self._held[adapter.version] = _Held(memory, ready)
        return ready

    def _allocated(self, allocate: Callable[..., Tensor]) -> LoadedAdapter:
        return LoadedAdapter(
            allocate(self.layout.num_values, dtype=self._values.dtype),
            allocate(self.layout.num_floats, dtype=torch.float32),
        )

    @torch.inference_mode()
    def _read(self, adapter: Adapter, into: _Memory) -> None:
        """Read an adapter into memory, once the device has read what was there."""
        if into.copied is not None:
            into.copied.synchronize()
        folder = Path(adapter.path)
        if adapter_version(folder) != adapter.version:
            raise ModelError(f"{folder}: its files have changed since the adapter was loaded; load it again")
        self.layout.read(folder, into.content)

    def drop(self, adapter: Adapter) -> None:
        """Forget an adapter in host memory. Unknown ones are ignored; one that is in a slot stays there."""
        held = self._held.pop(adapter.version, None)
        if held is not None:
            held.ready.cancel()
            if held.ready.done():  # otherwise the thread is writing into it
                self._spare.append(held.memory)

    @torch.inference_mode()
    def place(self, adapter: Adapter, slot: int, part: int, num_parts: int) -> None:
        """Queue the copy of a part of an adapter in host memory to a slot that no unfinished request uses.

        After the last part, steps can use it. The parts are copied in order; no other adapter comes between them.
        """
        held = self._held[adapter.version]
        held.ready.result()
        self._slots = {version: at for version, at in self._slots.items() if at != slot}
        content = held.memory.content
        first, stop = (len(content.values) * each // num_parts for each in (part, part + 1))
        self._values[slot, first:stop].copy_(content.values[first:stop], non_blocking=True)
        if part == num_parts - 1:
            self.layout.place(content, slot, self._floats)
            self._slots[adapter.version] = slot
        held.memory.copied = self._device.record_event()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
