"""Names of tenants, between which the engine and the server are fair."""

from __future__ import annotations

SEPARATOR = "/"  # between a group and a tenant of it


def group_of(tenant: str) -> str:
    """Return the group that a tenant belongs to, often only the tenant itself.

    Fairness is between groups first, then between the tenants of each: a client that invents names is one group.
    """
    return tenant.partition(SEPARATOR)[0]
