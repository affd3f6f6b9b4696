"""Limits of requests and tokens per minute for each key, and OpenAI's `x-ratelimit-*` headers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import monotonic

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.callers import Caller, caller_in
from server.http.errors import APIError, ErrorFormats


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


class RateLimits:
    """The rate limits of all callers, in the memory of this process."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}  # by caller and kind

    def begin(self, caller: Caller) -> None:
        """Count a new request. Raises `APIError` 429 with Retry-After if the caller has no requests or tokens left."""
        buckets = self._of(caller)
        for kind, bucket in buckets.items():
            bucket.use(0)
            if bucket.level < 1:
                raise _refusal(kind, bucket)
        if (requests := buckets.get("requests")) is not None:
            requests.use(1)

    def use_tokens(self, caller: Caller, num_tokens: int) -> None:
        """Count tokens of a prompt or an answer. They are known only after the request has started, so they may cause a debt."""
        if (bucket := self._of(caller).get("tokens")) is not None:
            bucket.use(num_tokens)

    def headers(self, caller: Caller) -> dict[str, str]:
        found = {}
        for kind, bucket in self._of(caller).items():
            bucket.use(0)
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(int(bucket.level), 0))
            found[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.per_minute))
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


def _refusal(kind: str, bucket: _Bucket) -> APIError:
    seconds = max(math.ceil(bucket.seconds_until(1)), 1)
    reason = f"Rate limit reached: this key has {bucket.per_minute} {kind} per minute. Please try again in {seconds} s."
    return APIError(429, reason, headers={"Retry-After": str(seconds)})


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 20ms, 8.64s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, seconds = divmod(seconds, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{round(seconds, 2):g}s"


class RateLimitMiddleware:
    """Refuses POST requests beyond a caller's limits before reading them, and adds rate-limit headers to responses."""

    def __init__(self, app: ASGIApp, limits: RateLimits, formats: ErrorFormats) -> None:
        self._app, self._limits, self._formats = app, limits, formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = caller_in(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if caller is None or (caller.requests_per_minute is None and caller.tokens_per_minute is None):
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._limits.headers(caller))
            await send(message)

        try:
            self._limits.begin(caller)
        except APIError as error:
            await self._formats.response(error, scope["path"])(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)
