"""Proposes with an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.models.attention import AttentionMetadata
from engine.models.drafters.eagle3 import Eagle3Head
from engine.worker.proposers.draft_cache import DrafterSetup
from engine.worker.proposers.following import FollowingProposer
from engine.worker.proposers.model_proposer import of_all_tokens
from engine.worker.proposers.proposer import HiddenStates


class Eagle3Proposer(FollowingProposer):
    """Reads the residual stream of three layers of the target, and then its own."""

    def __init__(self, head: Eagle3Head, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self._head = head
        self.layers = [before - 1 for before in head.spec.target_layers]

    def states(self, hidden: HiddenStates, num_tokens: int) -> Tensor:
        """See `FollowingProposer.states`."""
        return self._head.combine([hidden.layers[layer][:num_tokens] for layer in self.layers or ()])

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """See `SuccessiveProposer.forward`."""
        own = self._head.embed_tokens
        embedded = self._target.embed(ids) if own is None else own(ids)
        found: Tensor = self._head(embedded, hidden, positions, self.cache.layers[0], metadata[0])
        return found

    def following(self, hidden: Tensor) -> Tensor:
        """See `SuccessiveProposer.following`."""
        return self._head.following(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `SuccessiveProposer.logits`. Tokens that the head cannot propose have -inf."""
        own = self._head.logits(hidden)
        return of_all_tokens(own, self._head.vocabulary.token_ids, self._target.spec.vocab_size)
