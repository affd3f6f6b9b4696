"""The chat page: its address and its files, which need no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, HTMLResponse
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


def add_chat_page(app: FastAPI, servers: Sequence[str] = (), starting: Readiness | None = None) -> None:
    """Add the page. `servers`: addresses of other servers that it may use, which are part of its policy.

    `starting`: the state of an engine that is not ready; the page then has status 503, since some load balancers take
    it for a probe.
    """

    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        headers = {"Cache-Control": "no-cache", **(starting.headers if starting is not None else {})}
        status = 200 if starting is None else 503
        if not servers:
            return FileResponse(STATIC / "index.html", status, headers)
        return HTMLResponse(page_with(servers), status, headers)

    app.mount("/static", PageFiles(directory=STATIC), name="static")


def page_with(servers: Sequence[str]) -> str:
    """Return the page with a policy that lets it use these servers."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    return page.replace("connect-src 'self'", f"connect-src 'self' {' '.join(servers)}")
