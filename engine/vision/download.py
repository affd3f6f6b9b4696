"""Downloads files from web servers that the operator allows, and from nowhere else.

A name may lead anywhere, and a server may redirect anywhere. So every connection is made to an address that was checked
before: never to this machine or a private network.
"""

from __future__ import annotations

import ipaddress
import ssl
import time
from collections.abc import Collection
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from socket import SHUT_RDWR, SOCK_STREAM, create_connection, getaddrinfo, socket
from threading import Timer
from urllib.parse import SplitResult, urljoin, urlsplit

from engine.vision import decode
from engine.vision.decode import ImageError

MAX_SECONDS = 10.0  # of a download, redirects included
MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16


def download(url: str, domains: Collection[str]) -> bytes:
    """Return the file at `url`. `domains`: host names that may be asked; "*.example.org" allows those below it.

    Raises `ImageError`, which shows nothing of what other hosts answered.
    """
    deadline = time.monotonic() + MAX_SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, domains)
        try:
            with closing(_connect(parts, deadline)) as connection:
                timer = Timer(max(deadline - time.monotonic(), 0), _end, [connection.sock])
                timer.daemon = True
                timer.start()
                try:
                    found = _answer(connection, parts)
                finally:
                    timer.cancel()
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"{parts.hostname} cannot be read ({type(error).__name__})") from None
        if time.monotonic() >= deadline:  # what came may not be all
            raise ImageError(f"{parts.hostname} takes more than {MAX_SECONDS:g} s")
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise ImageError(f"{parts.hostname} redirects more than {MAX_REDIRECTS} times")


def _checked(url: str, domains: Collection[str]) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise ImageError("its URL is not valid") from None
    if parts.scheme not in ("http", "https") or not host or any(ord(each) <= 32 for each in url) or not url.isascii():
        raise ImageError("its URL is not valid")
    if parts.username is not None or port not in (None, 80, 443):
        raise ImageError("its URL may have no user name, and no port but 80 and 443")
    if not any(_matches(host, domain) for domain in domains):
        raise ImageError(f"{host[:100]} is not among --allowed-media-domains")
    return parts


def _matches(host: str, domain: str) -> bool:
    domain = domain.lower().rstrip(".")
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


def _connect(parts: SplitResult, deadline: float) -> HTTPConnection:
    """Connect to a checked address of the host."""
    is_secure = parts.scheme == "https"
    host, port = str(parts.hostname).rstrip("."), parts.port or (443 if is_secure else 80)
    found = getaddrinfo(host, port, type=SOCK_STREAM)
    if not found or not all(is_public(str(address[0])) for *_, address in found):
        raise ImageError(f"{host} is no public address")
    left = deadline - time.monotonic()
    if left <= 0:
        raise ImageError(f"{host} takes more than {MAX_SECONDS:g} s")
    connected = create_connection((str(found[0][4][0]), port), timeout=left)
    try:
        if is_secure:
            connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
    except BaseException:
        connected.close()
        raise
    connection = HTTPConnection(host, port, timeout=left)
    connection.sock = connected  # so that it does not look the name up again
    return connection


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the internet, whatever form it is embedded in."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _answer(connection: HTTPConnection, parts: SplitResult) -> bytes | str:
    """Return the file, or where else it is."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", target, headers={"User-Agent": "Quire", "Accept": "image/*", "Connection": "close"})
    response = connection.getresponse()
    location = response.getheader("Location")
    if response.status in _REDIRECTS and location:
        return location
    if response.status != 200:
        raise ImageError(f"{parts.hostname} answers with status {response.status}")
    return _body(response)


def _body(response: HTTPResponse) -> bytes:
    parts, size = [], 0
    while part := response.read(_CHUNK):
        parts.append(part)
        if (size := size + len(part)) > decode.MAX_BYTES:
            raise ImageError(f"the file has more than {decode.MAX_BYTES >> 20} MiB")
    if response.length:  # of what the server announced, so much is missing
        raise ImageError("the server ended the file early")
    return b"".join(parts)


def _end(connected: socket) -> None:
    """End a download that takes too long, so that waiting reads fail."""
    with suppress(OSError):  # it has ended
        connected.shutdown(SHUT_RDWR)
