"""Memory of recurrent layers: the layout of a block of states, and the number of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.kv.cache_groups import SPARE_STATES
from engine.models.recurrent_spec import RecurrentSpec, StateTensor
from engine.models.spec import ModelSpec
from engine.worker.device import Device
from engine.worker.options import RunnerOptions

STATES_PER_REQUEST = 1 + 1 / SPARE_STATES  # that a running request holds, with what is left free for its next block
CHECKPOINTS = 64  # states for prefixes that no running request has, and as many as there may be requests
TYPICAL_TOKENS = 2048  # of requests that use up states and KV blocks at the same number of them


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The parts of a block of states. A block holds those of all recurrent layers."""

    parts: tuple[tuple[StateTensor, ...], ...]  # of each layer of the model; (): it attends
    own_layers: range  # the layers of this stage
    dtypes: Mapping[str, torch.dtype]  # of parts, by `StateTensor.dtype`

    @classmethod
    def of_model(cls, spec: ModelSpec, options: RunnerOptions, own_layers: range) -> StateLayout | None:
        """Return the layout of a model, None if it has no recurrent layers. `spec`: of one rank's part."""
        if not spec.has_states:
            return None
        mixers = [layer.mixer for layer in spec.layers]
        sizes = options.block_size, options.max_request_drafts
        parts = (m.state(*sizes) if isinstance(m, RecurrentSpec) else () for m in mixers)
        dtypes = {"model": options.dtype, "float32": torch.float32, "state": options.state_dtype}
        return cls(tuple(parts), own_layers, dtypes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in this stage."""
        own = (part for layer in self.own_layers for part in self.parts[layer])
        return sum(math.prod(part.shape) * self.dtypes[part.dtype].itemsize for part in own)

    def wanted(self, options: RunnerOptions) -> int:
        """Return the number of blocks for as many requests as may run at once, and for checkpoints."""
        return math.ceil((STATES_PER_REQUEST + 1) * options.max_num_seqs) + CHECKPOINTS

    def that_fit(self, num_bytes: int, typical: int, longest: int, least: int, options: RunnerOptions) -> int:
        """Return the number of blocks in a cache of `num_bytes`: as many requests of `TYPICAL_TOKENS` find states as
        find KV blocks, or all that are `wanted`. They get two thirds of the memory at most, and above half of it they
        leave room for a whole context.

        typical, longest: bytes of the KV blocks of a request of `TYPICAL_TOKENS`, and of one whole context. least: the
        states that one request needs.
        """
        size = max(self.block_bytes, 1)
        num_requests = num_bytes / (STATES_PER_REQUEST * size + typical)
        most = min(num_bytes * 2 // 3, max(num_bytes // 2, num_bytes - longest)) // size
        return max(min(self.wanted(options), int(STATES_PER_REQUEST * num_requests), most), least)

    def allocate(self, num_states: int, layer: int, device: Device) -> Sequence[Tensor]:
        """Allocate the parts of a layer's blocks, [num_states, ...] each."""
        return [device.zeros(num_states, *part.shape, dtype=self.dtypes[part.dtype]) for part in self.parts[layer]]
