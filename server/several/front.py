"""The ASGI app of several models: finds the model of each request, and waits until it is awake."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import EngineError
from server.app import error_formats, guarded
from server.generation.errors import RequestError
from server.http.auth import is_open, key_of
from server.http.errors import APIError, with_status
from server.http.reading import Arrivals
from server.observability.context import ARRIVED
from server.settings import ServerConfig
from server.several.keep_alive import seconds_of
from server.several.pool import ModelPool, PooledModel

MAX_BODY_BYTES = 64 << 20  # the model's own limit applies afterwards
SMALL_BODY_BYTES = 64 << 10  # larger bodies are decoded in a thread
# What works while a model sleeps.
RESTING = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/api/show"),
    *("/sleep", "/reset_prefix_cache"),
)
# What is stored by the app of one of the models, and asked for by an id alone.
BY_ID = ("/v1/responses/", "/v1/conversations/", "/v1/requests/")
_NO_LIMIT = 1 << 53  # milliseconds
_EMPTYING = ("/api/chat", "/api/generate")  # without a prompt, and with keep_alive 0, the model sleeps


class _Fields(msgspec.Struct):
    model: Any = None
    keep_alive: Any = None
    prompt: Any = None
    messages: Any = None
    timeout_ms: Any = None

    @property
    def seconds(self) -> float:
        """Seconds from the arrival of the body to the end of the answer. An app refuses invalid limits."""
        is_limit = type(self.timeout_ms) is int and 0 < self.timeout_ms < _NO_LIMIT
        return self.timeout_ms / 1000 if is_limit else math.inf


class Front:
    """Passes each request to the app of its model."""

    def __init__(self, pool: ModelPool, settings: ServerConfig) -> None:
        self._pool, self._keys, self._formats = pool, settings.read_keys(), error_formats()
        limit = max(settings.max_body_bytes or 0, MAX_BODY_BYTES)
        self._arrivals = Arrivals(limit, settings.body_timeout, " (--max-body-bytes of the server)")
        self._app = guarded(self._dispatch, settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        default = self._pool.default.app
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not self._is_known(scope, path):
            assert default is not None
            await default(scope, receive, send)
        elif scope["method"] != "POST":
            apps = [each.app for each in self._pool.models if each.app is not None]
            await _first_found(apps if path.startswith(BY_ID) else apps[:1], scope, receive, send)
        else:
            await self._post(scope, path, receive, send)

    def _is_known(self, scope: Scope, path: str) -> bool:
        """Return whether the caller has a key, if that is needed: others wake no model."""
        return self._keys is None or is_open(path) or self._keys.find(key_of(scope)) is not None

    async def _post(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        request, body = Request(scope, receive), b""
        try:
            body = await self._arrivals.receive(request)
            arrived = scope[ARRIVED] = time.monotonic()
            if len(body) <= SMALL_BODY_BYTES:
                fields = _fields(body)
            else:
                fields = await asyncio.to_thread(_fields, body)
            again = _replayed(body, receive)
            name = request.query_params.get("model") or fields.model
            if not name and path.startswith(BY_ID):
                apps = [each.app for each in self._pool.models if each.app is not None]
                await _first_found(apps, scope, again, send)
                return
            model = self._model(name, path) if name else self._pool.default
            if model is None:  # the first model's app refuses it
                model = self._pool.default
            elif not self._is_empty(model, path, fields) and not (path in RESTING and model.app is not None):
                async with self._pool.lent(model, arrived + fields.seconds) as app:
                    await app(scope, again, send)
                    return
            assert model.app is not None
            await model.app(scope, again, send)
        except (RequestError, EngineError) as error:
            refusal = with_status(error) if isinstance(error, RequestError) else APIError(503, str(error))
            await self._formats.response(refusal, scope["path"])(scope, receive, send)
        finally:
            self._arrivals.release(body)

    def _model(self, name: object, path: str) -> PooledModel | None:
        """Return the model of a name in a request; None: there is none."""
        if not isinstance(name, str):
            return None
        found = self._pool.find(name)
        if found is None and path.startswith("/api/"):
            found = self._pool.find(name.removesuffix(":latest"))
        return found

    def _is_empty(self, model: PooledModel, path: str, fields: _Fields) -> bool:
        """Set the model's time to sleep. Returns whether a request only wants it to sleep now. Raises `APIError`."""
        if not path.startswith("/api/") or fields.keep_alive is None:
            return False
        seconds = seconds_of(fields.keep_alive)
        if seconds is None:
            raise APIError(400, 'must be seconds or a duration such as "5m"', "keep_alive")
        self._pool.set_keep_alive(model, seconds)
        return not seconds and path in _EMPTYING and not fields.prompt and not fields.messages and model.app is not None


def _fields(body: bytes) -> _Fields:
    """Return the fields of a body that matter here. Other bodies are left for an app to refuse."""
    try:
        return msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"), type=_Fields)
    except (ValueError, RecursionError):
        return _Fields()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives the body once more, and then what follows."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _first_found(apps: Sequence[ASGIApp], scope: Scope, receive: Receive, send: Send) -> None:
    """Answer by the first app that does not answer 404, else by the last one."""
    body = b""
    if len(apps) > 1:
        body = (await receive()).get("body", b"")
        receive_of = [_replayed(body, receive) for _ in apps]
    else:
        receive_of = [receive]
    for index, app in enumerate(apps):
        is_last, is_missing = index == len(apps) - 1, False

        async def tried(message: Message, is_last: bool = is_last) -> None:
            nonlocal is_missing
            if message["type"] == "http.response.start" and message["status"] == 404 and not is_last:
                is_missing = True
            if not is_missing:
                await send(message)

        await app(dict(scope), receive_of[index], tried)
        if not is_missing:
            return
