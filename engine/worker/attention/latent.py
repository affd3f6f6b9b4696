"""Step data of latent attention. Some steps expand latents to the keys and values of each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import kernels
from engine.core.kv.cache_groups import CacheGroup
from engine.models.attention import AttentionMetadata
from engine.models.expansion import PAGE, LatentExpansion
from engine.models.indexer import TokenChoice
from engine.models.spec import AttentionSpec, LatentSpec
from engine.worker.attention.group_attention import (
    AttentionStep,
    CapturedPrefills,
    GroupAttention,
    Prefills,
    StepLens,
)
from engine.worker.options import RunnerOptions

# Maximum number of positions that a step expands for each token that a step may have: later chunks of a long prompt
# are expanded, too, and memory stays in proportion to that of other activations.
MOST_POSITIONS = 4
# Both are estimates. Fewer prompt tokens save a GPU less time than launching the additional kernels takes.
FEWEST_QUERIES_ON_ACCELERATOR = 512
ABSORBED_SLOWNESS = 2  # time of a multiplication in the absorbed attention kernel, relative to plain attention


def is_worth_expanding(spec: LatentSpec, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
    """Return whether expanded attention takes less time than absorbed attention, by multiplications of one head.

    Absorbed, each query is projected to a latent, and back; expanded, each position of the context, with padding, is
    projected to a key and a value. So expansion pays for whole prompts, and where a chunk of a long one has enough
    queries to gain from narrower keys and values.
    """
    projection, plain = spec.latent_dim * (spec.plain_dim + spec.value_dim), spec.plain_dim + spec.rope.rotary_dim
    pairs = sum(q * (2 * context - q + 1) // 2 for q, context in zip(query_lens, context_lens, strict=True))
    absorbed = sum(query_lens) * projection + pairs * ABSORBED_SLOWNESS * (spec.latent_dim + spec.head_dim)
    return num_positions(context_lens) * projection + pairs * 2 * plain < absorbed


def num_positions(context_lens: Sequence[int]) -> int:
    """Return the number of positions in the whole pages of all contexts."""
    return sum(-(-context // PAGE) * PAGE for context in context_lens)


def can_expand(spec: LatentSpec) -> bool:
    """Return whether plain attention computes heads of this shape. Values are padded to the width of keys."""
    width = spec.plain_dim + spec.rope.rotary_dim
    return 16 <= width <= 256 and spec.value_dim <= width


def expanded_width(spec: LatentSpec) -> int:
    """Return how many numbers a layer holds for each position that it expands."""
    return spec.head_dim + 2 * spec.num_heads * (spec.plain_dim + spec.rope.rotary_dim)


class LatentGroupAttention(GroupAttention):
    """Step data of latent attention. Steps with many queries for each position expand their latents."""

    # The decode kernel divides contexts by the number of sequences, which is unknown at capture.
    decodes_beside_captured_prefills = False

    def __init__(self, mixer: LatentSpec, index: int, group: CacheGroup, options: RunnerOptions) -> None:
        super().__init__(mixer, index, group, options)
        self._mixer, self._options = mixer, options
        # Maximum number of positions that a step expands; 0: none ever does.
        self.max_positions = MOST_POSITIONS * options.max_num_batched_tokens // PAGE * PAGE if can_expand(mixer) else 0
        self.max_positions *= kernels.FORMS.expand_latents
        self._top_k = options.max_model_len if mixer.index is None else mixer.index.top_k
        self._chooses = options.max_model_len > self._top_k  # some tokens see more than they may choose
        self._fewest_queries, self._expanded_tile_queries = 1, 0
        if options.device.is_accelerator:
            width, heads = mixer.plain_dim + mixer.rope.rotary_dim, mixer.num_heads
            self._fewest_queries = FEWEST_QUERIES_ON_ACCELERATOR
            self._expanded_tile_queries = kernels.prefill_tile_queries(heads, heads, width, options.dtype)

    def _kernel_sizes(
        self, mixer: AttentionSpec | LatentSpec, group: CacheGroup, options: RunnerOptions
    ) -> tuple[Callable[[int], kernels.DecodePlan], int]:
        assert isinstance(mixer, LatentSpec)
        new = partial(
            kernels.latent_decode_plan,
            num_heads=mixer.num_heads,
            size=mixer.latent_dim,
            device=options.device.torch_device,
        )
        return new, kernels.latent_tile_queries(mixer.num_heads, options.dtype)

    @property
    def fullest_steps(self) -> list[StepLens]:
        """The step that expands as many latents as a step may: the newest chunks of long prompts."""
        options = self._options
        context = min(self.max_positions, options.max_model_len - 1)
        if context < 2:
            return []
        num_seqs = min(self.max_positions // num_positions([context]), options.max_num_seqs)
        new = min(options.max_num_batched_tokens // num_seqs, context)
        return [([new] * num_seqs, [context] * num_seqs)]

    def expands(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
        """Return whether a step in which these sequences prefill expands their latents."""
        return (
            sum(query_lens) >= self._fewest_queries
            and num_positions(context_lens) <= self.max_positions
            and is_worth_expanding(self._mixer, query_lens, context_lens)
        )

    def metadata(self, step: AttentionStep, prefills: Prefills | CapturedPrefills | None) -> AttentionMetadata:
        decode_choice, prefill_choice = self._decode_choice(step), self._prefill_choice(step, prefills)
        metadata = self._metadata(step, prefills, may_expand=prefill_choice is None)
        return replace(metadata, decode_choice=decode_choice, prefill_choice=prefill_choice)

    def _decode_choice(self, step: AttentionStep) -> TokenChoice | None:
        """Return the choice of the sequences that decode; None: there are none, or they need none."""
        n, lens, tables = step.num_decodes, step.context_lens, step.block_tables[self.index]
        if not n or not self._chooses:
            return None
        longest = tables.shape[1] * self._block_size  # a GPU's lengths are unknown here
        if not self._options.device.is_accelerator:
            longest = int(lens[:n].max())
            if longest <= self._top_k and not kernels.FORMS.always_chooses:
                return None
        return TokenChoice.of_decodes(n, step.rows, lens, tables, longest)

    def _prefill_choice(self, step: AttentionStep, prefills: Prefills | CapturedPrefills | None) -> TokenChoice | None:
        """Return the choice of the sequences that do not decode; None: there are none, or they need none."""
        tables = step.block_tables[self.index]
        if prefills is None or not self._chooses:
            return None
        longest = tables.shape[1] * self._block_size
        if isinstance(prefills, Prefills):
            longest = max(prefills.context_lens)
            if longest <= self._top_k and not kernels.FORMS.always_chooses:
                return None
        num_tokens, of_step = step.slot_mapping.shape[1], (step.rows, step.query_start, step.context_lens)
        return TokenChoice.of_prefills(step.num_decodes, num_tokens, *of_step, tables, longest)

    def _metadata(
        self, step: AttentionStep, prefills: Prefills | CapturedPrefills | None, may_expand: bool
    ) -> AttentionMetadata:
        if (
            not may_expand
            or not isinstance(prefills, Prefills)
            or not self.expands(prefills.query_lens, prefills.context_lens)
        ):
            return super().metadata(step, prefills)
        metadata, first = super().metadata(step, None), step.num_decodes
        expansion = LatentExpansion.of_step(
            prefills.query_lens, prefills.context_lens, step.rows[first : first + len(prefills.query_lens)],
            metadata.block_tables, self._options.block_size, prefills.upload, self._expanded_tile_queries,
        )  # fmt: skip
        return replace(metadata, prefill_kv=expansion)
