"""Lookup in a request's own text: where its last tokens occurred before, what followed them may follow again."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.drafts.proposer import NO_PROPOSAL, Proposal
from engine.core.engine_request import EngineRequest

MAX_BASIS = 32  # tokens that are compared before an occurrence
AT_ONCE = 1024  # most tokens added at a time, so that long prompts of many requests do not delay a step
LEAST_SIZE = 1 << 10


class _Occurrences:
    """The newest occurrence of each n tokens in a growing text, by their hash. Another one with the same hash hides it.

    A list of about 30 bytes for each token.
    """

    def __init__(self, length: int) -> None:
        self._length, self._mask = length, 0
        self._end = length - 1  # tokens added so far, but for the first ones, which end no occurrence
        self._table: list[int] = []  # index of the token after the occurrence; 0: none

    def extend(self, text: Sequence[int], end: int) -> None:
        """Add the occurrences that end before index `end`, `AT_ONCE` of them at most."""
        table, length = self._table, self._length
        if 2 * end > len(table):  # room for twice as many, at most half full
            table = self._table = [0] * max(1 << (4 * end).bit_length(), LEAST_SIZE)
            self._mask, self._end = len(table) - 1, length - 1
        mask, start, end = self._mask, self._end + 1, min(end, self._end + AT_ONCE)
        if end == start:
            table[hash(tuple(text[end - length : end])) & mask] = end
        elif end > start:
            runs = zip(*(text[start - length + i : end - length + i + 1] for i in range(length)), strict=True)
            for after, hashed in enumerate(map(hash, runs), start):
                table[hashed & mask] = after
        self._end = max(self._end, end)

    def find(self, text: Sequence[int]) -> int:
        """Return the index after the newest occurrence of the text's last tokens; -1: there is none."""
        last = text[-self._length :]
        found = self._table[hash(tuple(last)) & self._mask] if self._table else 0
        return found if found and text[found - self._length : found] == last else -1


class NgramLookup:
    """The text of a request: what the client predicted, the prompt, and the output so far.

    As long as the output follows an earlier occurrence, the proposals go on there. Else they begin after the newest
    occurrence of the last tokens: of the longest run that occurs, of two lengths, where a long one is looked up only if
    a short one occurs. If that is less far back than there are tokens to propose, what followed it is repeated. If none
    occurs, the last token may stand for the one that was to follow, and the proposals go on after that one.
    """

    def __init__(self, least: int, longest: int, prediction: Sequence[int] = ()) -> None:
        """`least`, `longest`: tokens that must agree before a proposal."""
        self._least, self._short = least, _Occurrences(least)
        self._long = _Occurrences(longest) if longest > least else None
        self._text = list(prediction)
        self._num_predicted = len(self._text)
        self._num_known = 0  # tokens of prompt and output in the text
        self._source = 0 if self._text else -1  # index in the text of the next proposal; -1: none
        self._basis = 0

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        """See `Guesses.propose`."""
        new = token_ids[self._num_known :]
        is_first = not self._num_known
        self._text += new
        self._num_known = len(token_ids)
        if is_first:
            new = new[-1:]  # the first token of the output
        if self._source >= 0 and self._text[self._source : self._source + len(new)] == new:
            self._source += len(new)
            self._basis += len(new)
        else:
            after = self._after_replaced(new)
            self._source, self._basis = self._look_up()
            if self._source < 0:
                self._source = after
        text, source = self._text, self._source
        if source < 0:
            return NO_PROPOSAL
        if source < self._num_predicted:
            return Proposal(text[source : min(source + most, self._num_predicted)], self._basis, from_prediction=True)
        found = text[source : source + most]
        while len(found) < most:  # the text repeats what began at the source, and may do so again and again
            found += found[: most - len(found)]
        return Proposal(found, self._basis)

    def _after_replaced(self, new: Sequence[int]) -> int:
        """Return where the followed text goes on if the last of the `new` tokens stands for one of it; -1: nowhere."""
        source, kept = self._source, len(new) - 1
        if source < 0 or self._basis + kept < self._least or self._text[source : source + kept] != new[:-1]:
            return -1
        return source + len(new)

    def _look_up(self) -> tuple[int, int]:
        """Return the index after an earlier occurrence of the last tokens, and how many agree; (-1, 0): none."""
        text = self._text
        self._short.extend(text, len(text) - 1)
        source = self._short.find(text)
        if source < 0:
            return -1, 0
        if self._long is not None:
            self._long.extend(text, len(text) - 1)
            longer = self._long.find(text)
            source = longer if longer >= 0 else source
        basis, end = 0, len(text)
        while basis < min(MAX_BASIS, source) and text[source - 1 - basis] == text[end - 1 - basis]:
            basis += 1
        return source, basis


class NgramProposer:
    """Proposals by lookup in each request's own text, without a model."""

    def __init__(self, least: int, longest: int) -> None:
        """`least`, `longest`: tokens that must agree before a proposal; the longest agreement is tried first."""
        self._least, self._longest = least, longest

    def start(self, request: EngineRequest) -> NgramLookup:
        """See `Proposer.start`."""
        prediction = request.sampling.prediction or ()
        assert not isinstance(prediction, str), "the input processor makes token ids of it"
        return NgramLookup(self._least, self._longest, prediction)
