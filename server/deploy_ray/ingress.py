"""The ingress deployment: forwards each request to a replica of its model, and returns the response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.apis.openai.errors import error_body, failure
from server.deploy_ray.forwarded import ForwardedRequest, Head, forwarded
from server.http.errors import APIError
from server.http.reading import Arrivals

_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20  # limit of the ingress; a replica's own limit applies afterwards
SMALL_BODY_BYTES = 64 << 10  # larger bodies are decoded in a thread
PROBES = ("/health", "/livez", "/ping", "/readyz")


class OpenAiIngress:
    """All APIs of `quire serve` for several models. A body's `model` selects one; the default is the first."""

    def __init__(self, llm_deployments: Mapping[str, Any], body_timeout: float) -> None:
        """`llm_deployments`: model name → handle of its `LLMServer` deployment. `body_timeout`: seconds within which a
        body must arrive.
        """
        self._arrivals = Arrivals(MAX_BODY_BYTES, body_timeout)
        self._models = {
            name: handle.options(stream=True, method_name="respond") for name, handle in llm_deployments.items()
        }

    async def __call__(self, request: Request) -> Response:
        try:
            body = await self._arrivals.receive(request)
        except APIError as error:
            return _refusal(error)
        try:
            if len(body) <= SMALL_BODY_BYTES:
                forward = forwarded(request.scope, body)
            else:
                forward = await asyncio.to_thread(forwarded, request.scope, body)
            path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
            if request.method == "GET" and path == "/v1/models":
                return await self._list_models(forward)
            if path in PROBES:
                return await self._probe(forward)
            return await _streamed(self._handle(forward, path).remote(forward))
        except APIError as error:
            return _refusal(error)
        finally:
            self._arrivals.release(body)

    def _handle(self, request: ForwardedRequest, path: str) -> Any:
        """Return the handle for the requested model. Unknown names go to the first model, which refuses them."""
        name = request.model or path.removeprefix("/v1/models/")
        return self._models.get(name) or next(iter(self._models.values()))

    async def _list_models(self, request: ForwardedRequest) -> Response:
        """Merge the model lists of all deployments, or return the first error."""
        listed: list[Any] = []
        for handle in self._models.values():
            head, content = await _whole(handle.remote(request))
            if head[0] != HTTPStatus.OK:
                return _response(head, content)
            listed += json.loads(content)["data"]
        return _response(head, json.dumps({"object": "list", "data": listed}).encode())

    async def _probe(self, request: ForwardedRequest) -> Response:
        """Return the first negative answer of any model, else a positive one."""
        for handle in self._models.values():
            head, content = await _whole(handle.remote(request))
            if head[0] != HTTPStatus.OK:
                break
        return _response(head, content)


def _refusal(error: APIError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


async def _head(answer: Any) -> Head:
    """Return the status and headers of a response. Raises `APIError` if the replica is lost before."""
    try:
        status, headers = await anext(answer)
    except Exception as error:
        _log.warning("a replica did not answer: %s", error)
        raise APIError(503, "no replica answers at this moment: try again") from None
    return status, [header for header in headers if header[0] != b"x-request-id"]  # Ray Serve adds the same header


async def _streamed(answer: Any) -> Response:
    """Return a replica's response as a stream."""
    status, headers = await _head(answer)
    is_stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
    response = StreamingResponse(_rest(answer, is_stream), status)
    response.raw_headers = headers
    return response


async def _whole(answer: Any) -> tuple[Head, bytes]:
    """Return a complete small response."""
    return await _head(answer), b"".join([piece async for piece in answer])


def _response(head: Head, content: bytes) -> Response:
    status, headers = head
    response = Response(content, status)
    response.raw_headers = [header for header in headers if header[0] != b"content-length"]
    response.headers["Content-Length"] = str(len(content))
    return response


async def _rest(answer: Any, is_stream: bool) -> AsyncGenerator[bytes, None]:
    """Yield the body. If the replica is lost, a stream ends with an error event."""
    try:
        async for piece in answer:
            yield piece
    except Exception as error:
        _log.warning("a replica was lost with its answer: %s", error)
        if not is_stream:
            raise
        yield failure(APIError(500, "the replica that worked on the answer was lost"))
    finally:
        answer.cancel()
