"""`quire` in a web of which the attacker owns a part: `python -m tests.attack.imagined_web serve …`.

Names of `ADDRESSES` lead where the table says, one address after the other at each look-up. A connection to the public
address reaches the attacker's server at the first port of the variable `PORTS`; one to any other address of the table
reaches the second, which may never happen.
"""

from __future__ import annotations

import os
import socket
import sys
from itertools import cycle
from typing import Any

from engine.vision import download

PORTS = "QUIRE_ATTACK_PORTS"
PUBLIC, PRIVATE = "93.184.215.14", "10.0.0.7"
ADDRESSES = {
    "pictures.example.org": [PUBLIC],
    "other.example.org": [PUBLIC],
    "inside.example.org": [PRIVATE],
    "rebound.example.org": [PUBLIC, "127.0.0.1", PRIVATE],  # another one each time
}
DOMAINS = "pictures.example.org", "inside.example.org", "rebound.example.org", "169.254.169.254", PRIVATE


def imagine(web: int, canary: int) -> None:
    """Change how this process downloads. web, canary: ports of this machine."""
    changed: Any = download
    look_up, connect = changed.getaddrinfo, changed.create_connection
    answers = {name: cycle(addresses) for name, addresses in ADDRESSES.items()}
    imagined = {address for addresses in ADDRESSES.values() for address in addresses} - {"127.0.0.1"}

    def imagined_look_up(host: str, port: int, **options: Any) -> Any:
        if host not in answers:
            return look_up(host, port, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers[host]), port))]

    def imagined_connect(address: tuple[str, int], **options: Any) -> Any:
        host = address[0]
        if host not in imagined and host not in answers:
            return connect(address, **options)
        # A name here was looked up before: now it leads to the next address.
        is_public = (next(answers[host]) if host in answers else host) == PUBLIC
        return connect(("127.0.0.1", web if is_public else canary), **options)

    changed.getaddrinfo, changed.create_connection = imagined_look_up, imagined_connect


if __name__ == "__main__":
    imagine(*map(int, os.environ[PORTS].split(",")))
    from server.cli.main import main

    sys.exit(main())
