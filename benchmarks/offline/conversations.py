"""Conversations that go on from turn to turn with a stepped engine; each request repeats all turns before it."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from dataclasses import dataclass, field

from benchmarks.offline.stepped import Stepped

TOP = 250  # token ids of prompts are below


@dataclass(slots=True)
class Conversation:
    """One of those at once. Those that end are followed by new ones, whose system prompt and turns are others'."""

    number: int
    num_turns: int  # until it ends
    tokens: list[int] = field(default_factory=list)
    ready: float = 0.0  # when the next turn begins
    sent: float = 0.0
    is_first_token: bool = True


class Conversations:
    """Conversations with one engine, from turn to turn. They stand at different turns from the start."""

    def __init__(self, engine: Stepped, args: argparse.Namespace) -> None:
        self._engine, self._args = engine, args
        self._numbers = itertools.count()
        self._rng = random.Random(3)
        self.times_to_first: list[float] = []
        self.num_turns = 0
        self._waiting = [self._new(next(self._numbers) % args.turns) for _ in range(args.conversations)]
        self._running: dict[str, Conversation] = {}
        self.run(float("inf"), args.conversations)

    def _new(self, num_done: int = 0) -> Conversation:
        """Return a conversation with so many turns behind it."""
        args = self._args
        tokens = [self._rng.randrange(1, TOP) for _ in range(num_done * (args.turn_tokens + args.answer_tokens))]
        return Conversation(next(self._numbers), args.turns - num_done, tokens)

    def run(self, seconds: float, most: float = float("inf")) -> float:
        """Go on for so many seconds, or turns. Returns turns a second. Turns that run then end after the clock."""
        self.times_to_first, self.num_turns, begun = [], 0, 0
        begin = now = time.perf_counter()
        while now < begin + seconds and self.num_turns < most:
            for conversation in [each for each in self._waiting if each.ready <= now and begun < most]:
                self._begin(conversation, now)
                begun += 1
            if self._engine.has_work():
                self._step()
            now = time.perf_counter()
        num_turns, num_first = self.num_turns, len(self.times_to_first)
        while self._running:
            self._step()
        del self.times_to_first[num_first:]
        return num_turns / (now - begin)

    def _begin(self, conversation: Conversation, now: float) -> None:
        self._waiting.remove(conversation)
        conversation.tokens += [self._rng.randrange(1, TOP) for _ in range(self._args.turn_tokens)]
        conversation.sent, conversation.is_first_token = now, True
        self._running[str(conversation.number)] = conversation
        self._engine.add(str(conversation.number), list(conversation.tokens), self._args.answer_tokens)

    def _step(self) -> None:
        for new in self._engine.step():
            now = time.perf_counter()
            conversation = self._running[new.request]
            if new.token_ids and conversation.is_first_token:
                conversation.is_first_token = False
                self.times_to_first.append(now - conversation.sent)
            conversation.tokens += new.token_ids
            if new.is_end:
                self._end(self._running.pop(new.request), now)

    def _end(self, conversation: Conversation, now: float) -> None:
        self.num_turns += 1
        conversation.num_turns -= 1
        if not conversation.num_turns:
            conversation = self._new()
        conversation.ready = now + (self._rng.expovariate(1 / self._args.thinking) if self._args.thinking else 0)
        self._waiting.append(conversation)
