"""Counts the tokens of each expert in some steps, on the device. Read when the step is done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.moe import Router
from engine.models.spec import MoESpec
from engine.worker.device import Device


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Counts of one step, being copied from the device."""

    layers: list[int]
    counts: Tensor  # [layers, 1 + experts] int64 on the CPU, filled when the step is done; column 0: padding

    def read(self) -> dict[int, list[int]]:
        """Return layer → tokens of each expert. Call it when the step is done."""
        return dict(zip(self.layers, self.counts[:, 1:].tolist(), strict=True))


class ExpertLoad:
    """Counts in every `interval`-th step. Such a step must not run as a CUDA graph: routers count only in it."""

    def __init__(self, model: Decoder, interval: int, device: Device) -> None:
        routers = {
            index: module
            for index in model.own_layers
            for module in model.layers[index].modules()
            if isinstance(module, Router)
        }
        self._layers, self._routers, self._interval, self._device = (
            list(routers),
            list(routers.values()),
            interval,
            device,
        )
        self._has_experts = any(isinstance(layer.mlp, MoESpec) for layer in model.spec.layers)
        self._num_steps = 0

    def begin(self) -> bool:
        """Call it before a step's layers run. Returns whether the step is counted; then call `end` after it.

        The answer is the same in all pipeline stages, also in those without experts: they pad the step alike.
        """
        self._num_steps += 1
        if not self._has_experts or self._num_steps % self._interval:
            return False
        width = 1 + max((router.num_experts for router in self._routers), default=0)
        self._counts = torch.zeros(len(self._routers), width, dtype=torch.int64, device=self._device.torch_device)
        for router, counts in zip(self._routers, self._counts, strict=True):
            router.counts = counts
        return True

    def end(self) -> ExpertCounts:
        for router in self._routers:
            router.counts = None
        return ExpertCounts(self._layers, self._counts.to("cpu", non_blocking=True))
