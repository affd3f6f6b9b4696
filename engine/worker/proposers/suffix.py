"""Lookup in earlier answers to the same caller: agents ask for much that they were told before.

The idea is that of suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): the longest suffix of the text that occurred
before says what follows, and the more occurrences agree, the further.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.drafts.proposer import NO_PROPOSAL, Guesses, Proposal, Proposer
from engine.core.engine_request import EngineRequest

MAX_SIZE = 1 << 21  # tokens of all earlier answers, 16 to 40 bytes each
MAX_OF_ANSWER = 4096  # newest tokens of an answer that are kept
AT_ONCE = 1024  # most tokens added at a time, so that no step is delayed
CANDIDATES = 8  # newest occurrences that are compared
LEAST_SIZE = 1 << 8
END = -1  # between answers


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """Limits of lookup in earlier answers, see `SpeculativeConfig`."""

    least: int = 3  # tokens that must agree
    max_depth: int = 24  # tokens whose agreement is compared
    max_answers: int = 10_000
    max_factor: float = 1.0  # tokens of a proposal for each one that agrees
    least_probability: float = 0.1  # that the last token of a proposal is right, by the occurrences


class EarlierAnswers:
    """The answers to one caller, and where each few tokens occurred in them."""

    def __init__(self, length: int) -> None:
        """`length`: tokens that must agree."""
        self._length = length
        self._text = array("i", [END])
        self._previous = array("i", [0])  # for each index of the text, an earlier one after equal tokens; 0: none
        self._table = array("i", [0]) * LEAST_SIZE  # by hash: the newest index after these tokens; 0: none
        self.starts = deque[int]()  # of the answers

    @property
    def size(self) -> int:
        """The memory that it takes, as a number of tokens."""
        return LEAST_SIZE + len(self._text)

    def add(self, answer: Sequence[int]) -> None:
        """Append an answer."""
        text, length = self._text, self._length
        if 2 * (len(text) + len(answer) + 1) > len(self._table):
            self._rebuild(4 * (len(text) + len(answer) + 1))
        previous, table, mask, start = self._previous, self._table, len(self._table) - 1, len(text)
        self.starts.append(start)
        text.extend(answer)
        text.append(END)
        previous.extend([0] * (len(answer) + 1))
        for after in range(start + length, start + len(answer)):
            at = hash(tuple(text[after - length : after])) & mask
            previous[after], table[at] = table[at], after

    def forget_half(self) -> None:
        """Forget the earlier half of the answers, but at least one."""
        for _ in range((len(self.starts) + 1) // 2):
            self.starts.popleft()
        first = self.starts[0] if self.starts else len(self._text)
        self._text = array("i", [END]) + self._text[first:]
        self.starts = deque(start - first + 1 for start in self.starts)
        self._rebuild(4 * len(self._text))

    def _rebuild(self, least_size: int) -> None:
        size = max(1 << (least_size - 1).bit_length(), LEAST_SIZE)
        self._table, self._previous = array("i", [0]) * size, array("i", [0]) * len(self._text)
        ends = [*(start - 1 for start in self.starts), len(self._text) - 1]
        for start, end in zip(self.starts, ends[1:], strict=True):
            for after in range(start + self._length, end):
                at = hash(tuple(self._text[after - self._length : after])) & (size - 1)
                self._previous[after], self._table[at] = self._table[at], after

    def propose(self, token_ids: Sequence[int], most: int, limits: SuffixLimits) -> Proposal:
        """Return what followed the longest suffix of `token_ids` that occurs in earlier answers."""
        last = array("i", token_ids[-limits.max_depth :])
        if len(last) < self._length:
            return NO_PROPOSAL
        found, basis = self._occurrences(last)
        most, probability, proposed = min(most, int(limits.max_factor * basis)), 1.0, list[int]()
        while found and len(proposed) < most:
            votes: dict[int, int] = {}
            for at in found:
                votes[self._text[at]] = votes.get(self._text[at], 0) + 1
            token = max(votes, key=votes.__getitem__)  # of equally many, the newest
            probability *= votes[token] / len(found)
            if token == END or probability < limits.least_probability:
                break
            proposed.append(token)
            found = [at + 1 for at in found if self._text[at] == token]
        return Proposal(proposed, basis) if proposed else NO_PROPOSAL

    def _occurrences(self, last: array[int]) -> tuple[list[int], int]:
        """Return the newest indices after the longest suffix of `last` that occurs, and its length; [], 0: none."""
        text, length, found, longest = self._text, self._length, list[int](), 0
        at = self._table[hash(tuple(last[-length:])) & (len(self._table) - 1)]
        for _ in range(CANDIDATES):
            if not at:
                break
            agree = 0
            while agree < len(last) and text[at - 1 - agree] == last[-1 - agree]:  # ends at END, no token
                agree += 1
            if agree >= length:
                if agree > longest:
                    found, longest = [], agree
                if agree == longest:
                    found.append(at)
            at = self._previous[at]
        return found, longest


class SuffixProposer:
    """Proposals by lookup in earlier answers to the same caller, and by another proposer in the request's own text.

    A caller is a tenant with a cache salt and an adapter: a caller's answers speed up no other's, which would tell what
    they were. Memory is bounded; the callers that were not seen for longest are forgotten first.
    """

    def __init__(self, limits: SuffixLimits, own: Proposer, max_size: int = MAX_SIZE) -> None:
        """`own`: proposes by the request's own text. `max_size`: of all earlier answers, see `EarlierAnswers.size`."""
        self._limits, self._own, self._max_size = limits, own, max_size
        self._callers: OrderedDict[tuple[str, str], EarlierAnswers] = OrderedDict()
        self._waiting: deque[tuple[tuple[str, str], list[int]]] = deque()  # answers to be added
        self.size = 0  # of all callers' answers

    def start(self, request: EngineRequest) -> Guesses:
        """See `Proposer.start`."""
        return _SuffixLookup(self, _caller(request), self._own.start(request))

    def finish(self, request: EngineRequest, answer: Sequence[int]) -> None:
        """Keep the answer to a request that has finished."""
        if len(answer) > self._limits.least:
            self._waiting.append((_caller(request), list(answer[-MAX_OF_ANSWER:])))

    def propose(self, caller: tuple[str, str], token_ids: Sequence[int], most: int) -> Proposal:
        """Return a proposal by the caller's earlier answers."""
        if self._waiting:
            self._add(*self._waiting.popleft())
        answers = self._callers.get(caller)
        return NO_PROPOSAL if answers is None else answers.propose(token_ids, most, self._limits)

    def _add(self, caller: tuple[str, str], answer: list[int]) -> None:
        if len(answer) > AT_ONCE:  # the rest comes later; a few tokens are in both parts
            self._waiting.appendleft((caller, answer[AT_ONCE - self._limits.max_depth :]))
            answer = answer[:AT_ONCE]
        answers = self._callers.get(caller)
        if answers is None:
            answers = self._callers[caller] = EarlierAnswers(self._limits.least)
            self.size += answers.size
        self._callers.move_to_end(caller)
        before = answers.size
        answers.add(answer)
        if len(answers.starts) > self._limits.max_answers or answers.size > self._max_size // 2:
            answers.forget_half()
        self.size += answers.size - before
        while self.size > self._max_size:
            _, oldest = self._callers.popitem(last=False)
            self.size -= oldest.size


class _SuffixLookup:
    def __init__(self, earlier: SuffixProposer, caller: tuple[str, str], own: Guesses) -> None:
        self._earlier, self._caller, self._own = earlier, caller, own

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        """See `Guesses.propose`. What rests on more tokens is preferred."""
        own = self._own.propose(token_ids, most)
        found = self._earlier.propose(self._caller, token_ids, most)
        return found if (found.token_ids and found.basis > own.basis) or not own.token_ids else own


def _caller(request: EngineRequest) -> tuple[str, str]:
    return request.tenant, request.cache_scope
