"""The specification of a drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine.models.shard import Shard
from engine.models.spec import AttentionSpec, LatentSpec, ModelSpec

Attending = AttentionSpec | LatentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """The parts of an EAGLE-3 head beside its decoder layer."""

    target_layers: tuple[int, ...]  # the head reads the residual stream before each of these layers of the target
    draft_vocab_size: int  # tokens that it can propose
    has_embedding: bool = False  # of its own; else it uses the target's
    norm_before_residual: bool = False  # the layer's residual is its normalised input
    norm_before_fc: bool = False  # the target's hidden states are normalised, all at once, before they are projected
    norm_output: bool = False  # the hidden states for the next draft are normalised


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The parts of a block drafter beside its layers, see `drafters.dflash`."""

    target_layers: tuple[int, ...]  # the drafter reads the residual stream after each of these layers of the target
    num_tokens: int  # that it drafts at a time
    mask_token_id: int
    from_anchor: bool = False  # the first token is drafted at the newest one's place, not at that of the first mask
    markov_rank: int = 0  # of the bias of a token on the next one; 0: there is none
    selector_rank: int = 0  # of the selector of a path; 0: there is none
    selector_top_k: int = 16  # tokens from which it selects
    conv_taps: int = 0  # tokens that are mixed around sublayers; 0: none are
    conv_group_size: int = 16  # channels with the same projected factor
    draft_vocab_size: int = 0  # tokens that it can propose, if it has a head of its own
    has_embedding: bool = False  # of its own; else it uses the target's
    has_head: bool = False  # of its own

    @property
    def length(self) -> int:
        """Tokens of a block: the newest one, and masks."""
        return self.num_tokens + (not self.from_anchor)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A drafter. Its layers cache keys and values of the same tokens as the target's, in the same blocks."""

    method: Literal["draft_model", "mtp", "eagle3", "dflash"]
    folder: Path  # of its checkpoint
    model: ModelSpec  # of `mtp` and `eagle3`: a decoder that has the drafter's layer alone
    eagle3: Eagle3Spec | None = None
    block: BlockSpec | None = None
    head_quantization: str = ""  # to which its output head is quantised when it is loaded; "": floats
    token_ids: tuple[int, ...] = ()  # of `mtp`: those that it can propose, ascending; (): all

    @property
    def has_own_head(self) -> bool:
        """True for `mtp` with a copy of the target's head instead of that itself."""
        return self.method == "mtp" and bool(self.token_ids or self.head_quantization)

    @property
    def mixers(self) -> tuple[Attending, ...]:
        """The attention of each layer."""
        found = tuple(layer.mixer for layer in self.model.layers)
        assert not self.model.has_states, "a drafter with states is refused"
        return found  # type: ignore[return-value]

    def for_rank(self, shard: Shard) -> DraftSpec:
        """Return one rank's part. Raises `ModelError` if the model cannot be divided so."""
        return replace(self, model=self.model.for_rank(shard))
