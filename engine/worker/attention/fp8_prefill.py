"""Step data of attention over an e4m3 cache. Some steps prefill over upcast copies of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.core.kv.cache_groups import CacheGroup
from engine.models.attention import AttentionMetadata
from engine.models.spec import AttentionSpec, ModelSpec
from engine.models.wide_pages import WidePages
from engine.worker.attention.group_attention import (
    AttentionStep,
    CapturedPrefills,
    GroupAttention,
    Prefills,
    StepLens,
)
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from kernels import FORMS
from kernels.data.widening import WIDE_DTYPE, WIDE_PAGE, can_gain, num_wide_pages, seconds_saved

# Scratch memory, for one layer at a time: 131,072 positions of 8 KV heads of 128 channels. Steps that need more read
# the cache.
MOST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class UpcastLayers:
    """The layers of a cache group that may attend over upcast pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    page_bytes: int
    max_pages: int  # that a step may upcast

    def gain(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
        """Return whether a step in which these sequences prefill gains from upcast pages, and may have all it needs."""
        lens, heads = (query_lens, context_lens, self.window), (self.num_heads, self.num_kv_heads, self.head_dim)
        return num_wide_pages(*lens) <= self.max_pages and seconds_saved(*lens, *heads) > 0

    def fullest_step(self, options: RunnerOptions) -> StepLens:
        """Return the lengths of queries and contexts of a full step whose queries see many keys.

        Layers that do not gain in it never upcast pages. It runs at start-up, which longer contexts would delay.
        """
        context = min(2 * options.max_num_batched_tokens, self.max_pages * WIDE_PAGE, options.max_model_len - 1)
        num_seqs = min(
            -(-options.max_num_batched_tokens // context),
            self.max_pages // num_wide_pages([context], [context], 0),
            options.max_num_seqs,
        )
        query = min(options.max_num_batched_tokens // num_seqs, context)
        return [query] * num_seqs, [context] * num_seqs


def upcast_layers(spec: ModelSpec, layout: KVCacheLayout, options: RunnerOptions) -> dict[int, UpcastLayers]:
    """Return the layers that may attend over upcast pages, by cache group. `spec`: of this rank."""
    layers: dict[int, UpcastLayers] = {}
    if options.kv_dtype != torch.float8_e4m3fn or options.max_model_len < 2 or not FORMS.copies_pages:
        return layers
    for group, layer in zip(layout.group_of, spec.layers, strict=True):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec) or not mixer.widens:
            continue
        heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        if not can_gain(options.device.capability, *heads, options.dtype):
            continue
        page_bytes = 2 * WIDE_PAGE * mixer.num_kv_heads * mixer.head_dim * WIDE_DTYPE.itemsize
        most = options.max_num_seqs * -(-options.max_model_len // WIDE_PAGE)
        upcast = UpcastLayers(*heads, layout.groups[group].window, page_bytes, min(MOST_BYTES // page_bytes, most))
        if upcast.gain(*upcast.fullest_step(options)):
            layers[group] = upcast
    return layers


def scratch_bytes(layers: dict[int, UpcastLayers]) -> int:
    """Return the scratch memory of all steps alike: that of the layers that may upcast most."""
    return max((each.page_bytes * each.max_pages for each in layers.values()), default=0)


class Fp8PrefillAttention(GroupAttention):
    """Step data of layers that may prefill over upcast pages. Steps in CUDA graphs, which are small, never do."""

    def __init__(
        self,
        mixer: AttentionSpec,
        index: int,
        group: CacheGroup,
        options: RunnerOptions,
        layers: UpcastLayers,
        num_scratch_bytes: int,
    ) -> None:
        super().__init__(mixer, index, group, options)
        self._options, self._layers, self._num_scratch_bytes = options, layers, num_scratch_bytes

    @property
    def fullest_steps(self) -> list[StepLens]:
        """The step that reaches the peak of memory use, scratch memory being the same in all, and needs all kernels."""
        return [self._layers.fullest_step(self._options)]

    def metadata(self, step: AttentionStep, prefills: Prefills | CapturedPrefills | None) -> AttentionMetadata:
        metadata, layers = super().metadata(step, prefills), self._layers
        if not isinstance(prefills, Prefills) or not layers.gain(prefills.query_lens, prefills.context_lens):
            return metadata
        pages = prefills.once(
            ("upcast pages", layers.window),
            lambda: WidePages.of_step(
                prefills.query_lens,
                prefills.context_lens,
                layers.window,
                prefills.upload,
                num_others=step.num_decodes,
                num_tokens=step.slot_mapping.shape[1],
                scratch_bytes=self._num_scratch_bytes,
            ),
        )
        return replace(metadata, prefill_kv=pages)
