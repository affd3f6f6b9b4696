"""Reads request bodies: within limits, as strict JSON, and in a thread if they are large."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import Scope

from engine.core.fairness.tenants import group_of
from engine.utils.fair_tasks import FairTasks
from server.generation.warnings import Warnings
from server.generation.workers import Workers
from server.http.bodies import Body, warnings_about
from server.http.callers import caller_of
from server.http.disconnect import disconnected, ended_by
from server.http.entrance import BEGIN_AT_ONCE
from server.http.errors import APIError, from_validation, unexpected
from server.http.limits import check_body, check_values, is_small
from server.http.surrogates import REPLACED, WARNING, replace_lone_surrogates
from server.observability.context import CURRENT

_decode = msgspec.json.decode
B = TypeVar("B", bound=Body)
T = TypeVar("T")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_FORM = "application/x-www-form-urlencoded"  # sent by `curl -d`, as in Ollama's documentation
_LARGE = "quire.large_body"  # key in the ASGI scope
_CLIENT_CLOSED = 499
_CLOSE = {"Connection": "close"}
_READ_AT_ONCE = 2  # parts of large bodies read in one iteration of the event loop
_MAX_HELD_BYTES = 256 << 20  # of all bodies in memory together; at least four times the maximum size


class StrictJSONRoute(APIRoute):
    """Reads bodies with the application's `Bodies`: `app.state.bodies`.

    An endpoint with a body takes `body` and `request` and returns a response. It is cancelled when the client
    disconnects. All other endpoints are left to the framework.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, endpoint = super().get_route_handler(), self.endpoint
        if "body" not in inspect.signature(endpoint).parameters:
            return handle
        body_type = TypeAdapter(typing.get_type_hints(endpoint, include_extras=True)["body"])

        async def handle_strictly(request: Request) -> Response:
            bodies: Bodies = request.app.state.bodies
            data = await bodies.receive(request)
            response: Response = Response(status_code=_CLIENT_CLOSED)
            async with ended_by(disconnected(request.receive)):
                try:
                    body = await bodies.checked(request, data, body_type)
                    response = await endpoint(body=body, request=request)
                except BaseException as error:
                    if type(error).__name__ != "PanicException":
                        raise
                    # From a Rust library; not an `Exception`, so nothing else would handle it.
                    raise unexpected(error) from None
            return response

        return handle_strictly


class Arrivals:
    """Receives bodies, within a limit for each body and one for all bodies in memory.

    One client cannot take all of that memory: a group of tenants that has less than its part is still served.
    """

    def __init__(self, max_bytes: int, timeout: float, limit: str = "") -> None:
        """`max_bytes`: limit of a body. `timeout`: seconds within which it must arrive. `limit`: suffix of the error
        message.
        """
        self._max_bytes, self._timeout, self._limit = max_bytes, timeout, limit
        self._num_held_bytes, self._max_held_bytes = 0, max(_MAX_HELD_BYTES, 4 * max_bytes)
        self._held = Counter[str]()  # group of tenants → bytes, never 0
        self._fair = FairTasks(_READ_AT_ONCE)

    async def receive(self, request: Request, tenant: str = "") -> bytes:
        """Receive a body, which counts towards the total until `release`. Parts after the first are read alternately
        between tenants.

        Raises `APIError` 413 if the body is too large, 408 if it takes too long, 503 if there are too many bodies.
        """
        if int(request.headers.get("content-length", 0)) > self._max_bytes:
            raise self._too_large(request)
        data, more = bytearray(), True
        try:
            async with asyncio.timeout(self._timeout):
                while more:
                    if data:
                        await self._fair.wait(tenant)
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise APIError(_CLIENT_CLOSED, "the client hung up")
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    data += chunk
                    self._hold(len(chunk), tenant)
                    if len(data) > self._max_bytes:
                        raise self._too_large(request)
                    if self._is_full_for(tenant):
                        reason = "too many large bodies are arriving: try again in 5 seconds"
                        raise APIError(503, reason, headers={"Retry-After": "5"})
        except BaseException as error:
            self.release(data, tenant)
            if isinstance(error, TimeoutError):
                reason = f"the body did not arrive within {self._timeout:g} seconds"
                raise APIError(408, reason, headers=_CLOSE) from None
            raise
        return bytes(data)

    def release(self, data: bytes | bytearray, tenant: str = "") -> None:
        self._hold(-len(data), tenant)

    def _hold(self, num_bytes: int, tenant: str) -> None:
        group = group_of(tenant)
        self._num_held_bytes += num_bytes
        self._held[group] += num_bytes
        if not self._held[group]:
            del self._held[group]

    def _is_full_for(self, tenant: str) -> bool:
        part = self._max_held_bytes // max(len(self._held), 1)
        return self._num_held_bytes > self._max_held_bytes and self._held[group_of(tenant)] > part

    def _too_large(self, request: Request) -> APIError:
        """Return a 413. The rest of the body is read and dropped, so that clients which send everything before they
        read get the response. A client that sent `Expect: 100-continue` sends no body, so its connection is closed: its
        next request would be taken for the body.
        """
        reason = f"the body may have at most {self._max_bytes} bytes{self._limit}"
        return APIError(413, reason, headers=_CLOSE if "expect" in request.headers else None)


class Bodies:
    """Reads request bodies: within limits, a few at a time, and in a thread if they are large.

    JSON follows RFC 8259, in UTF-8. NaN and numbers outside the range of doubles are refused and lone surrogates
    replaced, so that every value in a request can be encoded again in a response.
    """

    def __init__(self, max_bytes: int, timeout: float, workers: Workers, *, strict: bool) -> None:
        """`max_bytes`: limit of a body. `timeout`: seconds within which it must arrive. `strict`: see `Warnings`."""
        self._arrivals = Arrivals(max_bytes, timeout, " (--max-body-bytes of the server)")
        self._workers, self._strict, self._fair = workers, strict, FairTasks(BEGIN_AT_ONCE)

    async def receive(self, request: Request) -> bytes:
        """Receive a body, for `checked`, and record its arrival. Raises `APIError` like `Arrivals.receive`."""
        data = await self._arrivals.receive(request, caller_of(request).tenant(""))
        if (context := CURRENT.get()) is not None:
            context.arrived = context.arrived or monotonic()
        return data

    async def checked(self, request: Request, data: bytes, body_type: TypeAdapter[Any]) -> Any:
        """Decode and validate a received body. Raises `APIError` if it is invalid."""
        try:
            await self._fair.wait(caller_of(request).tenant(""))
            return await self._checked(request, data, body_type)
        finally:
            self._arrivals.release(data, caller_of(request).tenant(""))

    async def converted(
        self, request: Request, body: B, convert: Callable[[B], T], is_long: bool
    ) -> tuple[Warnings, T]:
        """Return the warnings about `body`, and `convert(body)`; see `converted` below."""

        def work() -> tuple[Warnings, T]:
            warnings = warnings_about(body, self._strict)
            if REPLACED in request.scope:
                warnings.add(WARNING, "body")
            return warnings, convert(body)

        tenant = caller_of(request).tenant("")
        return await self._workers.run(work, tenant=tenant) if is_long or is_large(request) else work()

    async def _checked(self, request: Request, data: bytes, body_type: TypeAdapter[Any]) -> Any:
        if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
            reason = f"bodies with Content-Encoding {encoding[:100]!r} are not supported: send it without compression"
            raise APIError(415, reason, headers={"Accept-Encoding": "identity"})
        if not _is_json(request):
            raise APIError(400, "the body must be a JSON object, sent with the header Content-Type: application/json")
        if is_small(data):
            return _read(data, body_type, request.scope)
        request.scope[_LARGE] = True
        return await self._workers.run(_read, data, body_type, request.scope, tenant=caller_of(request).tenant(""))


async def converted(
    request: Request, body: B, convert: Callable[[B], T], *, is_long: bool = False
) -> tuple[Warnings, T]:
    """Return the warnings about a checked body, and `convert(body)`. Large bodies, or `is_long`, run in a thread."""
    bodies: Bodies = request.app.state.bodies
    return await bodies.converted(request, body, convert, is_long)


def is_large(request: Request) -> bool:
    """Return whether processing the body may take more than a millisecond, so that it belongs in a thread."""
    return _LARGE in request.scope


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _FORM and request.scope["route"].path.startswith("/api/"):
        return not {"origin", "sec-fetch-site"} & set(request.headers)  # not sent by a browser
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _read(data: bytes, body_type: TypeAdapter[Any], scope: Scope) -> Any:
    if not data:
        raise APIError(400, "the body is empty: it must be a JSON object")
    check_body(data)
    decoded = _decoded(data.removeprefix(_BYTE_ORDER_MARK), scope)
    check_values(decoded)
    try:
        return body_type.validate_python(decoded)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def _decoded(data: bytes, scope: Scope) -> Any:
    try:
        return _decode(data)
    except (UnicodeDecodeError, msgspec.DecodeError):
        if (mended := replace_lone_surrogates(data)) != data:
            scope[REPLACED], data = True, mended
    except RecursionError:
        pass
    try:
        return _decode(data)
    except UnicodeDecodeError as error:
        fault = _first_fault(data, error)
        reason = f"it must be UTF-8 ({fault.reason} at byte {fault.start})"
    except RecursionError:
        reason = "it is nested too deeply"
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
    raise APIError(400, f"the body is not valid JSON: {reason}")


def _first_fault(data: bytes, error: UnicodeDecodeError) -> UnicodeDecodeError:
    """Return the error of decoding all of `data`. `error`: of decoding one string in it."""
    try:
        data.decode()
    except UnicodeDecodeError as whole:
        return whole
    return error
