"""Proposes with the multi-token prediction layer of the target's checkpoint, which is run for each token again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.models.attention import AttentionMetadata
from engine.models.drafters.mtp import MTPHead
from engine.worker.proposers.draft_cache import DrafterSetup
from engine.worker.proposers.following import FollowingProposer
from engine.worker.proposers.model_proposer import of_all_tokens
from engine.worker.proposers.proposer import HiddenStates


class MTPProposer(FollowingProposer):
    """Reads the target's last hidden states after its final norm, and then its own."""

    layers: Sequence[int] | None = ()

    def __init__(self, head: MTPHead, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self._head = head

    def states(self, hidden: HiddenStates, num_tokens: int) -> Tensor:
        """See `FollowingProposer.states`."""
        normed: Tensor = self._target.norm(hidden.last[:num_tokens])
        return normed

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """See `SuccessiveProposer.forward`."""
        found: Tensor = self._head(self._target.embed(ids), hidden, positions, self.cache.layers[0], metadata[0])
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """See `SuccessiveProposer.logits`. Tokens that a cut head cannot propose have -inf."""
        head = self._head.lm_head
        found = self._target.logits_of_normed(hidden, head)
        return found if head is None else of_all_tokens(found, head.token_ids, self._target.spec.vocab_size)
