"""Request bodies: bytes to JSON values, strictly. Knows JSON; no field and no endpoint."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

_decode = msgspec.json.decode
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class StrictJSONRoute(APIRoute):
    """Reads bodies as RFC 8259 has them, in UTF-8: NaN, halves of surrogate pairs and numbers beyond a double are 400.

    So whatever a request holds can be written into an answer again.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

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
