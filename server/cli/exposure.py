"""Detects what a server exposes by its settings: itself without a key, and at which addresses; or its key."""

from __future__ import annotations

import argparse
import ipaddress
import socket

from server.settings import ServerConfig

# Addresses reserved for documentation. Connecting a datagram socket sends nothing, but gives it the address that this
# machine would send from.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def reachable_urls(listener: socket.socket, scheme: str) -> list[str]:
    """Return the URLs under which other machines can reach the listener; none if only this machine can."""
    if listener.family not in _ELSEWHERE:
        return []
    address, port = listener.getsockname()[:2]
    own = ipaddress.ip_address(address.partition("%")[0])
    if own.is_loopback:
        return []
    found = [str(own)]
    if own.is_unspecified:
        families = [listener.family, *([socket.AF_INET] if listener.family == socket.AF_INET6 else [])]
        found = [each for each in map(_own_address, families) if each] or ["<the address of this machine>"]
    return [f"{scheme}://{f'[{each}]' if ':' in each else each}:{port}" for each in found]


def exposure_warning(settings: ServerConfig, listener: socket.socket) -> str | None:
    """Return a warning if others can reach the server and it requires no key, else None."""
    if settings.read_keys() is not None or settings.ssl_ca_certs:
        return None
    urls = reachable_urls(listener, "https" if settings.ssl_certfile else "http")
    if not urls:
        return None
    return (
        f"this server asks for no key: anyone who reaches {' or '.join(urls)} can use it. Give it keys (--api-key-file "
        "FILE, or the variable QUIRE_API_KEY), or keep it to this machine (--host 127.0.0.1)"
    )


def command_line_warning(args: argparse.Namespace) -> str | None:
    """Return a warning if the command line holds a key, else None."""
    if not getattr(args, "api_key", None):
        return None
    return (
        "--api-key: every user of this machine can read the key in the list of processes. Use --api-key-file FILE, or "
        "the variable QUIRE_API_KEY"
    )


def _own_address(family: socket.AddressFamily) -> str | None:
    """Return this machine's address as others see it, or None."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
