"""The sender of a request, and what it may do."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.fairness.tenants import SEPARATOR

MAX_USER_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the server knows it. Callers with the same name are the same caller."""

    name: str = ""  # of the key; empty: the server requires no keys
    may_prioritise: bool = True  # whether its requests may set a `priority` below 0
    requests_per_minute: int | None = None  # None: no limit
    tokens_per_minute: int | None = None  # of prompts and outputs together; None: no limit
    address: str = ""  # of the client, if the server requires no keys
    is_admin: bool = False  # whether it may see other callers' requests and usage, and change what all share

    def tenant(self, user: str) -> str:
        """Return the tenant for fair scheduling: the key; without keys, the address, and the request's `user` there.

        An address is a group of tenants (see `group_of`): a client gets no more by inventing users.
        """
        if self.name:
            return f"key {self.name}"
        return f"address {self.address}" + (f"{SEPARATOR}user {user[:MAX_USER_LENGTH]}" if user else "")
