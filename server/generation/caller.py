"""The sender of a request, and what it may do."""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass

from engine.core.fairness.tenants import SEPARATOR

MAX_USER_LENGTH = 256
_NETWORK_BYTES = 8  # of an IPv6 address: a client may use all addresses of its network


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the server knows it. Callers with the same name are the same caller."""

    name: str = ""  # of the key; empty: the server requires no keys
    may_prioritise: bool = True  # whether its requests may set a `priority` below 0
    requests_per_minute: int | None = None  # None: no limit
    tokens_per_minute: int | None = None  # of prompts and outputs together; None: no limit
    address: str = ""  # of the client, if the server requires no keys
    is_admin: bool = False  # whether it may see other callers' requests and usage, and change what all share
    adapters: frozenset[str] | None = None  # names of the LoRA adapters that it may use; None: all

    def may_use(self, adapter: str) -> bool:
        """Return whether it may use the LoRA adapter of this name. For others it is as if they did not exist."""
        return self.adapters is None or adapter in self.adapters

    def tenant(self, user: str) -> str:
        """Return the tenant for fair scheduling: the key; without keys, the address, and the request's `user` there.

        An address, or a network of the internet with IPv6, is a group of tenants (see `group_of`): a client gets no
        more by inventing users or addresses.
        """
        if self.name:
            return f"key {self.name}"
        return _group_of(self.address) + (f"{SEPARATOR}user {user[:MAX_USER_LENGTH]}" if user else "")


@functools.lru_cache(4096)
def _group_of(address: str) -> str:
    plain = f"address {address.replace(SEPARATOR, '')}"  # a proxy's header may hold anything
    if ":" not in address:
        return plain
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return plain
    if found.ipv4_mapped is not None:
        return f"address {found.ipv4_mapped}"
    if not found.is_global:  # other machines of this network, each with its address
        return plain
    return f"address {ipaddress.IPv6Address(found.packed[:_NETWORK_BYTES].ljust(16, bytes(1)))}{SEPARATOR}{address}"
