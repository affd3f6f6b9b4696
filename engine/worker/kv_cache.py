"""Memory of the KV cache: the layout of layers in blocks, the number of blocks, and the tensors that hold them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

import kernels
from engine.core.kv.cache_groups import CacheGroup, longest_sequence, most_blocks
from engine.models.mixers import LayerCache
from engine.models.recurrent_spec import RecurrentSpec
from engine.models.shard import WHOLE, Shard, Stage
from engine.models.spec import ModelSpec
from engine.worker.device import Device, Memory
from engine.worker.draft_cache import DraftCache
from engine.worker.options import RunnerOptions
from engine.worker.sampling.token_history import history_bytes
from engine.worker.state_cache import TYPICAL_TOKENS, StateLayout

T = TypeVar("T")


class KVCacheTooSmallError(ValueError):
    """The KV cache cannot hold one sequence of the requested context length."""


HEADROOM = 2.0  # a key or value may exceed the calibrated maximum by this factor before it saturates


def e4m3_scales(kv: Tensor) -> Tensor:
    """Return the scales by which K and V of each head are divided before conversion to e4m3: [2, num_kv_heads] float32.

    kv [2, num_blocks, num_kv_heads, block_size, head_dim], in any dtype: calibration data.
    """
    largest = kv.abs().amax((1, 3, 4)).float()
    scales = torch.where(largest > 0, largest * (HEADROOM / torch.finfo(torch.float8_e4m3fn).max), 1.0)
    return scales.clamp_(*kernels.KV_SCALES)


GRAPH_RESERVE = 512 << 20  # bytes left free for CUDA graphs
LEAST_CONTEXT = 1024  # tokens: the engine does not start with less, unless configured
MAX_PADDING = 1.15  # factor by which padding may enlarge the cache, to have fewer groups


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The part of the past that a layer keeps."""

    window: int  # 0: all of it
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers per token in each part (K or V)."""
        return self.num_kv_heads * self.head_dim


NO_KV, NO_SLOT = CachedLayer(0, 0, 0), -1  # of recurrent layers


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The layout of layers in KV blocks. All blocks have the same size, so that every group can use any block.

    A block holds K and V, or latents, of `block_size` tokens in the layers of one group, in `num_slots` slots. A slot
    holds the widest layer or several narrower ones. Layers of the same kind are divided into groups that fit a block.
    Layer l is in group `group_of[l]`, in slot `slot_of[l]` of its blocks, at `offset_of[l]` numbers per token.
    """

    layers: tuple[CachedLayer, ...]
    groups: tuple[CacheGroup, ...]
    group_of: tuple[int, ...]
    slot_of: tuple[int, ...]
    offset_of: tuple[int, ...]
    num_slots: int
    block_size: int
    dtype: torch.dtype
    num_parts: int  # 2: K and V; 1: latents
    own_layers: range  # the layers of this stage; groups are those of the whole model
    # Of recurrent layers: they are in the last group, with blocks of their own, and have no slot. None: there are none.
    states: StateLayout | None = None
    drafts: DraftCache | None = None  # what a drafter keeps beside each block; None: there is none

    @classmethod
    def of(
        cls,
        windows: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        num_parts: int = 2,
    ) -> KVCacheLayout:
        """Create the layout of layers that differ only in their windows; 0: full attention."""
        layers = [CachedLayer(window, num_kv_heads, head_dim) for window in windows]
        return cls.of_layers(layers, [None] * len(layers), block_size, dtype, num_parts)

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[CachedLayer],
        sources: Sequence[int | None],
        block_size: int,
        dtype: torch.dtype,
        num_parts: int = 2,
    ) -> KVCacheLayout:
        """`sources`: for each layer, an earlier layer with the cache that it reads; None: the layer has its own."""
        counts = Counter(layer for layer, source in zip(layers, sources, strict=True) if source is None)
        widest = max(layer.width for layer in counts)
        num_slots = _slots_of_a_block([-(-count // (widest // layer.width)) for layer, count in counts.items()])
        groups: list[CacheGroup] = []
        found: list[tuple[int, int, int]] = []  # for each layer: group, slot, offset
        open_groups: dict[CachedLayer, tuple[int, int]] = {}  # the group being filled, its layers so far
        for layer, source in zip(layers, sources, strict=True):
            if source is not None:
                assert layers[source] == layer, "they keep different parts of the past"
                found.append(found[source])
                continue
            in_slot = widest // layer.width
            group, index = open_groups.get(layer, (-1, num_slots * in_slot))
            if index == num_slots * in_slot:
                group, index = len(groups), 0
                groups.append(CacheGroup(layer.window))
            open_groups[layer] = group, index + 1
            found.append((group, index // in_slot, index % in_slot * layer.width))
        group_of, slot_of, offset_of = zip(*found, strict=True)
        return cls(
            tuple(layers), tuple(groups), group_of, slot_of, offset_of, num_slots, block_size, dtype, num_parts,
            range(len(layers)),
        )  # fmt: skip

    @classmethod
    def of_model(cls, spec: ModelSpec, options: RunnerOptions, stage: Stage = WHOLE) -> KVCacheLayout:
        """`spec`: of one rank's part. `stage`: the pipeline stage of the layers to hold."""
        # A window as large as the longest context is full attention.
        bound = 0 if spec.is_encoder else options.max_model_len  # an encoder's step has all of each sequence
        windows = [window if window < bound else 0 for window in spec.windows]
        attending = {i: m for i, layer in enumerate(spec.layers) if not isinstance(m := layer.mixer, RecurrentSpec)}
        layers = [CachedLayer(windows[i], *mixer.cached[1:]) for i, mixer in attending.items()]
        at = list(attending)
        sources = [None if mixer.kv_of is None else at.index(mixer.kv_of) for mixer in attending.values()]
        if spec.is_encoder:  # the next layer overwrites a layer's keys and values
            sources = [None, *[0] * (len(layers) - 1)]
        num_parts = attending[at[0]].cached[0]
        whole = cls.of_layers(layers, sources, options.block_size, options.kv_dtype, num_parts)
        own_layers = stage.layers(len(spec.layers))
        whole = replace(whole, own_layers=own_layers)
        if spec.has_states:
            states = StateLayout.of_model(spec, options, own_layers)
            whole = whole._beside_states(at, states, 1 + options.max_request_drafts)
        if options.drafter is None:
            return whole
        drafter = options.drafter.for_rank(Shard(0, options.num_ranks_per_stage))  # all ranks' parts are alike
        return replace(whole, drafts=DraftCache.of(drafter, whole.groups, options.block_size, options.kv_dtype))

    def _beside_states(self, at: Sequence[int], states: StateLayout | None, max_retracted: int) -> KVCacheLayout:
        """Return the layout of a model whose layers `at` are those of this one. All others have states."""
        assert states is not None
        num_layers, index = len(states.parts), {layer: i for i, layer in enumerate(at)}
        pool, state_group = 1 + max(group.pool for group in self.groups), len(self.groups)

        def spread(values: Sequence[T], other: T) -> tuple[T, ...]:
            return tuple(values[index[i]] if i in index else other for i in range(num_layers))

        return replace(
            self,
            layers=spread(self.layers, NO_KV),
            groups=(*self.groups, CacheGroup(pool=pool, is_state=True, max_retracted=max_retracted)),
            group_of=spread(self.group_of, state_group),
            slot_of=spread(self.slot_of, NO_SLOT),
            offset_of=spread(self.offset_of, 0),
            own_layers=states.own_layers,
            states=states,
        )

    @property
    def memory_of_block(self) -> int:
        """Bytes of a block, and of what a drafter keeps beside it."""
        return self.block_bytes + (0 if self.drafts is None else self.drafts.block_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, without what a drafter keeps beside it."""
        return len(self._own_slots) * self.num_parts * self._slot_size * self.dtype.itemsize

    @property
    def _slot_size(self) -> int:
        """Numbers per slot in each part of a block."""
        return self.block_size * max(layer.width for layer in self.layers)

    @property
    def _own_slots(self) -> list[int]:
        """The slots of a block that the layers of this stage use."""
        return sorted({self.slot_of[layer] for layer in self.own_layers} - {NO_SLOT})

    def allocate(self, num_blocks: int, device: Device, num_states: int = 0) -> list[LayerCache]:
        """Allocate [num_parts, num_blocks, num_kv_heads, block_size, head_dim] for each layer, K then V. For recurrent
        layers, allocate the parts of `num_states` blocks.

        Blocks of a narrow layer have gaps between them. Layers in the same slot of different groups share memory but
        never use the same block. The memory is zeroed, because an unwritten slot must not read as NaN.
        """
        shape = self.num_parts, num_blocks, self._slot_size
        slots = {slot: device.zeros(*shape, dtype=self.dtype) for slot in self._own_slots}

        @functools.cache
        def view(slot: int, offset: int, num_kv_heads: int, head_dim: int) -> Tensor:
            start, size = offset * self.block_size, num_kv_heads * self.block_size * head_dim
            return slots[slot][:, :, start : start + size].unflatten(2, (num_kv_heads, self.block_size, head_dim))

        def cache_of(layer: int) -> LayerCache:
            if self.slot_of[layer] == NO_SLOT:
                assert self.states is not None
                return self.states.allocate(num_states, layer, device)
            kind = self.layers[layer]
            return view(self.slot_of[layer], self.offset_of[layer], kind.num_kv_heads, kind.head_dim)

        return [cache_of(layer) for layer in self.own_layers]

    def slots(self, kv_cache: Sequence[LayerCache]) -> list[Tensor]:
        """Return the memory of each slot that this stage uses, as bytes [num_parts, num_blocks, bytes]."""
        slot_of = [self.slot_of[layer] for layer in self.own_layers]
        first = [cast(Tensor, kv_cache[slot_of.index(slot)]) for slot in self._own_slots]
        if not first:  # a stage of recurrent layers alone
            return []
        shape = self.num_parts, first[0].shape[1], self._slot_size
        return [kv.as_strided(shape, (shape[1] * shape[2], shape[2], 1), 0).view(torch.uint8) for kv in first]

    def pool_bytes(self) -> list[int]:
        """Return the bytes of a block of each pool in this stage."""
        return [self.memory_of_block] if self.states is None else [self.memory_of_block, self.state_bytes]

    def host_slots(self, num_bytes: int, num_blocks: int, num_states: int) -> list[int]:
        """Return how many blocks of each pool fit in host memory, in the same proportion as on the device."""
        sizes = self.pool_bytes()
        counts = [num_blocks, num_states][: len(sizes)]
        on_device = sum(size * count for size, count in zip(sizes, counts, strict=True))
        return [num_bytes * count // max(on_device, 1) for count in counts]

    def block_parts(self, kv_cache: Sequence[LayerCache], drafter: Sequence[Tensor] = ()) -> list[list[Tensor]]:
        """Return the memory of the blocks of each pool: the parts of a block, [blocks, bytes] uint8 each. A stage may
        have none. `drafter`: as `DraftCache.allocate` returns it; empty: another stage has it.
        """
        pools = [[part for kv in self.slots(kv_cache) for part in kv]]
        if self.drafts is not None and drafter:
            own = (kv for kv, source in zip(drafter, self.drafts.sources, strict=True) if source is None)
            pools[0] += [part.view(len(part), -1).view(torch.uint8) for kv in own for part in kv]
        if self.states is not None:
            of_layers = zip(self.own_layers, kv_cache, strict=True)
            parts = (part for layer, cache in of_layers if self.slot_of[layer] == NO_SLOT for part in cache)
            pools.append([part.view(len(part), -1).view(torch.uint8) for part in parts])
        return pools

    @property
    def _attention_groups(self) -> list[CacheGroup]:
        return [group for group in self.groups if not group.is_state]

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Return the most KV blocks that a request of `num_tokens` holds at a time, with steps of up to `max_chunk`."""
        return sum(most_blocks(self._attention_groups, num_tokens, self.block_size, max_chunk))

    def divided(self, num_bytes: int, options: RunnerOptions) -> tuple[int, int]:
        """Return how many KV blocks and states to allocate in `num_bytes`."""
        num_states = self.num_states(num_bytes, options)
        num_bytes -= num_states * self.state_bytes
        return max(num_bytes // max(self.memory_of_block, 1), 0), num_states  # a stage may have no attention

    def num_states(self, num_bytes: int | None, options: RunnerOptions) -> int:
        """Return how many states a cache of `num_bytes` has; None: of any size."""
        if self.states is None:
            return 0
        if options.num_states_override is not None:
            return options.num_states_override
        if num_bytes is None:
            return self.states.wanted(options)
        typical, longest = (
            self.memory_of_block * self.most_blocks(num_tokens, options.max_num_batched_tokens)
            for num_tokens in (min(TYPICAL_TOKENS, options.max_model_len), options.max_model_len)
        )
        return self.states.that_fit(num_bytes, typical, longest, self._least_states(options), options)

    def _least_states(self, options: RunnerOptions) -> int:
        """Return the most states that a request holds at a time."""
        states = [group for group in self.groups if group.is_state]
        return sum(most_blocks(states, options.max_model_len, self.block_size, options.max_num_batched_tokens))

    @property
    def state_bytes(self) -> int:
        """Bytes of a block of states in this stage."""
        return 0 if self.states is None else self.states.block_bytes

    def longest_context(self, num_blocks: int, options: RunnerOptions) -> int:
        """Return the length of the longest sequence in `num_blocks` blocks, at most `options.max_model_len`."""
        max_chunk, most = options.max_num_batched_tokens, options.max_model_len
        return longest_sequence(self._attention_groups, [num_blocks], self.block_size, max_chunk, most)

    def context_that_fits(self, num_blocks: int, options: RunnerOptions) -> int:
        """Return `options.max_model_len`, reduced if it was not requested and `num_blocks` blocks are too few for it.

        Raises `KVCacheTooSmallError` if it was requested, or if fewer than `LEAST_CONTEXT` tokens fit.
        """
        longest, wanted = self.longest_context(num_blocks, options), options.max_model_len
        if longest < (min(wanted, LEAST_CONTEXT) if options.shortens_context else wanted):
            raise KVCacheTooSmallError(
                f"the KV cache has room for {longest} tokens ({num_blocks} blocks of {self.block_size}), but "
                f"max_model_len is {wanted}: use --max-model-len {longest} or less, or give the cache more memory "
                "(--gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override)"
            )
        return longest

    def cpu_cache_bytes(self, options: RunnerOptions, free: int) -> tuple[int, str]:
        """Return the cache's size on a CPU with `free` bytes, and what limits it, for display.

        The sampler's token history is not counted as free.
        """
        of_one = self.most_blocks(options.max_model_len, options.max_num_batched_tokens) * self.memory_of_block
        if self.states is not None:
            of_one += self.state_bytes * self._least_states(options)
        bounds = {
            f"room for {options.max_num_seqs:,} full contexts": options.max_num_seqs * of_one,
            "4 GiB, or one full context": max(4 << 30, of_one),
            "a quarter of the free memory": max(free - token_history_bytes(options), 0) // 4,
        }
        bound = min(bounds, key=bounds.__getitem__)
        return bounds[bound], bound


def _slots_of_a_block(counts: Sequence[int]) -> int:
    """Return the slots per block for the fewest groups, then the least padding. counts: slots of each layer kind."""

    def cost(num_slots: int) -> tuple[int, int]:
        num_groups = sum(-(-count // num_slots) for count in counts)
        return num_groups, num_groups * num_slots

    return min((n for n in range(1, max(counts) + 1) if cost(n)[1] <= MAX_PADDING * sum(counts)), key=cost)


def encoder_blocks(options: RunnerOptions) -> int:
    """Return the blocks of an encoder's two steps in flight. Each sequence's last one is filled in part, or spare."""
    return 2 * -(-options.max_num_batched_tokens // options.block_size) + 3 * options.max_num_seqs


def blocks_asked_for(layout: KVCacheLayout, options: RunnerOptions) -> tuple[tuple[int, int], str] | None:
    """Return the requested number of blocks, that of states, and the flag that requests them. None: as many as fit."""
    if options.num_gpu_blocks_override is not None:
        counts = options.num_gpu_blocks_override, layout.num_states(None, options)
        return counts, "--num-gpu-blocks-override"
    if options.kv_cache_memory_bytes is not None:
        return layout.divided(options.kv_cache_memory_bytes, options), "--kv-cache-memory-bytes"
    return None


def blocks_that_fit(layout: KVCacheLayout, memory: Memory, options: RunnerOptions) -> tuple[int, int]:
    """Return how many blocks and states fit in `options.gpu_memory_utilization` of a GPU's memory beside this process's
    peak use.

    `memory` is measured after a profiling run, so its peak includes weights and activations. Memory of other processes
    counts against the fraction. `GRAPH_RESERVE` and the token history, allocated when it is first needed, stay free.
    """
    outside, reserve = memory.total - memory.free - memory.used, GRAPH_RESERVE + token_history_bytes(options)
    num_bytes = int(memory.total * options.gpu_memory_utilization) - outside - memory.peak - reserve
    return layout.divided(max(num_bytes, 0), options)


def token_history_bytes(options: RunnerOptions) -> int:
    """Return the memory that the sampler's token history takes once a request needs it."""
    return history_bytes(options.max_num_seqs, options.max_model_len)
