"""Limits of requests and tokens per minute for each key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from server.generation.caller import Caller
from server.generation.errors import RateLimitError


@dataclass(slots=True)
class _Bucket:
    """A token bucket that refills steadily, completely within a minute. Use beyond its level is a debt."""

    per_minute: int
    level: float = field(init=False)
    _time: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self._time = self.per_minute, monotonic()

    def use(self, amount: int) -> None:
        now = monotonic()
        self.level = min(self.level + (now - self._time) * self.per_minute / 60, self.per_minute) - amount
        self._time = now

    def seconds_until(self, level: float) -> float:
        """Return the seconds until the bucket reaches `level`, if nothing is used."""
        return max(level - self.level, 0) * 60 / self.per_minute


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rest of one of a caller's limits."""

    kind: str  # "requests" or "tokens"
    per_minute: int
    left: int
    seconds_until_full: float


class Limits(Protocol):
    """Who counts: `RateLimits`, or those of another process."""

    async def begin(self, caller: Caller) -> None: ...
    def use_tokens(self, caller: Caller, num_tokens: int) -> None: ...
    async def remaining(self, caller: Caller) -> list[Remaining]: ...


class RateLimits:
    """The rate limits of all callers, in the memory of this process."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}  # by caller and kind

    async def begin(self, caller: Caller) -> None:
        """Count a new request. Raises `RateLimitError` if the caller has no requests or tokens left."""
        buckets = self._of(caller)
        for kind, bucket in buckets.items():
            bucket.use(0)
            if bucket.level < 1:
                raise _refusal(kind, bucket)
        if (requests := buckets.get("requests")) is not None:
            requests.use(1)

    def use_tokens(self, caller: Caller, num_tokens: int) -> None:
        """Count tokens of a prompt or an output. They are known only after the request has started: there may be a
        debt.
        """
        if (bucket := self._of(caller).get("tokens")) is not None:
            bucket.use(num_tokens)

    async def remaining(self, caller: Caller) -> list[Remaining]:
        """Return what the caller has left of each of its limits."""
        found = []
        for kind, bucket in self._of(caller).items():
            bucket.use(0)
            seconds = bucket.seconds_until(bucket.per_minute)
            found.append(Remaining(kind, bucket.per_minute, max(int(bucket.level), 0), seconds))
        return found

    def _of(self, caller: Caller) -> dict[str, _Bucket]:
        limits = {"requests": caller.requests_per_minute, "tokens": caller.tokens_per_minute}
        found = {}
        for kind, per_minute in limits.items():
            if per_minute is not None:
                bucket = self._buckets.get((caller.name, kind))
                if bucket is None or bucket.per_minute != per_minute:  # the key file has changed
                    bucket = self._buckets[caller.name, kind] = _Bucket(per_minute)
                found[kind] = bucket
        return found


def _refusal(kind: str, bucket: _Bucket) -> RateLimitError:
    seconds = max(math.ceil(bucket.seconds_until(1)), 1)
    reason = f"Rate limit reached: this key has {bucket.per_minute} {kind} per minute. Please try again in {seconds} s."
    return RateLimitError(reason, seconds)
