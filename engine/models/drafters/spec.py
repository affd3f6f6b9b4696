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
    draft_vocab_size: int  # tokens that it can guess
    has_embedding: bool = False  # of its own; else it uses the target's
    norm_before_residual: bool = False  # the layer's residual is its normalised input
    norm_before_fc: bool = False  # the target's hidden states are normalised, all at once, before they are projected
    norm_output: bool = False  # the hidden states for the next guess are normalised


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A drafter. Its layers cache keys and values of the same tokens as the target's, in the same blocks."""

    method: Literal["draft_model", "mtp", "eagle3"]
    folder: Path  # of its checkpoint
    model: ModelSpec  # of `mtp` and `eagle3`: a decoder that has the drafter's layer alone
    eagle3: Eagle3Spec | None = None

    @property
    def mixers(self) -> tuple[Attending, ...]:
        """The attention of each layer."""
        found = tuple(layer.mixer for layer in self.model.layers)
        assert not self.model.has_states, "a drafter with states is refused"
        return found  # type: ignore[return-value]

    def for_rank(self, shard: Shard) -> DraftSpec:
        """Return one rank's part. Raises `ModelError` if the model cannot be divided so."""
        return replace(self, model=self.model.for_rank(shard))
