"""Drafts that cost nothing, for benchmarks whose acceptance is imposed."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.drafts.proposer import Guesses, Proposal
from engine.core.engine_request import EngineRequest


class RepeatingProposer:
    """Proposes the newest token again and again."""

    def start(self, request: EngineRequest) -> Guesses:
        """See `Proposer.start`."""
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        """See `Guesses.propose`."""
        return Proposal([token_ids[-1]] * most)
