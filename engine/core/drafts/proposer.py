"""The interface of proposers, which guess the next tokens of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.core.engine_request import EngineRequest

CERTAIN = 1 << 30  # the `basis` of tokens that have no alternative
BY_MODEL = -1  # the `basis` of tokens that a drafter on the device has guessed


class Proposal(NamedTuple):
    """Guessed tokens, which follow those that are known."""

    token_ids: list[int]
    # What the guess rests on: the more, the likelier it is right. Of a lookup, how many tokens before it agree.
    basis: int = 0
    from_prediction: bool = False  # the tokens are of the text that the client predicted


NO_PROPOSAL = Proposal([])


class Guesses(Protocol):
    """Guesses the tokens of one request."""

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        """Return at most `most` tokens that may follow `token_ids`: prompt and output so far, which only grow."""


class Proposer(Protocol):
    """Guesses the tokens of requests."""

    def start(self, request: EngineRequest) -> Guesses:
        """Begin with a request. What this allocates ends with the request."""


class NoProposer:
    """Proposes nothing."""

    def start(self, request: EngineRequest) -> Guesses:
        """See `Proposer.start`."""
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        """See `Guesses.propose`."""
        return NO_PROPOSAL
