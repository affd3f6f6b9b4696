"""Proposes with the multi-token prediction layer of the target's checkpoint, which is run for each token again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.drafters.mtp import MTPHead
from engine.models.drafters.spec import DraftSpec
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions
from engine.worker.proposers.following import FollowingProposer
from engine.worker.proposers.proposer import HiddenStates
from kernels.data.layout import RowState


class MTPProposer(FollowingProposer):
    """Reads the target's last hidden states after its final norm, and then its own."""

    layers: Sequence[int] | None = ()

    def __init__(
        self,
        head: MTPHead,
        target: Decoder,
        spec: DraftSpec,
        layout: KVCacheLayout,
        options: RunnerOptions,
        state: RowState,
    ) -> None:
        super().__init__(spec, layout, options, state)
        self._head, self._target = head, target

    @property
    def input_width(self) -> int:
        """See `SuccessiveProposer.input_width`."""
        return self._target.spec.hidden_size

    @property
    def output_width(self) -> int:
        """See `SuccessiveProposer.output_width`."""
        return self._target.spec.hidden_size

    def states(self, hidden: HiddenStates, num_tokens: int) -> Tensor:
        """See `FollowingProposer.states`."""
        normed: Tensor = self._target.norm(hidden.last[:num_tokens])
        return normed

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """See `SuccessiveProposer.forward`."""
        found: Tensor = self._head(self._target.embed(ids), hidden, positions, self.kv_cache[0], metadata[0])
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """See `SuccessiveProposer.logits`."""
        return self._target.logits_of_normed(hidden)
