"""The KV cache of a drafter that runs a model, in the blocks of a group of the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.kv.cache_groups import CacheGroup
from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.drafters.spec import DraftSpec
from engine.models.spec import AttentionSpec, LatentSpec
from engine.worker.attention.group_attention import AttentionStep, GroupAttention, Prefills
from engine.worker.attention.latent import LatentGroupAttention
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from kernels.data.layout import RowState


class DrafterSetup(NamedTuple):
    """The target model and the settings that a drafter is built from, beside its own model."""

    target: Decoder
    spec: DraftSpec  # of this rank's part
    layout: KVCacheLayout
    options: RunnerOptions
    state: RowState  # the device rows


class DraftCache:
    """Memory for the keys and values of a drafter's layers, and the metadata with which these attend."""

    def __init__(self, setup: DrafterSetup) -> None:
        spec, options = setup.spec, setup.options
        assert setup.layout.drafts is not None
        self._layout, self.group = setup.layout.drafts, setup.layout.drafts.group
        self.layers: list[Tensor] = []  # of each layer, see `allocate`
        self._device, self._state, self._block_size = options.device, setup.state, options.block_size
        self._attentions = {mixer: _attention(mixer, options) for mixer in dict.fromkeys(spec.mixers)}
        self._mixers = spec.mixers

    def allocate(self, num_blocks: int) -> None:
        """Allocate the memory, for as many blocks as the target has."""
        self.layers = self._layout.allocate(num_blocks, self._device)

    def release(self) -> None:
        """Release the memory."""
        self.layers = []

    def metadata(
        self, step: AttentionStep, prefills: Prefills | None, logits_indices: Tensor | None = None
    ) -> list[AttentionMetadata]:
        """Return the metadata of each layer. `step`: of the one group whose blocks the drafter uses."""
        of_mixers = {mixer: each.metadata(step, prefills) for mixer, each in self._attentions.items()}
        found = [of_mixers[mixer] for mixer in self._mixers]
        if logits_indices is not None:
            found[-1] = replace(found[-1], logits_indices=logits_indices)
        return found

    @property
    def block_tables(self) -> Tensor:
        """[1, R, max_blocks] int32."""
        return self._state.block_tables[self.group : self.group + 1]

    def slots(self, rows: Tensor, positions: Tensor, is_kept: Tensor) -> Tensor:
        """Return where entries of these rows [T] and positions [T] are stored, [T] int64; -1: nowhere."""
        columns = (positions // self._block_size).clamp(0, self._state.block_tables.shape[2] - 1)
        blocks = self._state.block_tables[self.group, rows, columns].long()
        return torch.where(is_kept, blocks * self._block_size + positions % self._block_size, -1)


def _attention(mixer: AttentionSpec | LatentSpec, options: RunnerOptions) -> GroupAttention:
    group = CacheGroup(mixer.window if mixer.window < options.max_model_len else 0)
    kind = LatentGroupAttention if isinstance(mixer, LatentSpec) else GroupAttention
    return kind(mixer, 0, group, options)  # type: ignore[arg-type]
