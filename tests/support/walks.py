"""Random walks through what a grammar allows, over a vocabulary of bytes."""

from __future__ import annotations

import random

from llguidance import LLMatcher

TOKENS = [bytes([i]) for i in range(256)] + [b"<s>", b"</s>"]
END = 257


def allowed_by(matcher: LLMatcher) -> list[int]:
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return [i for i in range(len(TOKENS)) if bits >> i & 1]


def walk(matcher: LLMatcher, dice: random.Random) -> str | None:
    """A sentence of the grammar, its bytes chosen at random; None when it gets too long."""
    matcher = matcher.deep_copy()
    written = bytearray()
    for _ in range(3000):
        token = dice.choice(allowed_by(matcher))
        assert matcher.consume_token(token), matcher.get_error()
        if token == END:
            return written.decode()
        written.append(token)
    return None
