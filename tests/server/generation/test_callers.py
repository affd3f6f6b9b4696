"""The tenants between which callers are fair."""

from __future__ import annotations

import pytest

from engine.core.fairness.tenants import group_of
from server.generation.caller import Caller


@pytest.mark.parametrize(
    ("address", "tenant", "group"),
    [
        ("192.0.2.7", "address 192.0.2.7/user u", "address 192.0.2.7"),
        ("::ffff:192.0.2.7", "address 192.0.2.7/user u", "address 192.0.2.7"),
        ("2a00:1450:4001:82b::200e", "address 2a00:1450:4001:82b::/2a00:1450:4001:82b::200e/user u",
         "address 2a00:1450:4001:82b::"),
        ("fe80::1%eth0", "address fe80::1%eth0/user u", "address fe80::1%eth0"),
        ("fd00::1", "address fd00::1/user u", "address fd00::1"),
        ("", "address /user u", "address "),
        ("a/b:c", "address ab:c/user u", "address ab:c"),
    ],
)  # fmt: skip
def test_tenants_without_keys(address: str, tenant: str, group: str) -> None:
    caller = Caller(address=address)
    assert caller.tenant("u") == tenant
    assert group_of(caller.tenant("u")) == group_of(caller.tenant("")) == group


def test_a_client_with_a_network_of_addresses_is_one_group() -> None:
    tenants = [Caller(address=f"2a00:1450:4001:82b:{i:x}::1").tenant("") for i in range(160)]
    assert len(set(tenants)) == 160
    assert len(set(map(group_of, tenants))) == 1


def test_a_key_is_one_tenant() -> None:
    assert Caller("alice", address="192.0.2.7").tenant("bob") == Caller("alice").tenant("") == "key alice"
