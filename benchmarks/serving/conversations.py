"""Conversations for `bench serve`: each turn repeats all turns before it, after one of a few system prompts.

Tokens are random, but for the answers: a turn repeats those that the server gave, so the server must return their ids.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from benchmarks.serving.client import Answer, Failure
from benchmarks.workloads import Request

STOPPED = "no token ids"  # cause of a failure


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """Shape of conversations. Lengths in tokens; those of turns and answers vary by `range_ratio`, as `random`'s do."""

    num_at_once: int
    num_turns: int
    num_system_prompts: int  # the first one is the most common: the n-th one has 1/n of its conversations
    system_len: int
    turn_len: int
    output_len: int
    range_ratio: float
    thinking_seconds: float  # the mean of an exponential distribution: from an answer to the next turn
    vocab_size: int
    seed: int


class Conversation:
    """One conversation. The same number has the same tokens and lengths in every run, but for the answers."""

    def __init__(self, shape: ConversationShape, number: int) -> None:
        """Begin it. The first `num_at_once` ones end after fewer turns, so that not all others begin together."""
        self._shape, self._random = shape, random.Random(f"{shape.seed} {number}")
        weights = [1 / (1 + i) for i in range(shape.num_system_prompts)]
        (system,) = self._random.choices(range(shape.num_system_prompts), weights)
        self._tokens = random.Random(f"{shape.seed} system {system}").choices(
            range(shape.vocab_size), k=shape.system_len
        )
        is_first = number < shape.num_at_once
        self.num_turns_left = 1 + number % shape.num_turns if is_first else shape.num_turns

    def next_turn(self) -> Request:
        """Return the request of the next turn."""
        ids = self._random.choices(range(self._shape.vocab_size), k=self._length(self._shape.turn_len))
        self._tokens = self._tokens + ids
        self.num_turns_left -= 1
        return Request(self._tokens, self._length(self._shape.output_len))

    def answered(self, token_ids: list[int]) -> float:
        """Add an answer. Return the seconds until the next turn."""
        self._tokens = self._tokens + token_ids
        mean = self._shape.thinking_seconds
        return self._random.expovariate(1 / mean) if mean else 0.0

    def _length(self, mean: int) -> int:
        spread = int(mean * self._shape.range_ratio)
        return max(self._random.randint(mean - spread, mean + spread), 1)


class Conversations:
    """Goes on with so many conversations at once. One that is over, or whose request failed, is followed by another."""

    def __init__(self, shape: ConversationShape, ask: Callable[[Request], Awaitable[Answer]]) -> None:
        """`ask`: sends a request, and keeps the events of the answer."""
        self._shape, self._ask = shape, ask
        self._numbers = itertools.count()
        self._current = [Conversation(shape, next(self._numbers)) for _ in range(shape.num_at_once)]

    async def run(self, count: int, answered: Callable[[], object]) -> list[Answer]:
        """Send `count` requests and return their answers. The next call goes on from there."""
        answers: list[Answer] = []
        tickets = iter(range(count))

        async def converse(index: int) -> None:
            for _ in tickets:  # those of all conversations
                conversation = self._current[index]
                answer = await self._ask(conversation.next_turn())
                answers.append(answer)
                answered()
                seconds = conversation.answered(token_ids_of(answer))
                if not answer.ok or not conversation.num_turns_left:
                    self._current[index] = Conversation(self._shape, next(self._numbers))
                if seconds and len(answers) < count:
                    await asyncio.sleep(seconds)

        await asyncio.gather(*map(converse, range(len(self._current))))
        return answers


def token_ids_of(answer: Answer) -> list[int]:
    """The tokens of an answer whose events were kept. An answer without them has failed from now on."""
    if not answer.ok:
        return []
    choices = (msgspec.json.decode(event.removeprefix(b"data:"))["choices"][0] for event in answer.events or [])
    found = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
    if not found:
        failure = Failure(STOPPED, "conversations need a server with return_token_ids, such as Quire and vLLM")
        answer.cause, answer.error = failure.cause, str(failure)
    return found
