"""The chat page: its address and its files, which need no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from server.observability.readiness import Readiness

STATIC = Path(__file__).resolve().parent / "static"


class PageFiles(StaticFiles):
    """The files of the chat page. Browsers revalidate them on each load, so that an upgrade replaces all modules at
    once.
    """

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def add_chat_page(app: FastAPI, starting: Readiness | None = None) -> None:
    """Add the page. `starting`: the state of an engine that is not ready; the page then has status 503, since some load
    balancers take it for a probe.
    """

    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        headers = {"Cache-Control": "no-cache", **(starting.headers if starting is not None else {})}
        return FileResponse(STATIC / "index.html", 200 if starting is None else 503, headers)

    app.mount("/static", PageFiles(directory=STATIC), name="static")
