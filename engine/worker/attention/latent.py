"""Decides which steps compute latent attention with keys and values of each head, and prepares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import kernels
from engine.models.attention import AttentionMetadata
from engine.models.expansion import PAGE, LatentExpansion
from engine.models.spec import LatentSpec, ModelSpec
from engine.worker.options import RunnerOptions

# Positions that a step expands, at most, for each token that a step may have: later chunks of a long prompt are expanded,
# too, and memory stays in proportion to that of other activations.
MOST_POSITIONS = 4
# Both are estimates. Fewer prompt tokens save a GPU less time than launching the additional kernels takes.
FEWEST_QUERIES_ON_ACCELERATOR = 512
ABSORBED_SLOWNESS = 2  # time of a multiplication in the absorbed attention kernel, relative to plain attention


def is_worth_expanding(spec: LatentSpec, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
    """Whether expanded attention takes less time than absorbed attention, by multiplications of one head.

    Absorbed, each query is projected to a latent, and back; expanded, each position of the context, with padding, is
    projected to a key and a value. So expansion pays for whole prompts, and where a chunk of a long one has enough queries to
    gain from narrower keys and values.
    """
    projection, plain = spec.latent_dim * (spec.plain_dim + spec.value_dim), spec.plain_dim + spec.rope.rotary_dim
    pairs = sum(q * (2 * context - q + 1) // 2 for q, context in zip(query_lens, context_lens, strict=True))
    absorbed = sum(query_lens) * projection + pairs * ABSORBED_SLOWNESS * (spec.latent_dim + spec.head_dim)
    return num_positions(context_lens) * projection + pairs * 2 * plain < absorbed


def num_positions(context_lens: Sequence[int]) -> int:
    """Positions in the whole pages of all contexts."""
    return sum(-(-context // PAGE) * PAGE for context in context_lens)


def can_expand(spec: LatentSpec) -> bool:
    """Whether plain attention computes heads of this shape. Values are padded to the width of keys."""
    width = spec.plain_dim + spec.rope.rotary_dim
    return 16 <= width <= 256 and spec.value_dim <= width


def expanded_width(spec: LatentSpec) -> int:
    """Return how many numbers a layer holds for each position that it expands."""
    return spec.head_dim + 2 * spec.num_heads * (spec.plain_dim + spec.rope.rotary_dim)


class LatentExpander:
    """Expands the latents of the steps of one model."""

    def __init__(self, spec: LatentSpec, options: RunnerOptions) -> None:
        """`spec`: of this rank."""
        self._spec, self._block_size, self._device = spec, options.block_size, options.device
        self.max_positions = MOST_POSITIONS * options.max_num_batched_tokens // PAGE * PAGE
        self._fewest_queries, self._tile_queries = 1, 0
        if options.device.is_accelerator:
            width = spec.plain_dim + spec.rope.rotary_dim
            self._fewest_queries = FEWEST_QUERIES_ON_ACCELERATOR
            self._tile_queries = kernels.prefill_tile_queries(spec.num_heads, spec.num_heads, width, options.dtype)

    @classmethod
    def of_model(cls, spec: ModelSpec, options: RunnerOptions) -> LatentExpander | None:
        """None: the model has no latent attention, or its heads cannot expand."""
        mixer = spec.layers[0].mixer
        if not isinstance(mixer, LatentSpec) or any(layer.mixer != mixer for layer in spec.layers):
            return None
        return cls(mixer, options) if can_expand(mixer) else None

    def expands(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
        """Whether a step in which these sequences prefill expands their latents."""
        return (
            sum(query_lens) >= self._fewest_queries
            and num_positions(context_lens) <= self.max_positions
            and is_worth_expanding(self._spec, query_lens, context_lens)
        )

    def prepared(
        self, metadata: AttentionMetadata, query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> AttentionMetadata:
        """Return a step's metadata with the expansion of the sequences that prefill, which have these lengths."""
        first = metadata.first_prefill
        expansion = LatentExpansion.of_step(
            query_lens, context_lens, metadata.rows[first : first + len(query_lens)], metadata.block_tables,
            self._block_size, self._device.upload, self._tile_queries,
        )  # fmt: skip
        return replace(metadata, expansion=expansion)
