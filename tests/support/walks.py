"""Random walks through what a grammar allows, over a vocabulary of bytes."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLMatcher

from engine.structured.unique import Endings, UniqueItems

TOKENS = [bytes([i]) for i in range(256)] + [b"<s>", b"</s>"]
END = 257


ENDINGS = Endings(TOKENS)


def allowed_by(matcher: LLMatcher, unique: UniqueItems | None = None) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32).copy()
    if unique is not None:
        unique.narrow(mask, matcher, ENDINGS)
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def walk(matcher: LLMatcher, dice: random.Random, unique: UniqueItems | None = None) -> str | None:
    """A sentence of the grammar, its bytes chosen at random; None when it gets too long."""
    matcher = matcher.deep_copy()
    written = bytearray()
    for _ in range(3000):
        token = dice.choice(allowed_by(matcher, unique))
        assert matcher.consume_token(token), matcher.get_error()
        if unique is not None:
            unique.advance(TOKENS[token])
        if token == END:
            return written.decode()
        written.append(token)
    return None


def follows(matcher: LLMatcher, text: str, unique: UniqueItems | None = None) -> bool:
    """Return whether the text can be written as a whole."""
    matcher, written = matcher.deep_copy(), list(text.encode())
    if unique is None:
        return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()
    for byte in written:
        if byte not in allowed_by(matcher, unique):
            return False
        matcher.consume_token(byte)
        unique.advance(TOKENS[byte])
    return END in allowed_by(matcher, unique)
