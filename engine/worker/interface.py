"""The interface of what executes steps, as the engine uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from engine.core.batch import BlockMoves, SchedulerOutput, StepResult
from engine.core.engine_request import Adapter
from engine.core.kv.cache_groups import CacheGroup
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions


class Handle(Protocol):
    """A launched step. Requests at the `guided` indices of its batch are sampled once their `masks` are filled, all
    others at once.
    """

    @property
    def guided(self) -> list[int]:
        """Indices of requests that wait for grammar masks before they are sampled."""

    @property
    def masks(self) -> np.ndarray:
        """[len(guided), (vocabulary + 31) // 32] int32: one bit for each token, the lowest bit first."""

    @property
    def device_waited(self) -> bool:
        """Tell whether the previous step had guided requests and finished before this one was launched."""

    @property
    def wait_seconds(self) -> float:
        """Time that `read` waited for the device."""

    @property
    def has_ended(self) -> bool:
        """On a CPU, whether the step is sampled; elsewhere always False."""

    def sample(self, deferred: Sequence[int] = ()) -> None:
        """Sample the guided requests. `deferred`: indices without a filled mask."""

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        """Wait for the step and return its result."""


class Runner(Protocol):
    """The engine's view of what executes steps: a model runner, or one with follower ranks."""

    num_blocks: int
    num_states: int  # blocks of states of recurrent layers; 0: the model has none
    block_size: int
    max_model_len: int
    cache_bound: str  # what limits `num_blocks`, for display
    # Seconds of the device for a step that only decodes, by captured size; empty: not measured.
    step_seconds: Mapping[int, float]

    @property
    def attention_backend(self) -> str: ...
    @property
    def cache_groups(self) -> Sequence[CacheGroup]: ...
    @property
    def device_name(self) -> str: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    def launch(self, output: SchedulerOutput) -> Handle: ...
    # Blocks in host memory, see `HostBlocks`:
    def move_blocks(self, moves: BlockMoves) -> None: ...
    def finished_loads(self) -> list[int]: ...
    def wait_for_load(self) -> None: ...
    @property
    def num_host_slots(self) -> list[int]: ...
    # LoRA adapters, see `AdapterSlots`:
    def load_adapter(self, adapter: Adapter) -> Future[Any]: ...
    def drop_adapter(self, adapter: Adapter) -> None: ...
    @property
    def num_adapter_parts(self) -> int: ...
    def place_adapter(self, adapter: Adapter, slot: int, part: int, num_parts: int) -> None: ...
    def reset(self) -> None: ...
    def open_block_file(self, options: BlockFileOptions) -> BlockFile | None: ...  # None: it cannot be used
    def close(self) -> None: ...
