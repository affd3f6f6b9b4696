"""Errors of requests, before any API's format and before HTTP. `server.http.errors` gives each class its status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from engine import ParameterError

Names = Mapping[str, str]  # see `field_name`


class RequestError(Exception):
    """A request that is not served.

    `path`: names and indexes that lead to the invalid field of the request; empty if there is none. `lead`: text
    between the field's name and `reason` in the message; None: `reason` is the whole message. `details`:
    machine-readable details, for APIs whose errors have them.
    """

    def __init__(
        self, reason: str, *path: str | int, lead: str | None = ": ", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.path, self.lead, self.details = reason, path, lead, details
        self.param = field_name(path, {}) or None

    def spelled(self, names: Names) -> Self:
        """Use an API's names of fields from now on."""
        self.param = field_name(self.path, names) or None
        return self

    @property
    def message(self) -> str:
        return self.reason if self.param is None or self.lead is None else f"{self.param}{self.lead}{self.reason}"


class InvalidRequestError(RequestError):
    """The request is wrong, or asks for what is not supported."""


class NotPermittedError(RequestError):
    """The caller may not ask for this."""


class NotFoundError(RequestError):
    """The request names something that does not exist."""


class ConflictError(RequestError):
    """The request does not fit what happens at the same time: it was aborted, or other requests are in its way."""


class EngineFailedError(RequestError):
    """The engine failed before the output was complete."""


class UnavailableError(RequestError):
    """The engine is not running."""


class TimedOutError(RequestError):
    """The deadline passed before the output began."""


class BusyError(RequestError):
    """The queue is full, or the caller has reached a limit. `retry_after`: seconds until the next attempt."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class RateLimitError(BusyError):
    """The caller has reached a limit per minute."""


def invalid(error: ValueError) -> InvalidRequestError:
    """Return the error of a request for one of the engine's checks."""
    if isinstance(error, ParameterError):
        return InvalidRequestError(error.reason, *error.path, lead=error.lead)
    return InvalidRequestError(str(error))


def field_name(path: Sequence[str | int], names: Names) -> str:
    """Return an API's name of a field of the neutral request: `a[0].b`, unless `names` has another name for it.

    A key of `names` is a field with `[]` for every index, and also stands for all fields below it. Each `[]` in its
    value is filled with an index of the path.
    """
    for end in range(len(path), 0, -1):
        if (name := names.get(_joined(["" if isinstance(part, int) else part for part in path[:end]]))) is not None:
            head, *rest = name.split("[]")
            indexes = [part for part in path if isinstance(part, int)]
            return head + "".join(f"[{index}]{text}" for index, text in zip(indexes, rest, strict=False))
    return _joined(path)


def _joined(path: Sequence[str | int]) -> str:
    """Join a path. An empty part stands for any index."""
    parts = (f".{part}" if isinstance(part, str) and part else f"[{part}]" for part in path)
    return "".join(parts).removeprefix(".")


@contextmanager
def spelled(names: Names) -> Iterator[None]:
    """Convert the names of fields in errors of the block to an API's names."""
    try:
        yield
    except RequestError as error:
        error.spelled(names)
        raise
