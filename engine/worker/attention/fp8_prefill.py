"""Decides which steps prefill over wide copies of an e4m3 cache's pages, and prepares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.models.attention import AttentionMetadata
from engine.models.spec import AttentionSpec, ModelSpec
from engine.models.wide_pages import WidePages
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from kernels.data.widening import WIDE_DTYPE, WIDE_PAGE, can_gain, num_wide_pages, seconds_saved

# Scratch memory, for one layer at a time: 131,072 positions of 8 KV heads of 128 channels. Steps that need more read the cache.
MOST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class WideLayers:
    """The layers of a cache group that may attend over wide pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    page_bytes: int
    max_pages: int  # that a step may widen

    def gain(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
        """Whether a step in which these sequences prefill is faster with wide pages, and may have as many as it needs."""
        lens, heads = (query_lens, context_lens, self.window), (self.num_heads, self.num_kv_heads, self.head_dim)
        return num_wide_pages(*lens) <= self.max_pages and seconds_saved(*lens, *heads) > 0

    def fullest_step(self, options: RunnerOptions) -> tuple[list[int], list[int]]:
        """Return the lengths of queries and contexts of a full step whose queries see many keys.

        Layers that do not gain in it never widen. It runs at start-up, which longer contexts would delay.
        """
        context = min(2 * options.max_num_batched_tokens, self.max_pages * WIDE_PAGE, options.max_model_len - 1)
        num_seqs = min(
            -(-options.max_num_batched_tokens // context),
            self.max_pages // num_wide_pages([context], [context], 0),
            options.max_num_seqs,
        )
        query = min(options.max_num_batched_tokens // num_seqs, context)
        return [query] * num_seqs, [context] * num_seqs


class CacheWidener:
    """Widens the pages that the steps of one model read. Steps in CUDA graphs, which are small, never do."""

    def __init__(self, layers: dict[int, WideLayers], options: RunnerOptions) -> None:
        """`layers`: by cache group."""
        self._layers, self._upload = layers, options.device.upload
        self.scratch_bytes = max(each.page_bytes * each.max_pages for each in layers.values())
        # For start-up: they reach the peak of memory use, since scratch memory is the same in all steps, and need every kernel.
        self.fullest_steps = [each.fullest_step(options) for each in dict.fromkeys(layers.values())]

    @classmethod
    def of_model(cls, spec: ModelSpec, layout: KVCacheLayout, options: RunnerOptions) -> CacheWidener | None:
        """`spec`: of this rank. None: no step would gain."""
        if options.kv_dtype != torch.float8_e4m3fn or options.max_model_len < 2:
            return None
        layers: dict[int, WideLayers] = {}
        for group, layer in zip(layout.group_of, spec.layers, strict=True):
            mixer = layer.mixer
            if not isinstance(mixer, AttentionSpec) or not mixer.widens:
                continue
            heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
            if not can_gain(options.device.capability, *heads, options.dtype):
                continue
            page_bytes = 2 * WIDE_PAGE * mixer.num_kv_heads * mixer.head_dim * WIDE_DTYPE.itemsize
            most = options.max_num_seqs * -(-options.max_model_len // WIDE_PAGE)
            wide = WideLayers(*heads, layout.groups[group].window, page_bytes, min(MOST_BYTES // page_bytes, most))
            if wide.gain(*wide.fullest_step(options)):
                layers[group] = wide
        return cls(layers, options) if layers else None

    def prepared(
        self, groups: Sequence[AttentionMetadata], query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> list[AttentionMetadata]:
        """Return the metadata of a step's cache groups, with wide pages for those that gain. The sequences that prefill have
        these lengths.
        """
        found: dict[int, WidePages] = {}  # by window
        prepared = list(groups)
        for group, layers in self._layers.items():
            if layers.gain(query_lens, context_lens):
                if layers.window not in found:
                    found[layers.window] = WidePages.of_step(
                        query_lens,
                        context_lens,
                        layers.window,
                        self._upload,
                        num_others=groups[group].num_decodes,
                        num_tokens=len(groups[group].slot_mapping),
                        scratch_bytes=self.scratch_bytes,
                    )
                prepared[group] = replace(prepared[group], wide_pages=found[layers.window])
        return prepared
