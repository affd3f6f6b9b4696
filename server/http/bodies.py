"""Request bodies: bytes to JSON values, strictly. Knows JSON; no field and no endpoint."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

_decode = msgspec.json.decode
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class StrictJSONRoute(APIRoute):
    """Reads bodies as RFC 8259 has them, in UTF-8: NaN, halves of surrogate pairs and numbers beyond a double are 400.

    So whatever a request holds can be written into an answer again. An endpoint that takes `body` and `request`, and
    returns a response, gets a valid body without the framework's search for other parameters; all else is left to that.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, endpoint = super().get_route_handler(), self.endpoint
        body_type = None
        if list(inspect.signature(endpoint).parameters) == ["body", "request"]:
            body_type = TypeAdapter(typing.get_type_hints(endpoint, include_extras=True)["body"])

        async def handle_strictly(request: Request) -> Response:
            request = _StrictRequest(request.scope, request.receive)
            if body_type is not None and request.headers.get("content-type") == "application/json":
                try:
                    body = body_type.validate_python(await request.json())
                except Exception:
                    return await handle(request)  # which says what is wrong
                response: Response = await endpoint(body=body, request=request)
                return response
            return await handle(request)

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = (await self.body()).removeprefix(_BYTE_ORDER_MARK)
        try:
            return _decode(body)
        except UnicodeDecodeError as error:
            reason = f"it must be UTF-8 ({error.reason} at byte {error.start})"
        except RecursionError:
            reason = "it is nested too deeply"
        except msgspec.DecodeError as error:
            reason = str(error).removeprefix("JSON is malformed: ")
        raise HTTPException(400, f"the body is not valid JSON: {reason}")
