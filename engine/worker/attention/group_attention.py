"""Attention's step data for the layers of a cache group: decode plans, prefill tiles, and the layers' metadata."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

import kernels
from engine.core.kv.cache_groups import CacheGroup
from engine.core.kv.common_prefix import CommonPrefixes
from engine.models.attention import AttentionMetadata, block_sparse
from engine.models.spec import AttentionSpec, LatentSpec
from engine.worker.options import RunnerOptions

JOINS_DRAFTS = True  # small steps read the keys of a request's newest token and its drafts once
READS_PREFIXES_ONCE = True

T = TypeVar("T")
StepLens = tuple[list[int], list[int]]  # lengths of queries and of contexts


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The tensors of a step with B sequences and T tokens that attention needs in every cache group."""

    num_decodes: int  # of these first sequences, those that decode have a `decode_lens` above 0
    rows: Tensor  # [B] int32
    query_start: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32
    decode_lens: Tensor | None  # see `AttentionMetadata`
    block_tables: Tensor  # [G, R, max_blocks] int32
    slot_mapping: Tensor  # [G, T] int64
    has_common_prefix: bool = False  # see `StepSize`


class Prefills:
    """The sequences of a step that do not decode. Data that several cache groups derive from them is made once."""

    def __init__(
        self, query_lens: Sequence[int], context_lens: Sequence[int], upload: Callable[[Tensor], Tensor]
    ) -> None:
        self.query_lens, self.context_lens, self.upload = list(query_lens), list(context_lens), upload
        self._made: dict[Hashable, Any] = {}

    def tiles(self, queries: int) -> Tensor:
        """Return the grid of the prefill kernel for tiles of so many queries: [N, 2] int32."""

        def make() -> Tensor:
            grid = kernels.make_prefill_tiles(self.query_lens, self.context_lens, queries)
            return self.upload(torch.tensor(grid, dtype=torch.int32))

        return self.once(("tiles", queries), make)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when this key was asked for first."""
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])


@dataclass(frozen=True, slots=True)
class CapturedPrefills:
    """Prefill tiles that a CUDA graph reads, by queries per tile. The sequences of a replay are unknown to the CPU."""

    by_queries: Mapping[int, Tensor]

    def tiles(self, queries: int) -> Tensor:
        return self.by_queries[queries]


def common_prefixes(groups: Sequence[CacheGroup], options: RunnerOptions) -> CommonPrefixes | None:
    """Return the prefixes that decodes on this device read once for all requests that have them in common; None: it
    does not. The sums of a token then depend on the other requests of its step, which deterministic mode rules out.
    Encoders do not decode.
    """
    if not READS_PREFIXES_ONCE or not options.device.is_accelerator:
        return None
    if options.deterministic or options.whole_prompts:
        return None
    return CommonPrefixes.of(groups, options.block_size, kernels.MIN_SHARED, kernels.MIN_MEMBERS)


def _finds_room(mixer: AttentionSpec) -> bool:
    """Return whether the kernel for common prefixes computes this attention: causal, and the heads of a KV head fit a
    tile.
    """
    fits = mixer.num_heads // mixer.num_kv_heads <= kernels.SHARED_ROWS
    return fits and mixer.causal and mixer.sparse is None and not mixer.alibi


def _with_prefix(plan: kernels.DecodePlan, mixer: AttentionSpec) -> kernels.DecodePlan:
    """Return a plan with the same workspace for steps with common prefixes."""
    heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    return replace(plan, prefix=kernels.SharedPrefix.allocate(plan.max_seqs, *heads, plan.work.device))


class GroupAttention:
    """Attention's step data for layers of one cache group that attend alike. A CPU needs neither plans nor tiles."""

    # Sequences may decode in a graph of steps with prefill, where only the device knows how many do.
    decodes_beside_captured_prefills = True
    _prefix_plans: Sequence[kernels.DecodePlan] = ()  # for steps with prefixes that are read once, as `_plans`

    def __init__(
        self, mixer: AttentionSpec | LatentSpec, index: int, group: CacheGroup, options: RunnerOptions
    ) -> None:
        """`mixer`: of this rank. `index`: of the cache group."""
        self.index = index
        self.tile_queries = 0  # queries of a prefill tile; 0: there are no tiles
        self._plans: list[kernels.DecodePlan] = []  # in ascending order of the number of sequences that they fit
        self._block_size = options.block_size
        if options.device.is_accelerator:
            most = options.max_decodes
            limits = sorted({min(n, most) for n in (*kernels.FEW_SEQS, most)})
            allocate, self.tile_queries = self._kernel_sizes(mixer, group, options)
            self._plans = [allocate(n) for n in limits]
            reads_once = common_prefixes((group,), options) is not None
            if reads_once and isinstance(mixer, AttentionSpec) and _finds_room(mixer):
                plans = [plan for plan in self._plans if plan.max_seqs >= kernels.MIN_MEMBERS]
                self._prefix_plans = [_with_prefix(plan, mixer) for plan in plans]

    def _kernel_sizes(
        self, mixer: AttentionSpec | LatentSpec, group: CacheGroup, options: RunnerOptions
    ) -> tuple[Callable[[int], kernels.DecodePlan], int]:
        """Return a function that allocates a decode plan for a number of sequences, and the queries of a tile."""
        assert isinstance(mixer, AttentionSpec)
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
        joins = JOINS_DRAFTS and options.splits_drafts and not mixer.sparse
        most = kernels.shared_queries(*heads[:2]) if joins else 1

        def allocate(num_seqs: int) -> kernels.DecodePlan:
            new = partial(kernels.DecodePlan.allocate, num_seqs, *heads, options.device.torch_device)
            new = partial(new, kv_dtype=options.kv_dtype, window=0 if mixer.sparse else group.window)
            return new(sparse=block_sparse(mixer), queries=most if num_seqs <= kernels.FEW_SEQS[1] else 1)

        # Block-sparse, each query head has tiles of its own.
        num_kv_heads = mixer.num_heads if mixer.sparse else mixer.num_kv_heads
        return allocate, kernels.prefill_tile_queries(mixer.num_heads, num_kv_heads, mixer.head_dim, options.dtype)

    @property
    def reads_prefixes_once(self) -> bool:
        """Return whether these layers read prefixes that decodes have in common once for all of them."""
        return bool(self._prefix_plans)

    @property
    def fullest_steps(self) -> list[StepLens]:
        """Steps with prefill that need more memory or other kernels than full steps of prompts, to run at start-up."""
        return []

    def plan(self, num_decodes: int, has_common_prefix: bool = False) -> kernels.DecodePlan | None:
        """Return the smallest decode plan for so many sequences; None if the device needs none."""
        plans = self._prefix_plans if has_common_prefix and self._prefix_plans else self._plans
        return next((plan for plan in plans if num_decodes <= plan.max_seqs), None)

    def tiles(self, prefills: Prefills | CapturedPrefills | None) -> Tensor | None:
        """Return the tiles of sequences that do not decode: [N, 2] int32; None if there are none."""
        return prefills.tiles(self.tile_queries) if prefills is not None and self.tile_queries else None

    def metadata(self, step: AttentionStep, prefills: Prefills | CapturedPrefills | None) -> AttentionMetadata:
        """Write the step's decode plan, and return the layers' metadata. `prefills` None: all sequences decode."""
        n, plan = step.num_decodes, self.plan(step.num_decodes, step.has_common_prefix)
        if plan is not None and n:
            lens = step.context_lens[:n] if step.decode_lens is None else step.decode_lens
            if plan.prefix is not None:
                kernels.plan_prefix(lens, step.rows[:n], step.block_tables[self.index], self._block_size, plan)
            kernels.plan_decode(lens, step.rows[:n], plan)
        return AttentionMetadata(
            num_decodes=n,
            rows=step.rows,
            block_tables=step.block_tables[self.index],
            query_start=step.query_start,
            context_lens=step.context_lens,
            slot_mapping=step.slot_mapping[self.index],
            plan=plan,
            tiles=self.tiles(prefills),
            decode_lens=step.decode_lens,
        )
