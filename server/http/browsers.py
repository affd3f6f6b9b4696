"""Protects the server from other sites' pages in a visitor's browser."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Sequence
from socket import gethostname
from urllib.parse import urlsplit

from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.auth import PROBES
from server.http.errors import APIError, ErrorFormats

# Set on every response by the HTTP server: no content-type sniffing, no framing by other sites, no referrer on links in
# answers.
HEADERS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
)
_log = logging.getLogger(__name__)

# Domains in which a local network may name this machine, and this machine's names in its containers (Docker, Podman).
_LOCAL_DOMAINS = ("local", "lan", "internal", "home.arpa", "localdomain")
_IN_CONTAINERS = ("host.docker.internal", "host.containers.internal")
_PLAIN_NAME = re.compile(r"[a-z0-9._-]{1,100}")
_READING = ("GET", "HEAD", "OPTIONS")


class BrowserMiddleware:
    """Refuses requests that another site's page may have sent. Used on servers without keys; such a page would lack the
    key.

    - DNS rebinding: the name of the page resolves to this server, so the browser treats them as the same origin. The
      request's Host is then the page's name. Only addresses, names of this machine and `allowed_hosts` are accepted:
      any other name, with or without dots, may be one that another machine of the network gave itself.
    - Cross-site requests without a preflight: browsers mark them in `Sec-Fetch-Site` or `Origin`. GET, HEAD and OPTIONS
      are allowed, since the page cannot read the response.
    """

    def __init__(
        self, app: ASGIApp, formats: ErrorFormats, *, allowed_hosts: Sequence[str], allowed_origins: Sequence[str]
    ) -> None:
        """`allowed_hosts`: names allowed besides addresses and this machine's names; `*.a.b`: all subdomains of a.b;
        `*`: all names.
        """
        self._app, self._formats = app, formats
        self._hosts = own_names() | {host.lower().rstrip(".") for host in allowed_hosts}
        self._ends = (".localhost", *(host[1:] for host in self._hosts if host.startswith("*.")))
        self._origins = allowed_origins
        self._has_refused = False  # a host name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await self._formats.response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin", "")
        name = _name_in(host)
        if not self._is_ours(name) and scope["path"].removeprefix(scope.get("root_path", "")) not in PROBES:
            return self._unknown_host(name)
        if scope["method"] in _READING or "*" in self._origins or origin in self._origins:
            return None
        if _is_from_elsewhere(headers.get("sec-fetch-site"), origin, host):
            reason = f"pages of {origin[:100]!r} may not use this server: start it with --allowed-origins or with a key"
            return APIError(403, reason)
        return None

    def _unknown_host(self, name: str | None) -> APIError:
        """Return the refusal of a host name; log the first one for the operator, who does not see the response."""
        is_plain = name is not None and _PLAIN_NAME.fullmatch(name)
        reason = f"{name!r} is not known as a name of this server" if is_plain else "the Host header holds no host name"
        remedy = f"start it with --allowed-hosts {name if is_plain else 'NAME'}, or with a key (--api-key-file)"
        if not self._has_refused:
            self._has_refused = True
            _log.warning("refused a request: %s. If it is one, %s", reason, remedy)
        return APIError(403, f"{reason}: {remedy}")

    def _is_ours(self, name: str | None) -> bool:
        """`name`: in lower case; empty: the client sent none, and so is no browser; None: it is no name."""
        if "*" in self._hosts or name == "":
            return True
        if name is None:
            return False
        if name in self._hosts or name.endswith(self._ends):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # a page under an address comes from that machine itself


def own_names() -> set[str]:
    """Return the names of this machine that need no look-up, in lower case."""
    whole = gethostname().lower().rstrip(".")
    first = whole.partition(".")[0]
    return {"localhost", *_IN_CONTAINERS, whole, first, *(f"{first}.{domain}" for domain in _LOCAL_DOMAINS)}


def _name_in(host: str) -> str | None:
    """The name or address in a Host header, without its port, in lower case; None: it holds none."""
    if set(host) & set("/\\?#@ "):
        return None
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # of brackets, which are for addresses
        return None


def _is_from_elsewhere(site: str | None, origin: str, host: str) -> bool:
    """`site`: the header Sec-Fetch-Site, which browsers send to HTTPS and to this machine."""
    if site is not None:
        return site not in ("same-origin", "none")
    return bool(origin) and origin.partition("://")[2] != host


class PreflightMiddleware(CORSMiddleware):
    """Answers preflights of allowed origins, also of public pages that use this server in a private network."""

    def preflight_response(self, request_headers: Headers) -> Response:
        headers = request_headers.mutablecopy()
        is_private = headers.get(_PRIVATE) == "true"
        del headers[_PRIVATE]
        response = super().preflight_response(headers)
        if is_private and response.status_code == 200:
            response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response


_PRIVATE = "access-control-request-private-network"
